"""2 ** x for a vector of 16 floats: a whole power of two by its bits, the rest by a polynomial."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from lowtri.kernels.inner import inner
from lowtri.kernels.simd import I16, I32, INTS, VECTOR, call, constant, fma, maximum, mul, splat, sub, vector
from lowtri.kernels.target import LANES, SCALES

__all__ = [
    "exp2",
    "exp2_less_1",
]


@intrinsic
def _two_to_the(typing, n):
    """2 ** n for whole n in -126 .. 127: the exponent's bits, written."""

    def emit(c, b, s, a):
        biased = b.add(b.fptosi(a[0], INTS), ir.Constant(INTS, [127] * LANES))
        return b.bitcast(b.shl(biased, ir.Constant(INTS, [23] * LANES)), VECTOR)

    return vector(vector), emit


@intrinsic
def _nearest(typing, x):
    return vector(vector), lambda c, b, s, a: call(b, f"llvm.roundeven.v{LANES}f32", VECTOR, [a[0]])


@intrinsic
def _below_range(typing, x, y):
    """y, but 0 where x < -126 and x where x is NaN."""

    def emit(c, b, s, a):
        out = b.select(b.fcmp_ordered("<", a[0], constant(-126.0)), constant(0.0), a[1])
        return b.select(b.fcmp_unordered("uno", a[0], a[0]), a[0], out)

    return vector(vector, vector), emit


# (2^r - 1) / r on [-1/2, 1/2]: a polynomial fitted to equal relative error of 2^r, 2e-9.
_C = tuple(np.float32(c) for c in (1.5353361e-4, 1.3398875e-3, 9.6184369e-3, 5.5503324e-2, 2.4022648e-1, 6.9314718e-1))


@inner
def _per_r(r):
    """(2 ** r - 1) / r."""
    p = splat(_C[0])
    p = fma(p, r, splat(_C[1]))
    p = fma(p, r, splat(_C[2]))
    p = fma(p, r, splat(_C[3]))
    p = fma(p, r, splat(_C[4]))
    return fma(p, r, splat(_C[5]))


@inner
def _split(x):
    """x as a whole number n and a rest: (n, 2 ** rest - 1)."""
    whole = _nearest(maximum(x, splat(np.float32(-126.0))))
    r = sub(x, whole)
    return whole, mul(_per_r(r), r)


@intrinsic
def _scaled(typing, x, n):
    """x * 2 ** n for whole n, in one instruction: 0 where that is too small, NaN where either is."""

    def emit(c, b, s, a):
        every, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
        return call(b, "llvm.x86.avx512.mask.scalef.ps.512", VECTOR, [*a, constant(0.0), every, rounding])

    return vector(vector, vector), emit


@inner
def _exp2_by_bits(x):
    whole, more = _split(x)
    scale = _two_to_the(whole)
    return _below_range(x, fma(scale, more, scale))


@inner
def _exp2_scaled(x):
    x = maximum(splat(_NOTHING), x)
    whole = _nearest(x)
    r = sub(x, whole)
    return _scaled(fma(_per_r(r), r, splat(np.float32(1.0))), whole)


_NOTHING = np.float32(-200.0)  # far below the least float: 2 ** -200 is 0, and so is 2 ** -inf


@inner
def exp2(x):
    """2 ** x, to 1e-7 relative; 0 below 2 ** -150 at the latest (so exp2(-inf) is 0), NaN for NaN. For x <= 127."""
    return _exp2_scaled(x) if SCALES else _exp2_by_bits(x)


@inner
def exp2_less_1(x):
    """2 ** x - 1, to 2e-7 relative also where x is small. For -126 <= x <= 127."""
    whole, more = _split(x)
    scale = _two_to_the(whole)
    return fma(scale, more, sub(scale, splat(np.float32(1.0))))
