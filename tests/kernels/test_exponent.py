"""2 ** x in the kernels, against float64 over a grid."""

from __future__ import annotations

from typing import Any

import build_kernels
import double_double as two
import numpy as np
import pytest
from numba import types

from lowtri.kernels import threads
from lowtri.kernels.abi import Abi
from lowtri.kernels.device import RecordType
from lowtri.kernels.isa import Avx512
from lowtri.kernels.simd import DEGREES, ERRORS, exp2, exp2m1, load, store
from lowtri.kernels.spec import KernelSpec
from lowtri.kernels.target import ISA

VECTORS = Abi("vectors", ("x", "power", "less_one"), {"bytes": np.int64})
EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
pytestmark = pytest.mark.compiler


def powers(call: Any) -> None:
    """2 ** x, and 2 ** x - 1, of whole vectors."""
    for offset in range(0, call.bytes, 64):
        x = load(call.x + offset, call.spec)
        store(call.power + offset, exp2(x, call.spec))
        store(call.less_one + offset, exp2m1(x, call.spec))


def computed(dtype: str, x: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """2 ** x and 2 ** x - 1 by the kernels' functions for arrays of this dtype."""
    rows = "widened" if DEGREES[dtype] < 6 else "direct"
    power, less_one = np.empty_like(x), np.empty_like(x)
    record = np.zeros(1, VECTORS.dtype)
    record["x"], record["power"], record["less_one"] = (array.ctypes.data for array in (x, power, less_one))
    record["bytes"] = x.nbytes
    code = build_kernels.compiled(powers, types.void(RecordType(VECTORS.dtype, KernelSpec(dtype, rows, ISA))))
    threads.run_team(code, record.ctypes.data, 1)
    return power, less_one


@pytest.mark.parametrize("dtype", DEGREES)
def test_the_error_is_below_the_stated_one_everywhere(dtype: str) -> None:
    """Every 2 ** -18th between -2 and 2, a million numbers down to the least exponent, and one below 0 at each magnitude."""
    kind = "float64" if dtype == "float64" else "float32"
    least = -1022.0 if kind == "float64" else -126.0
    x = np.concatenate([np.arange(-(2**19), 2**19) / 2**18, np.linspace(least, 8, 2**20), -(2.0 ** -np.arange(64.0))])
    x = x.astype(kind)
    power, less_one = computed(dtype, x)
    exact, scale = two.exp2(two.Two(x.astype(np.float64), np.zeros(x.shape)))  # times 2 ** scale
    off = (np.ldexp(power.astype(np.float64), -scale) - exact.high) - exact.low
    assert np.max(np.abs(off / exact.high)) <= ERRORS[DEGREES[dtype]] + EPS[kind]
    whole = x == np.round(x)
    assert np.array_equal(power[whole], np.ldexp(1.0, x[whole].astype(int)).astype(kind))  # powers of 2 are exact
    near = two.plus(two.Two(np.ldexp(exact.high, scale), np.ldexp(exact.low, scale)), two.Two(-1.0, 0.0))
    assert np.all(np.abs((less_one - near.high) - near.low) <= 4 * EPS[kind] * np.abs(near.high))


@pytest.mark.parametrize("dtype", DEGREES)
def test_what_is_hidden_weighs_nothing_and_nan_stays(dtype: str) -> None:
    kind = "float64" if dtype == "float64" else "float32"
    lowest = np.finfo(kind).min
    x = np.array([-np.inf, lowest, -3e38, -1e5, np.nan, -0.0, 0.0, *[1.0] * 9], kind)
    if kind == "float32":  # a NaN may carry any bits
        x[4:5].view(np.uint32)[:] = 0x7FC001FF
    power, _ = computed(dtype, x)
    assert np.array_equal(power[:4], np.zeros(4)) and np.isnan(power[4]) and np.array_equal(power[5:], [1, 1, *[2] * 9])


def test_the_fraction_is_an_instruction_of_avx512dq() -> None:
    assert "avx512dq" in Avx512.features
