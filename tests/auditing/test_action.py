"""The GitHub Action: its steps, run in a shell as the runner does, with an installer that records what it is asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
RIGHT = "import torch\ndef make_model():\n    return torch.nn.Linear(3, 3), torch.randn(2, 6, 3)\n"
WRONG = "import torch\ndef make_model():\n    return lambda x: x.flip(1), torch.randn(2, 6, 3)\n"


def run(folder: Path, **inputs: str) -> tuple[int, str, dict[str, str]]:
    """The exit code, the log, and what the steps wrote: the summary, the outputs, the installer's arguments."""
    tools = folder / "tools"
    tools.mkdir()
    python = tools / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1 $2" = "-m pip" ]; then shift 2; echo "$@" >> {folder}/pip; exit 0; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    values = {name: one.get("default", "") for name, one in ACTION["inputs"].items()} | inputs
    expressions = {"github.action_path": str(ROOT)} | {f"inputs.{name}": value for name, value in values.items()}
    log, code = "", 0
    for step in ACTION["runs"]["steps"]:
        environment = {
            name: re.sub(r"\$\{\{ (.*?) \}\}", lambda found: expressions[found[1]], text)
            for name, text in step["env"].items()
        }
        environment |= {"GITHUB_STEP_SUMMARY": str(folder / "summary"), "GITHUB_OUTPUT": str(folder / "output")}
        environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        assert "${{" not in step["run"], "an input in the text of a script would be run"
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        log, code = log + done.stdout + done.stderr, done.returncode
        if code:
            break
    written = {name: (folder / name).read_text() for name in ("summary", "output", "pip") if (folder / name).exists()}
    return code, log, written


@pytest.mark.sweep
def test_a_leak_fails_the_build_and_names_the_target(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    code, log, written = run(
        tmp_path,
        targets="right.py:make_model\nwrong.py:make_model\n",
        arguments="--conditions\neval\n--mask\ncausal & window(6)",
        report="audits",
        extras="transformers",
    )
    assert code == 1
    assert written["pip"] == f"install {ROOT}[transformers]\n"
    assert "::group::lowtri audit right.py:make_model\n" in log and "no leak found against causal & window(6)" in log
    assert "::error title=lowtri audit wrong.py:make_model::leak against causal & window(6): position 0 sees" in log
    assert written["output"] == "failed<<LOWTRI_END\nwrong.py:make_model\nLOWTRI_END\n"
    assert "### wrong.py:make_model\n\n```\n" in written["summary"]
    assert sorted(path.name for path in (tmp_path / "audits").iterdir()) == [
        "right.py_make_model.html",
        "wrong.py_make_model.html",
    ]


@pytest.mark.parametrize(("target", "expected"), [("right.py:make_model", 0), ("absent.py:make_model", 2)])
def test_exit_codes(tmp_path: Path, target: str, expected: int) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    code, _, written = run(tmp_path, targets=target, arguments="--conditions\neval")
    assert code == expected
    assert written["pip"] == f"install {ROOT}\n"
    failed = "" if expected == 0 else target
    assert written["output"] == f"failed<<LOWTRI_END\n{failed}\nLOWTRI_END\n"
