"""Converts a script with `# %%` cells to a Jupyter notebook, in one of the lesson's languages.

python examples/notebook.py examples/lesson.py lesson.ipynb --lang id
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from lowtri.files import write_text
from lowtri.sentences import LANGUAGES, texts
from notebooks.build import notebook

_DEFINITION = re.compile(r"^def say\(.*?\n(?=\S)", re.S | re.M)
_LANGUAGE = re.compile(r"^import sys\n|^LANG = .*$", re.M)
_SAID = re.compile(r"^(?:# %%\n)?say\((.*)\)\n", re.M)


def in_language(script: str, language: str) -> str:
    """The script with the sentences that it says as cells of text, the first of each as a heading.

    >>> print(in_language('# %%\\nsay("quiz.q3")\\nprint(1)\\n', "en"))
    # %% [markdown]
    # ## What goes wrong with −1e9 in float16?
    <BLANKLINE>
    # %%
    print(1)
    <BLANKLINE>
    """
    words = texts(language)

    def cells(match: re.Match[str]) -> str:
        title, *others = (words[key] for key in re.findall(r'"([\w.]+)"', match[1]))
        level = "#" if match[1] == '"title"' else "##"
        prose = [re.sub(r"\[[qkvw]:([^\]]+)\]", r"\1", text) for text in (f"{level} {title}", *others)]
        return "\n".join(["# %% [markdown]", "\n#\n".join(f"# {text}" for text in prose), "", "# %%", ""])

    script = _LANGUAGE.sub(lambda match: f'LANG = "{language}"' if match[0].startswith("LANG") else "", script)
    return _SAID.sub(cells, _DEFINITION.sub("", script))


def converted(script: str, language: str) -> dict[str, Any]:
    """The notebook of a script in a language, without empty cells."""
    content = notebook(in_language(script, language))
    content["cells"] = [cell for cell in content["cells"] if cell["source"]]
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lang", default="en", choices=list(LANGUAGES))
    options = parser.parse_args()
    content = converted(options.script.read_text(encoding="utf-8"), options.lang)
    write_text(options.out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
