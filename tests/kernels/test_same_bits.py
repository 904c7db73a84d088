"""The library's functions against the same functions compiled in memory: the short ones here, all of them in the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from same_bits_cases import JOBS, same_bits
from subprocesses import python
from test_contract_by_isa import runs_here

from lowtri.kernels.isa import ALL, PERMISSION
from lowtri.kernels.target import ISA

SAMPLE = [name for name, job in JOBS.items() if job.function in ("hidden", "read", "multiply")]


@pytest.mark.compiler
@pytest.mark.parametrize("symbol", SAMPLE)
def test_short_functions_in_the_library_are_those_in_memory(symbol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_bits(symbol, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("isa", [isa.name for isa in ALL if runs_here(isa.name)])
def test_every_function_in_the_library_is_that_in_memory(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba compiles for the instruction set's own CPU: with others, it fuses multiplications that the baseline does not."""
    cases = Path(__file__).with_name("same_bits_cases.py")
    name = next(one for one in ALL if one.name == isa)
    compiled_for = ISA if name.cpu == "native" else name  # tiles are emulated on this machine's own instructions
    monkeypatch.setenv("NUMBA_CPU_NAME", compiled_for.cpu)
    features = ",".join(f"+{feature}" for feature in sorted(compiled_for.features - {PERMISSION}))
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases), timeout=1800, LOWTRI_ISA=isa)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
