"""AVX-512: 32 registers of 512 bits; 6 x 4 accumulators leave room for four loads and a broadcast."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from llvmlite import ir

from lowtri.kernels.isa.avx2 import Avx2
from lowtri.kernels.isa.baseline import CacheTile, call, constant

__all__ = ["Avx512"]


class Avx512(Avx2):
    name = "avx512"
    features = frozenset({"avx512f", "avx512dq"})
    has_scale = True
    tile = pairs_tile = (6, 4, 16)
    whole_vectors = True
    # A single query takes whole rows in memory's order: the CPU's own prefetcher follows it, and has more lines on the way than
    # instructions can ask for.
    cache_tiles = MappingProxyType({8: CacheTile(2, 4, 64), 4: CacheTile(2, 4, 64), 1: CacheTile(1, 8, 8)})

    def scale(self, b: Any, x: Any, n: Any) -> Any:
        """x * 2 ** n, with n rounded down: 0 where that is too small, NaN where either is."""
        return _with_mask(b, "scalef", x, n)

    def fraction(self, b: Any, x: Any, lower: bool) -> Any:
        """x minus the next lower or the nearest whole number: 0 where x is infinite."""
        quiet, down = 8, 1
        return _with_mask(b, "reduce", x, ir.Constant(ir.IntType(32), quiet + down * lower))


def _with_mask(b: Any, name: str, x: Any, y: Any) -> Any:
    """An operation with a mask, on all lanes, in the current rounding mode."""
    kind, bits = ("ps", 16) if x.type.count == 16 else ("pd", 8)
    every, rounding = ir.Constant(ir.IntType(bits), -1), ir.Constant(ir.IntType(32), 4)
    return call(b, f"llvm.x86.avx512.mask.{name}.{kind}.512", x.type, [x, y, constant(x.type, 0.0), every, rounding])
