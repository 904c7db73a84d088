"""The baseline: every operation, in instructions that every CPU has. The other instruction sets inherit from it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

from llvmlite import ir

__all__ = ["Baseline", "CacheTile", "call", "constant", "halves_of_pairs", "integers"]


class CacheTile(NamedTuple):
    """How a block of queries reads a cache."""

    keys: int  # multiplied at once
    vectors: int  # of a value's row, summed at once
    rows_ahead: int  # that are prefetched


class Baseline:
    """The operations of an instruction set. Each takes an LLVM builder and vectors of 64 bytes, and returns a vector."""

    name = "baseline"
    features: frozenset[str] = frozenset()  # required of the CPU
    has_fma = False  # without the instruction llvm.fma is a slow library call
    has_pairs = False  # one instruction for a dot product of pairs of bf16
    has_tiles = False  # one instruction for a product of tiles of bf16
    has_scale = False  # one instruction for x * 2 ** n, and one for the fraction of x
    # A product keeps rows x vectors accumulators in registers. The tile changes the speed, not the result.
    tile = (2, 1, 2)  # rows, vectors; rows of a tile one vector wide
    pairs_tile = (2, 1, 2)  # the same for pairs of bf16
    whole_vectors = False  # 64 bytes fit into a register
    # How few queries read a cache, for each number of queries in a block. The CPU prefetches by itself, but not past a 4 KB page.
    cache_tiles = MappingProxyType({4: CacheTile(2, 1, 64), 1: CacheTile(4, 1, 64)})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def runs_on(self, features: frozenset[str], machine: str) -> bool:
        """Whether a CPU with these features supports it."""
        return self.features <= features

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once where the CPU can."""
        kind = f"v{x.type.count}f{64 if x.type.element == ir.DoubleType() else 32}"
        return call(b, f"llvm.{'fma' if self.has_fma else 'fmuladd'}.{kind}", x.type, [x, y, z])

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
    """The same number in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def call(b: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by name, declared once in a module."""
    function = b.module.globals.get(name)
    function = function or ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)
