"""Converts a script with `# %%` cells to a Jupyter notebook.

python examples/notebook.py examples/lesson.py lesson.ipynb
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from lowtri.files import write_text

__all__ = ["notebook"]


def notebook(script: str) -> dict[str, Any]:
    """The cells of a script, in the format of Jupyter notebooks, version 4.5.

    >>> [cell["cell_type"] for cell in notebook("# %% [markdown]\\n# Text\\n\\n# %%\\nprint(1)\\n")["cells"]]
    ['markdown', 'code']
    """
    cells: list[dict[str, Any]] = []
    for kind, body in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script, re.S | re.M):
        text = body.strip("\n")
        cell = {"cell_type": "markdown" if kind else "code", "id": f"cell-{len(cells)}", "metadata": {}}
        source = re.sub(r"^# ?", "", text, flags=re.M) if kind else text
        cells.append(cell | {"source": source} | ({} if kind else {"outputs": [], "execution_count": None}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    content = notebook(options.script.read_text(encoding="utf-8"))
    write_text(options.out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
