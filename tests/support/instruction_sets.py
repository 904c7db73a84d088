"""Programs of tests on another instruction set than this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

__all__ = ["run_on_baseline"]


def run_on_baseline(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, on one thread, with the kernels of baseline x86-64."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOWTRI_ISA": "baseline"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
