"""The workflows call the targets of the Makefile, on every system and every Python that lowtri is written for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SYSTEMS = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "windows-2025"}


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def targets_called(command: str) -> list[str]:
    """The targets of each ``make`` in a command: its words that set no variable."""
    calls = re.findall(r"^make (.*)$", command, re.M)
    return [word for call in calls for word in re.sub(r'\S+="[^"]*"|\S+=\S+', "", call).split()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_target_that_is_called_exists(path: Path) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert phony is not None
    called = [target for job in read(path).values() for command in commands(job) for target in targets_called(command)]
    assert set(called) <= set(phony[1].split())
    if path.name == "ci.yml":
        assert set(called) >= {"lint", "test", "test-newest", "sweeps", "test-floor", "docs", "dist"}


def test_targets_are_read_from_commands() -> None:
    assert targets_called('make PYTHON=python VENV="$X/a b" test docs\necho make lint\nmake nothing') == [
        "test",
        "docs",
        "nothing",
    ]


def test_the_tests_run_on_every_system_and_every_python() -> None:
    job = read(ROOT / ".github" / "workflows" / "ci.yml")["tests"]
    matrix = job["strategy"]["matrix"]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)\"", text), "the classifiers"
    assert matrix["python"][0] == re.findall(r'requires-python = ">=(.*)"', text)[0]
    assert set(matrix) == {"os", "python"} and set(matrix["os"]) == SYSTEMS
    assert job["runs-on"] == "${{ matrix.os }}" and commands(job)[-1] == "make PYTHON=python test"
    assert job["strategy"]["fail-fast"] is False


def test_the_newest_versions_run_weekly_on_the_newest_python() -> None:
    path = ROOT / ".github" / "workflows" / "ci.yml"
    text = path.read_text(encoding="utf-8")
    newest = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[-1]
    assert re.search(r"^  schedule:\n    - cron: \"\d+ \d+ \* \* \d\"", text, re.M)
    (command,) = commands(read(path)["newest"])
    assert f"PYTHON_NEWEST=python{newest} " in command and targets_called(command) == ["test-newest"]
    assert "step test-newest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
