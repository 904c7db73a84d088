"""The precision contract on every instruction set that this CPU runs; the others are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from subprocesses import python

from lowtri.kernels import target
from lowtri.kernels.isa import ALL

CASES = Path(__file__).with_name("contract_cases.py")


def runs_here(name: str) -> bool:
    return next(isa for isa in ALL if isa.name == name).runs_on(target.features(), target._MACHINE)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [isa.name for isa in ALL])
def test_the_contract_holds_or_the_instruction_set_is_refused(name: str) -> None:
    if runs_here(name):
        done = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES), timeout=1800, LOWTRI_ISA=name)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
    else:
        call = "import numpy, lowtri; x = numpy.ones((70, 64), 'f4'); lowtri.attention(x, x, x, 'causal', engine='cpu')"
        done = python("-c", call, LOWTRI_ISA=name)
        assert done.returncode != 0
        assert f"EngineError: LOWTRI_ISA is '{name}', which this CPU does not have." in done.stderr, done.stderr[-2000:]
