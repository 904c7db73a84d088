"""Pairs of bf16: two numbers interleaved in a 32-bit word. A vector of 16 pairs has the type of a vector of floats."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.lanes import shuffled
from lowtri.kernels.operations.baseline import interleaved
from lowtri.kernels.simd import I16, I64, pointer

__all__ = ["interleave", "interleave_loaded", "interleaved_rows"]


def interleaved_rows(builder: Any, low: Any, high: Any, count: int, kind: Any) -> list[Any]:
    """Two rows of bf16 in memory, 32 numbers ``count`` times, as vectors of pairs."""
    lanes = kind.count
    row = ir.VectorType(I16, 2 * lanes)
    pairs = []
    for offset in (ir.Constant(I64, 64 * n) for n in range(count)):
        both = [builder.load(pointer(builder, builder.add(address, offset), row), align=2) for address in (low, high)]
        for first in (0, lanes):
            order = [n for lane in range(first, first + lanes) for n in (lane, lane + 2 * lanes)]
            pairs.append(builder.bitcast(shuffled(builder, *both, order), kind))
    return pairs


@intrinsic
def interleave(typing, low, high, spec):
    """16 pairs from two vectors of floats, rounded."""

    def emit(c, b, s, a):
        return spec.value.operations.pair(b, *a[:2])

    return low(low, high, spec), emit


@intrinsic
def interleave_loaded(typing, low, high, spec):
    """16 pairs from two rows of bf16 in memory."""
    kind = spec.value.vector

    def emit(c, b, s, a):
        row = ir.VectorType(I16, kind.lanes)
        return interleaved(b, *(b.load(pointer(b, address, row), align=2) for address in a[:2]), kind.ir)

    return kind(types.intp, types.intp, spec), emit
