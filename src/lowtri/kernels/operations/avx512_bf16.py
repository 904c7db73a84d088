"""The operations of AVX-512 with its bf16 instructions: dot products of pairs, and rounding to bf16.

llvmlite has no bfloat type, but LLVM needs only its name in the textual IR.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowtri.kernels.operations.avx512 import Avx512Operations
from lowtri.kernels.operations.baseline import call

__all__ = ["Avx512Bf16Operations", "BFloat"]


class BFloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


class Avx512Bf16Operations(Avx512Operations):
    def dot_pairs(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        kind = ir.VectorType(BFloat(), 2 * z.type.count)
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", z.type, [z, b.bitcast(x, kind), b.bitcast(y, kind)])

    def narrow(self, b: Any, x: Any, dtype: str) -> Any:
        if dtype != "bfloat16" or x.type.count != 16:  # the instruction rounds a whole vector
            return super().narrow(b, x, dtype)
        kind = ir.VectorType(BFloat(), x.type.count)
        rounded = call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, [x])
        return b.bitcast(rounded, ir.VectorType(ir.IntType(16), x.type.count))

    def pair(self, b: Any, low: Any, high: Any) -> Any:
        """16 pairs from two vectors of floats, rounded."""
        kind, shorts = ir.VectorType(BFloat(), 32), ir.VectorType(ir.IntType(16), 32)
        both = b.bitcast(call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [high, low]), shorts)
        order = [lane for n in range(16) for lane in (n, n + 16)]
        return b.bitcast(b.shuffle_vector(both, both, ir.Constant(ir.VectorType(ir.IntType(32), 32), order)), low.type)
