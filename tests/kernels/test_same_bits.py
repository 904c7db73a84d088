"""The library's functions against the same functions compiled in memory: two here, all of them in the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from same_bits_cases import JOBS, same_bits
from test_contract_by_isa import python, runs_here

from lowtri.kernels.isa import ALL

SAMPLE = [name for name, job in JOBS.items() if job.function in ("read", "rms_norm")]


@pytest.mark.compiler
@pytest.mark.parametrize("symbol", SAMPLE)
def test_two_functions_in_the_library_are_those_in_memory(symbol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_bits(symbol, monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("isa", [isa.name for isa in ALL if runs_here(isa.name)])
def test_every_function_in_the_library_is_that_in_memory(isa: str) -> None:
    cases = Path(__file__).with_name("same_bits_cases.py")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases), isa=isa)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
