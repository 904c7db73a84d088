# mypy: disable-error-code="attr-defined, call-arg, var-annotated"
"""The maximum rates at which this CPU multiplies and reads: the limits that measured rates are compared with.

Multiplication: only the kernels' register tile, on operands that stay in the L1 cache. Reading: a loop that sums what it reads. Both
run on the kernels' own threads. Numba compiles the three loops for the types of their arguments, which mypy cannot see.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.kernels.abi import Abi
from lowtri.kernels.compilation import compiled
from lowtri.kernels.product import product
from lowtri.kernels.record import take
from lowtri.kernels.select import SPECS
from lowtri.kernels.simd import add, load, splat, store
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.target import ISA
from lowtri.kernels.threads import run_team

__all__ = ["in_pairs", "multiply", "multiply_flops", "read"]

# 24 rows x 64 steps x 64 columns: A 6 KB, B 16 KB and C 6 KB fit into 32 KB together.
_ROWS, _DEPTH = 24, 64
_A, _B, _C = 4 * _ROWS * _DEPTH, 4 * _DEPTH * QUERIES, 4 * _ROWS * QUERIES
_REPEATS = 10_000  # about 20 ms on one core

_FLOATS, _PAIRS = SPECS["forward", "float32", "direct"], SPECS["forward", "bfloat16", "pairs"]
_MULTIPLY = Abi("multiply", (), {"repeats": np.int64})
_READ = Abi("read", ("source", "sums"), {"block": np.int64})


def _multiplying(call: Any) -> None:
    """Every thread repeats one product, in its own scratch memory."""
    a = call.scratch + (_A + _B + _C) * take(call.next_thread)
    for _ in range(call.repeats):
        product(a, _DEPTH, 1, a + _A, QUERIES, a + _A + _B, QUERIES, _ROWS, _DEPTH, QUERIES, call.spec)


def _reading(call: Any) -> None:
    """Every thread takes blocks and adds each up, in four sums of 16 floats; the total is stored, or LLVM would drop the loop."""
    spec = call.spec
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            return
        sum0 = sum1 = sum2 = sum3 = splat(0.0, spec)
        start = call.source + task * call.block
        for address in range(start, start + call.block, 256):
            sum0 = add(sum0, load(address, spec))
            sum1 = add(sum1, load(address + 64, spec))
            sum2 = add(sum2, load(address + 128, spec))
            sum3 = add(sum3, load(address + 192, spec))
        store(call.sums + 64 * task, add(add(sum0, sum1), add(sum2, sum3)))


def in_pairs(dtype: str) -> bool:
    """Whether this CPU multiplies the dtype in pairs; what it does not is multiplied as float32."""
    return dtype == "bf16" and ISA.has_pairs


def multiply_flops(threads: int, pairs: bool) -> int:
    """How many multiplications and additions one run of :func:`multiply` is."""
    return 2 * _ROWS * QUERIES * _DEPTH * _REPEATS * threads * (2 if pairs else 1)


def multiply(threads: int, pairs: bool, repeats: int = _REPEATS) -> np.ndarray[Any, Any]:
    """Run the register tile on every thread; returns the products (threads, rows, 64), so that they can be checked."""
    floats = (_A + _B + _C) // 4
    memory = np.empty(threads * floats + 16, np.float32)
    skip = -memory.ctypes.data // 4 % 16  # rows of 64 floats start where lines of memory do
    scratch = memory[skip : skip + threads * floats].reshape(threads, floats)
    scratch.view(np.uint32)[:] = 0x3F803F80 if pairs else 0x3F800000  # ones, in pairs or alone
    record = np.zeros(1, _MULTIPLY.dtype)
    record["scratch"], record["repeats"] = scratch.ctypes.data, repeats
    run_team(compiled(_multiplying, _MULTIPLY, _PAIRS if pairs else _FLOATS), record.ctypes.data, threads)
    return scratch[:, (_A + _B) // 4 :].reshape(threads, _ROWS, QUERIES)


def read(address: int, size: int, threads: int) -> float:
    """Read ``size`` bytes once, whole blocks of 64 KB only; returns their sum in float32, so that it can be checked."""
    block = 2**16
    tasks = size // block
    sums = np.zeros((tasks, 16), np.float32)
    record = np.zeros(1, _READ.dtype)
    record["source"], record["tasks"], record["block"], record["sums"] = address, tasks, block, sums.ctypes.data
    run_team(compiled(_reading, _READ, _FLOATS), record.ctypes.data, threads)
    return float(sums.sum())
