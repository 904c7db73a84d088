"""The operations of NEON: a maximum in one instruction, and with its bf16 instructions dot products, products of blocks and rounding.

FMAXNM returns the number where the other operand is NaN, and FMAX returns NaN; a comparison and a selection are two instructions. BFDOT
adds the two products of a lane without rounding between them, flushes denormal numbers and rounds to odd before it adds the sum; CPUs
with FEAT_EBF16 may be set to round as usual. BFMMLA is two such steps. Source: Arm Architecture Reference Manual, BFDOT, BFMMLA, FMAX
and FMAXNM.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowtri.kernels.operations.avx512_bf16 import BFloat
from lowtri.kernels.operations.baseline import Operations, call

__all__ = ["NeonBf16Operations", "NeonOperations"]

_REGISTER = 4  # floats


class NeonOperations(Operations):
    def maximum(self, b: Any, x: Any, y: Any) -> Any:
        return call(b, f"llvm.maxnum.v{x.type.count}f{_bits(x)}", x.type, [x, y])

    def at_least(self, b: Any, x: Any, least: Any) -> Any:
        return call(b, f"llvm.maximum.v{x.type.count}f{_bits(x)}", x.type, [x, least])


def _bits(x: Any) -> int:
    return 64 if x.type.element == ir.DoubleType() else 32


class NeonBf16Operations(NeonOperations):
    def dot_pairs(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        kind = ir.VectorType(BFloat(), 2 * _REGISTER)
        name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
        operands = zip(*(_registers(b, one) for one in (x, y, z)), strict=True)
        # The instruction can take one lane of its last operand for all: x, which products broadcast, stands there.
        return _joined(b, [call(b, name, s.type, [s, b.bitcast(q, kind), b.bitcast(p, kind)]) for p, q, s in operands])

    def multiply_blocks(self, b: Any, z: Any, x: Any, y: Any) -> Any:
        """z plus the product of two rows of four bf16, x, with two columns of four, y; blocks of 2 x 2, row after row."""
        kind = ir.VectorType(BFloat(), 2 * _REGISTER)
        return call(b, "llvm.aarch64.neon.bfmmla", z.type, [z, b.bitcast(x, kind), b.bitcast(y, kind)])

    def narrow(self, b: Any, x: Any, dtype: str) -> Any:
        if dtype != "bfloat16":
            return super().narrow(b, x, dtype)
        rounded = b.fptrunc(x, ir.VectorType(BFloat(), x.type.count))
        return b.bitcast(rounded, ir.VectorType(ir.IntType(16), x.type.count))


def _registers(b: Any, x: Any) -> list[Any]:
    """The vectors of 128 bits that a vector consists of."""
    starts = range(0, x.type.count, _REGISTER)
    return [b.shuffle_vector(x, x, _lanes(start, _REGISTER)) for start in starts]


def _joined(b: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        both = zip(parts[::2], parts[1::2], strict=True)
        parts = [b.shuffle_vector(one, two, _lanes(0, 2 * one.type.count)) for one, two in both]
    return parts[0]


def _lanes(start: int, count: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(start, start + count)))
