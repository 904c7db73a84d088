"""The recipes of CONTRIBUTING.md: their blocks of code, and a copy of the package to execute them in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import lowtri

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def blocks(title: str) -> list[str]:
    """The blocks of code of the section with this title."""
    section = CONTRIBUTING.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    return [textwrap.dedent(block) for block in re.findall(r" *```(?:python|text)\n(.*?) *```", section, re.S)]


def copy_of_lowtri(folder: Path) -> Path:
    """The package in a copy of the checkout in this folder, which compiles the kernels that it changes."""
    source = Path(lowtri.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source.parents[1] / "tools", folder / "tools", ignore=ignored)
    return shutil.copytree(source, folder / "src" / "lowtri", ignore=ignored)


def replace_line(file: Path, start: str, line: str) -> None:
    """Replace the one line of a file that starts with ``start``."""
    text, count = re.subn(rf"^{re.escape(start)}.*$", lambda _: line, file.read_text(encoding="utf-8"), flags=re.M)
    assert count == 1, f"{file} has {count} lines that start with {start!r}"
    file.write_text(text, encoding="utf-8")


def run(code: str, folder: Path, **environment: str) -> str:
    """What Python prints for this code, where ``import lowtri`` imports the copy in the folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), **environment}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout
