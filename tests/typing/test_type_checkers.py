"""The public names as a user's type checker sees them: what it infers, and which mistakes it finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowtri

HERE = Path(__file__).parent


@pytest.mark.sweep
def test_mypy_infers_what_calls_return_and_finds_mistakes(tmp_path: Path) -> None:
    """``mypy --strict`` with no other setting, as a user may have it, and lowtri as an installed package."""
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = true\n")
    cache = HERE.parents[1] / ".mypy_cache" / "user_code"
    files = sorted(str(path) for path in HERE.glob("*_code.py"))
    assert len(files) == 2
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", f"--cache-dir={cache}", *files],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(lowtri.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
