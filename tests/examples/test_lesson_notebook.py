"""The lesson as a notebook: it runs as a script, its cells run one by one, and it uses public names only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lowtri
from lowtri.sentences import LANGUAGES, texts, without_markup
from notebook import notebook

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = (EXAMPLES / "lesson.py").read_text(encoding="utf-8")


def test_its_cells_run_in_order(capsys: Any) -> None:
    cells = notebook(SCRIPT)["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], cell["id"], "exec"), names)
    printed = capsys.readouterr().out
    assert "0.3606" in printed and "leak against causal" in printed
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    prose = [line for line in SCRIPT.splitlines() if line and not line.startswith("#")]
    assert [line for line in code.splitlines() if line and not line.startswith("#")] == prose  # no line is lost
    assert all(not cell["source"].startswith("# %%") for cell in cells) and len(cells) >= 16


def test_it_converts(tmp_path: Path) -> None:
    out = tmp_path / "lesson.ipynb"
    command = [sys.executable, str(EXAMPLES / "notebook.py"), str(EXAMPLES / "lesson.py"), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content == notebook(SCRIPT) and content["nbformat"] == 4
    assert content["cells"][0]["source"].startswith("# Masked self-attention, step by step")


@pytest.mark.parametrize("language", LANGUAGES)
def test_it_speaks_four_languages(language: str) -> None:
    command = [sys.executable, str(EXAMPLES / "lesson.py"), "--lang", language]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for key in ("why.title", "matrix.p1", "quiz.a1", "explain.output"):
        assert without_markup(texts(language)[key]) in done.stdout


def test_it_uses_public_names_only() -> None:
    for node in ast.walk(ast.parse(SCRIPT)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert all(not module.startswith("lowtri.") or module == "lowtri.sentences" for module in modules)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lowtri":
            assert node.attr in lowtri.__all__
