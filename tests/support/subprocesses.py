"""Processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["printed", "python"]


def python(*arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, ``"-c", code`` for code, which may be indented; on one thread unless the environment says more.

    The process can import the helpers of tests. A wrong instruction set ends a process without an exception.
    """
    paths = [str(Path(__file__).parent), environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *map(textwrap.dedent, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout)


def printed(*arguments: str, timeout: float = 300, **environment: str) -> str:
    """What ``python`` prints; a process that fails is an error, with the end of what it printed."""
    done = python(*arguments, timeout=timeout, **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.strip()
