"""Notebooks from sources with ``# %%`` cells, in which ``{{key}}`` stands for a sentence of lowtri.sentences.

A notebook is executed cell by cell in this process, and its outputs are stored as text: what a cell printed, and the value of its
last expression. A reader who runs it sees pictures as well.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path
from typing import Any

from lowtri.sentences import filled, texts

SOURCES = Path(__file__).parent / "source"
MOST_TEXT = 4000  # characters of an output that are stored
FILLED = {"t": "4", "n": "6", "half_ten": "0.00005"}  # what sentences of the lesson leave open
COMMA = {"id"}  # languages that write 0,5


def sources() -> dict[str, str]:
    """Name -> source, in the order of reading."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.py"))}


def translated(source: str, language: str) -> str:
    """A source in a language; the markup of hues is the page's, and falls away."""
    words = texts(language)
    numbers = {name: value.replace(".", ",") if language in COMMA else value for name, value in FILLED.items()}

    def sentence(match: re.Match[str]) -> str:
        if match[1] == "LANG":
            return language
        return re.sub(r"\[[qkvw]:([^\]]+)\]", r"\1", filled(words[match[1]], numbers))

    return re.sub(r"\{\{([\w.]+)\}\}", sentence, source)


def cells_of(script: str) -> list[dict[str, Any]]:
    """The cells of a script, in the format of Jupyter notebooks, version 4.5.

    >>> [cell["cell_type"] for cell in cells_of("# %% [markdown]\\n# Text\\n\\n# %%\\nprint(1)\\n")]
    ['markdown', 'code']
    """
    cells: list[dict[str, Any]] = []
    for kind, body in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script, re.S | re.M):
        text = body.strip("\n")
        cell = {"cell_type": "markdown" if kind else "code", "id": f"cell-{len(cells)}", "metadata": {}}
        source = re.sub(r"^# ?", "", text, flags=re.M) if kind else text
        cells.append(cell | {"source": source} | ({} if kind else {"outputs": [], "execution_count": None}))
    return cells


def notebook(script: str) -> dict[str, Any]:
    """A script as a notebook without outputs."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells_of(script), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def execute(content: dict[str, Any]) -> None:
    """Run the cells of a notebook from top to bottom, and store their outputs in it.

    Raises:
        whatever a cell raises.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _run(cell["source"], cell["id"], names)
        cell["execution_count"], cell["outputs"] = number, []
        if text := printed.getvalue():
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": _short(text)})
        if value is not None:
            data = {"text/plain": _short(repr(value))}
            result = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
            cell["outputs"].append(result)


def _run(source: str, name: str, names: dict[str, Any]) -> Any:
    """Run a cell. Returns the value of its last line, if that is an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), name, "eval"), names)


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n...\n"
