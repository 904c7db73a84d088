"""Every operation, in instructions that every CPU has. Those of the other instruction sets inherit from them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowtri.kernels.isa import Baseline

__all__ = ["Operations", "call", "constant", "halves_of_pairs", "integers", "interleaved"]


class Operations:
    """The operations of the baseline. Each takes an LLVM builder and vectors of 64 bytes, and returns a vector."""

    def __init__(self, isa: Baseline) -> None:
        self.isa = isa

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once where the CPU can."""
        kind = f"v{x.type.count}f{64 if x.type.element == ir.DoubleType() else 32}"
        return call(b, f"llvm.{'fma' if self.isa.has_fma else 'fmuladd'}.{kind}", x.type, [x, y, z])

    def maximum(self, b: Any, x: Any, y: Any) -> Any:
        """The greater number; y where x is NaN. One instruction of x86, unlike the maximum of IEEE 754."""
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def at_least(self, b: Any, x: Any, least: Any) -> Any:
        """The greater number; NaN where x is NaN."""
        return b.select(b.fcmp_ordered(">", least, x), least, x)

    def dot_pairs(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        """z plus, in each lane, the dot product of two pairs of bf16: each pair is widened in registers."""
        low, high = zip(halves_of_pairs(b, x), halves_of_pairs(b, y), strict=True)
        return self.fma(b, *high, self.fma(b, *low, z))

    def widen(self, b: Any, x: Any, dtype: str) -> Any:
        """bf16 or float16, in 16-bit integers, as floats."""
        if dtype == "float16":
            return b.fpext(b.bitcast(x, ir.VectorType(ir.HalfType(), x.type.count)), _floats(x.type.count))
        kind = integers(_floats(x.type.count))
        return b.bitcast(b.shl(b.zext(x, kind), constant(kind, 16)), _floats(x.type.count))

    def narrow(self, b: Any, x: Any, dtype: str) -> Any:
        """Floats rounded to bf16 or float16, to the nearest and even, as 16-bit integers."""
        shorts = ir.VectorType(ir.IntType(16), x.type.count)
        if dtype == "float16":
            return b.bitcast(b.fptrunc(x, ir.VectorType(ir.HalfType(), x.type.count)), shorts)
        kind = integers(x.type)
        bits, by = b.bitcast(x, kind), constant(kind, 16)
        odd = b.and_(b.lshr(bits, by), constant(kind, 1))
        rounded = b.lshr(b.add(b.add(bits, constant(kind, 0x7FFF)), odd), by)
        quiet_nan = b.or_(b.lshr(bits, by), constant(kind, 0x40))
        return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet_nan, rounded), shorts)

    def pair(self, b: Any, low: Any, high: Any) -> Any:
        """16 pairs of bf16 from two vectors of floats, rounded."""
        low_bits, high_bits = (self.narrow(b, x, "bfloat16") for x in (low, high))
        return interleaved(b, low_bits, high_bits, low.type)


def interleaved(b: Any, low: Any, high: Any, kind: Any) -> Any:
    """Two vectors of 16-bit integers as one vector of pairs."""
    words = integers(kind)
    return b.bitcast(b.or_(b.zext(low, words), b.shl(b.zext(high, words), constant(words, 16))), kind)


def _floats(count: int) -> Any:
    return ir.VectorType(ir.FloatType(), count)


def halves_of_pairs(b: Any, x: Any) -> tuple[Any, Any]:
    """The lower and the upper number of each pair, as floats."""
    kind = integers(x.type)
    bits = b.bitcast(x, kind)
    return b.bitcast(b.shl(bits, constant(kind, 16)), x.type), b.bitcast(
        b.and_(bits, constant(kind, 0xFFFF0000)), x.type
    )


def integers(kind: Any) -> Any:
    """The vector of integers as wide as a vector of numbers."""
    return ir.VectorType(ir.IntType(64 if kind.element == ir.DoubleType() else 32), kind.count)


def constant(kind: Any, value: float) -> Any:
    """A vector with one number in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def call(b: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by name, declared once in a module."""
    function = b.module.globals.get(name)
    function = function or ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)
