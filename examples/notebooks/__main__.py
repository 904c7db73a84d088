"""Builds the notebooks of examples/notebooks from their sources: five subjects in four languages, with outputs.

python examples/notebooks                          # all, into examples/notebooks/LANGUAGE
python examples/notebooks --languages en --out out/notebooks
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(EXAMPLES)]  # the package notebooks

from lowtri.files import write_text  # noqa: E402
from lowtri.sentences import LANGUAGES  # noqa: E402
from notebooks.build import execute, notebook, sources, translated  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--languages", nargs="+", default=list(LANGUAGES), choices=list(LANGUAGES))
    parser.add_argument("--out", type=Path, default=EXAMPLES / "notebooks")
    options = parser.parse_args()
    for language in options.languages:
        folder = options.out / language
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in sources().items():
            content = notebook(translated(source, language))
            execute(content)
            write_text(folder / f"{name}.ipynb", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            print(f"{language}/{name}.ipynb", flush=True)


if __name__ == "__main__":
    main()
