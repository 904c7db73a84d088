"""The operations of AVX-512: a power of two in one instruction, and the fraction of a number."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowtri.kernels.operations.baseline import Operations, call, constant

__all__ = ["Avx512Operations"]


class Avx512Operations(Operations):
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
