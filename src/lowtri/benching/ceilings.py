"""The maximum rates at which this CPU multiplies and reads: the limits that measured rates are compared with.

Multiplication: only the kernels' register tile, on operands that stay in the L1 cache. Reading: a loop that sums what it reads. Both
run on the kernels' own threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.kernels.abi import MULTIPLY, MULTIPLY_DEPTH, MULTIPLY_ROWS, READ
from lowtri.kernels.library import code
from lowtri.kernels.spec import QUERIES, KernelSpec, symbol
from lowtri.kernels.target import ISA
from lowtri.kernels.threads import run_team

_FLOATS = (MULTIPLY_ROWS + QUERIES) * MULTIPLY_DEPTH + MULTIPLY_ROWS * QUERIES  # of a thread
_FLOAT32 = KernelSpec("float32", "direct", ISA)
_REPEATS = 10_000  # about 20 ms on one core


def in_pairs(dtype: str) -> bool:
    """Whether this CPU multiplies the dtype in pairs; what it does not is multiplied as float32."""
    return dtype == "bf16" and ISA.has_pairs


def multiply_flops(threads: int, pairs: bool) -> int:
    """How many multiplications and additions one run of :func:`multiply` is."""
    return 2 * MULTIPLY_ROWS * QUERIES * MULTIPLY_DEPTH * _REPEATS * threads * (2 if pairs else 1)


def multiply(threads: int, pairs: bool, repeats: int = _REPEATS) -> np.ndarray[Any, Any]:
    """Run the register tile on every thread; returns the products (threads, rows, 64), so that they can be checked."""
    memory = np.empty(threads * _FLOATS + 16, np.float32)
    skip = -memory.ctypes.data // 4 % 16  # rows of 64 floats start where lines of memory do
    scratch = memory[skip : skip + threads * _FLOATS].reshape(threads, _FLOATS)
    scratch.view(np.uint32)[:] = 0x3F803F80 if pairs else 0x3F800000  # ones, in pairs or alone
    record = np.zeros(1, MULTIPLY.dtype)
    record["scratch"], record["repeats"] = scratch.ctypes.data, repeats
    spec = KernelSpec("bfloat16", "pairs", ISA) if pairs else _FLOAT32
    run_team(code(symbol("multiply", spec)), record.ctypes.data, threads)
    return scratch[:, -MULTIPLY_ROWS * QUERIES :].reshape(threads, MULTIPLY_ROWS, QUERIES)


def read(address: int, size: int, threads: int) -> float:
    """Read ``size`` bytes once, whole blocks of 64 KB only; returns their sum in float32, so that it can be checked."""
    block = 2**16
    tasks = size // block
    sums = np.zeros((tasks, 16), np.float32)
    record = np.zeros(1, READ.dtype)
    record["source"], record["tasks"], record["block"], record["sums"] = address, tasks, block, sums.ctypes.data
    run_team(code(symbol("read", _FLOAT32)), record.ctypes.data, threads)
    return float(sums.sum())
