"""Kernels that measure the limits of a CPU: only the register tile of the product, and a loop that sums what it reads."""

from __future__ import annotations

from lowtri.kernels.product import product
from lowtri.kernels.record import take
from lowtri.kernels.scratch import MULTIPLY_DEPTH, MULTIPLY_ROWS
from lowtri.kernels.simd import add, load, splat, store
from lowtri.kernels.spec import QUERIES

__all__ = ["multiply", "read"]

_A, _B, _C = 4 * MULTIPLY_ROWS * MULTIPLY_DEPTH, 4 * MULTIPLY_DEPTH * QUERIES, 4 * MULTIPLY_ROWS * QUERIES


def multiply(call):
    """Every thread repeats one product, in its own scratch memory."""
    a, depth = call.scratch + (_A + _B + _C) * take(call.next_thread), MULTIPLY_DEPTH
    for _ in range(call.repeats):
        product(a, depth, 1, a + _A, QUERIES, a + _A + _B, QUERIES, MULTIPLY_ROWS, depth, 0, QUERIES, call.spec)


def read(call):
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
