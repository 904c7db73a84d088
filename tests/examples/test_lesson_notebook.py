"""The lesson as a notebook: it runs as a script, its cells run one by one, and it uses public names only."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lowtri
from lowtri.sentences import LANGUAGES, texts, without_markup
from notebook import converted

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = (EXAMPLES / "lesson.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
def test_its_cells_run_in_order_in_four_languages(language: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = converted(SCRIPT, language)["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert cell["source"] and not cell["source"].startswith("# %%")
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], cell["id"], "exec"), names)
    printed = capsys.readouterr().out
    own = texts(language)
    assert "0.3606" in printed and "leak against causal" in printed and own["explain.output"] in printed
    assert all(word in printed for word in own["sentence.cat"].split(" ") + own["sentence.example"].split(" "))
    prose = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    said = re.findall(r"^say\((.*)\)$", SCRIPT, re.M)
    assert len(said) == len(prose) > 10, "what the script prints is text in the notebook"
    for keys, text in zip(said, prose, strict=True):
        assert text.startswith("#") and all(
            re.sub(r"\[[qkvw]:([^\]]+)\]", r"\1", own[key]) in text for key in re.findall(r'"([\w.]+)"', keys)
        )
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    lost = [line for line in SCRIPT[SCRIPT.index("\n# %%") :].splitlines() if line and line not in code.splitlines()]
    assert all(line.startswith(("# %%", "say(", "LANG =", "import sys", "def say", "    ")) for line in lost)
    assert "say(" not in code and f'LANG = "{language}"' in code


def test_it_converts(tmp_path: Path) -> None:
    out = tmp_path / "lesson.ipynb"
    command = [sys.executable, str(EXAMPLES / "notebook.py"), str(EXAMPLES / "lesson.py"), str(out), "--lang", "th"]
    subprocess.run(command, check=True, capture_output=True)
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content == converted(SCRIPT, "th") and content["nbformat"] == 4


@pytest.mark.sweep
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
