"""What is built: the modules that are there, whatever an earlier build left; and what an old setuptools is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
BUILD = "import sys, build_backend; print(build_backend.build_wheel(sys.argv[1]))"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small package that is built as lowtri is, but for its kernels, whose file is written in place of compiling."""
    folder = tmp_path / "checkout"
    package = folder / "src" / "lowtri"
    (package / "deep").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "build_backend.py", folder / "tools")
    (folder / "tools" / "build_kernels.py").write_text(
        "from pathlib import Path\n"
        "native = Path('src/lowtri/kernels/native')\n"
        "native.mkdir(parents=True, exist_ok=True)\n"
        "(native / 'index.json').write_text('{}')\n"
    )
    (folder / "README.md").write_text("lowtri\n")
    (package / "_version.py").write_text('__version__ = "0.0"\n')
    for name in ("__init__.py", "stays.py", "leaves.py", "deep/__init__.py", "kernels/__init__.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("")
    return folder


def build(checkout: Path, out: Path) -> set[str]:
    """The files of lowtri in the wheel."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "tools")}
    command = [sys.executable, "-c", BUILD, str(out)]
    ran = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    with zipfile.ZipFile(out / ran.stdout.split()[-1]) as wheel:
        return {name for name in wheel.namelist() if name.startswith("lowtri/")}


def test_a_build_has_only_the_modules_that_are_there(checkout: Path, tmp_path: Path) -> None:
    first = build(checkout, tmp_path / "first")
    assert {"lowtri/leaves.py", "lowtri/deep/__init__.py", "lowtri/kernels/native/index.json"} < first
    (checkout / "src" / "lowtri" / "leaves.py").unlink()
    shutil.rmtree(checkout / "src" / "lowtri" / "deep")
    second = build(checkout, tmp_path / "second")
    assert first - second == {"lowtri/leaves.py", "lowtri/deep/__init__.py"} and second < first


def test_an_old_setuptools_is_told_which_one_is_needed(tmp_path: Path) -> None:
    (tmp_path / "setuptools.py").write_text('__version__ = "76.1"\n')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tools")])}
    ran = subprocess.run(
        [sys.executable, "-c", "import build_backend"], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 1
    assert ran.stderr == (
        "lowtri: building needs setuptools 77 or newer, and 76.1 is installed.\n"
        "Fix: pip install 'setuptools>=77', or leave out --no-build-isolation\n"
    )
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert requires == ["setuptools>=77"]
