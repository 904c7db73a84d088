"""The precision contract on every instruction set that this CPU runs; the others are refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtri.kernels import target
from lowtri.kernels.isa import ALL

CASES = Path(__file__).with_name("contract_cases.py")


def python(*arguments: str, isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOWTRI_ISA": isa}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1800)


def runs_here(name: str) -> bool:
    return next(isa for isa in ALL if isa.name == name).runs_on(target.features(), target._MACHINE)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [isa.name for isa in ALL])
def test_the_contract_holds_or_the_instruction_set_is_refused(name: str) -> None:
    if runs_here(name):
        done = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES), isa=name)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
    else:
        call = "import numpy, lowtri; x = numpy.ones((70, 64), 'f4'); lowtri.attention(x, x, x, 'causal', engine='cpu')"
        done = python("-c", call, isa=name)
        assert done.returncode != 0
        assert f"EngineError: LOWTRI_ISA is '{name}', which this CPU does not have." in done.stderr, done.stderr[-2000:]
