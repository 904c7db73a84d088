"""Converts a script with `# %%` cells to a Jupyter notebook.

python examples/notebook.py examples/lesson.py lesson.ipynb
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lowtri.files import write_text
from notebooks.build import notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    content = notebook(options.script.read_text(encoding="utf-8"))
    write_text(options.out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
