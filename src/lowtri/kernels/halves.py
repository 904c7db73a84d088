"""bf16, the upper half of a float32: two of them in a 32-bit word are a pair, and 16 pairs travel as a vector of floats.

llvmlite has no type bfloat; one that prints its name is all that LLVM asks for. Used only where ``target.BF16`` says so.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.simd import F32, I16, I32, I64, INTS, VECTOR, at, call, vector
from lowtri.kernels.target import LANES

__all__ = [
    "fused_pairs",
    "load_halves",
    "pair",
    "pair_up",
    "read_half",
    "store_halves",
    "zipped_rows",
]


class _BFloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


HALVES = ir.VectorType(I16, LANES)
PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def fused_pairs(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """z plus, in each lane, the dot product of two pairs of bf16."""
    x, y = builder.bitcast(x, PAIRS), builder.bitcast(y, PAIRS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [z, x, y])


def _to_halves(builder: Any, x: Any) -> Any:
    """16 floats rounded to bf16, as 16-bit ints."""
    kind = ir.VectorType(_BFloat(), LANES)
    return builder.bitcast(call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, [x]), HALVES)


def _zipped(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors of 16-bit ints as one vector of pairs."""
    high = builder.shl(builder.zext(high, INTS), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(builder.or_(builder.zext(low, INTS), high), VECTOR)


def zipped_rows(builder: Any, low: Any, high: Any, count: int) -> list[Any]:
    """Two rows of bf16 in memory, 32 numbers ``count`` times, as vectors of pairs."""
    row = ir.VectorType(I16, 2 * LANES)
    zipped = []
    for offset in (ir.Constant(I64, 64 * n) for n in range(count)):
        both = [builder.load(at(builder, builder.add(address, offset), row), align=2) for address in (low, high)]
        for first in (0, LANES):
            lanes = [n for lane in range(first, first + LANES) for n in (lane, lane + 2 * LANES)]
            pairs = builder.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, 2 * LANES), lanes))
            zipped.append(builder.bitcast(pairs, VECTOR))
    return zipped


@intrinsic
def pair(typing, low, high):
    """16 pairs of bf16 from two vectors of floats."""
    return vector(vector, vector), lambda c, b, s, a: _zipped(b, _to_halves(b, a[0]), _to_halves(b, a[1]))


@intrinsic
def pair_up(typing, low, high):
    """16 pairs from two rows of bf16 in memory."""

    def emit(c, b, s, a):
        return _zipped(b, *(b.load(at(b, address, HALVES), align=2) for address in a))

    return vector(types.intp, types.intp), emit


@intrinsic
def load_halves(typing, address):
    """16 bf16 from memory, as floats."""

    def emit(c, b, s, a):
        words = b.zext(b.load(at(b, a[0], HALVES), align=2), INTS)
        return b.bitcast(b.shl(words, ir.Constant(INTS, [16] * LANES)), VECTOR)

    return vector(types.intp), emit


@intrinsic
def store_halves(typing, address, x):
    """16 floats to memory, rounded to bf16."""

    def emit(c, b, s, a):
        b.store(_to_halves(b, a[1]), at(b, a[0], HALVES), align=2)
        return c.get_dummy_value()

    return types.void(types.intp, vector), emit


@intrinsic
def read_half(typing, address):
    """One bf16 from memory, as a float."""

    def emit(c, b, s, a):
        word = b.shl(b.zext(b.load(at(b, a[0], I16), align=2), I32), ir.Constant(I32, 16))
        return b.bitcast(word, F32)

    return types.float32(types.intp), emit
