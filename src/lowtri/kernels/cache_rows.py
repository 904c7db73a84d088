"""Rows of the cache, for the products of few queries: read once, in the order of memory, and prefetched."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowtri.kernels.lanes import shuffled
from lowtri.kernels.operations.baseline import constant
from lowtri.kernels.simd import F32, I32, input_vector, pointer

__all__ = ["BLOCK", "EVEN_FIRST", "LANES", "input_words", "is_even_first", "load_and_drop"]

BLOCK = 4  # queries that share each row that is read; a shorter block repeats its last query
LANES = 16


class _Volatile(ir.Type):
    """The type of a load that LLVM must keep, although nothing uses what it loads; llvmlite only prints it."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def _to_string(self) -> str:
        return f"volatile {self.kind}"


def load_and_drop(builder: Any, address: Any) -> None:
    """Load the 64 bytes at an address into the first cache, and use them for nothing. The address must be valid."""
    kind = ir.VectorType(F32, LANES)
    builder.load(pointer(builder, address, kind), typ=_Volatile(kind), align=2)


def is_even_first(spec: Any) -> bool:
    """Whether bf16 is read two numbers at a time: a shift and a mask make two vectors, of the even and of the odd numbers."""
    return spec.dtype == "bfloat16" and spec.operand == "widened" and not spec.isa.whole_vectors


EVEN_FIRST = [lane % 2 * (LANES // 2) + lane // 2 for lane in range(LANES)]


def input_words(builder: Any, address: Any, spec: Any) -> Any:
    """16 words of a row of the cache; of bf16 the even ones first."""
    if spec.operand == "pairs":
        return builder.load(pointer(builder, address, spec.vector.ir), align=2)
    if not is_even_first(spec):
        return input_vector(builder, address, LANES, spec)
    kind = ir.VectorType(I32, LANES // 2)
    words = builder.load(pointer(builder, address, kind), align=2)
    even, odd = builder.shl(words, constant(kind, 16)), builder.and_(words, constant(kind, 0xFFFF0000))
    half = ir.VectorType(F32, LANES // 2)
    return shuffled(builder, builder.bitcast(even, half), builder.bitcast(odd, half), list(range(LANES)))
