"""2 ** x for a vector: the integer part of x sets the exponent bits, and a polynomial approximates 2 to the fractional part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from lowtri.kernels.isa.baseline import call, constant, integers

__all__ = ["exp2", "exp2m1"]

# (2^r - 1) / r on [-1/2, 1/2], highest power first. float32: a polynomial fitted to equal relative error of 2^r, 2e-9; float64:
# Taylor's, 4e-18.
_FLOAT32 = (1.5353361e-4, 1.3398875e-3, 9.6184369e-3, 5.5503324e-2, 2.4022648e-1, 6.9314718e-1)
_FLOAT64 = tuple(math.log(2) ** k / math.factorial(k) for k in range(13, 0, -1))


def _is_double(kind: Any) -> bool:
    return bool(kind.element == ir.DoubleType())


def _min_exponent(kind: Any) -> float:
    """The least whole x for which 2 ** x is not denormal."""
    return -1022.0 if _is_double(kind) else -126.0


def _nearest(b: Any, x: Any) -> Any:
    return call(b, f"llvm.roundeven.v{x.type.count}f{64 if _is_double(x.type) else 32}", x.type, [x])


def _greater(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _per_r(b: Any, r: Any, isa: Any) -> Any:
    """(2 ** r - 1) / r."""
    first, *rest = _FLOAT64 if _is_double(r.type) else map(np.float32, _FLOAT32)
    p = constant(r.type, float(first))
    for c in rest:
        p = isa.fma(b, p, r, constant(r.type, float(c)))
    return p


def _power(b: Any, n: Any) -> Any:
    """2 ** n for whole n, not denormal, made from the exponent's bits."""
    kind = integers(n.type)
    if _is_double(n.type):  # no conversion to 64-bit integers before AVX-512: a large number keeps n in its last bits
        whole, bias, by = b.bitcast(b.fadd(n, constant(n.type, 1.5 * 2.0**52)), kind), 1023, 52
    else:
        whole, bias, by = b.fptosi(n, kind), 127, 23
    return b.bitcast(b.shl(b.add(whole, constant(kind, bias)), constant(kind, by)), n.type)


def _split(b: Any, x: Any, isa: Any) -> tuple[Any, Any]:
    """2 ** n for the whole number n nearest to x, and 2 ** (x - n) - 1."""
    whole = _nearest(b, _greater(b, x, constant(x.type, _min_exponent(x.type))))
    r = b.fsub(x, whole)
    fraction = b.fmul(_per_r(b, r, isa), r)
    return _power(b, whole), fraction


def _exp2(b: Any, x: Any, isa: Any) -> Any:
    if isa.has_scale:
        # 2 ** -1200 is 0, as is 2 ** -inf.
        x = _greater(b, constant(x.type, -1200.0 if _is_double(x.type) else -200.0), x)
        whole = _nearest(b, x)
        r = b.fsub(x, whole)
        return isa.scale(b, isa.fma(b, _per_r(b, r, isa), r, constant(x.type, 1.0)), whole)
    scale, fraction = _split(b, x, isa)
    out = isa.fma(b, scale, fraction, scale)
    out = b.select(b.fcmp_ordered("<", x, constant(x.type, _min_exponent(x.type))), constant(x.type, 0.0), out)
    return b.select(b.fcmp_unordered("uno", x, x), x, out)


@intrinsic
def exp2(typing, x, spec):
    """2 ** x, to an ulp or two; 0 where that is denormal (so exp2(-inf) is 0), NaN for NaN. For x <= 127."""
    return x(x, spec), lambda c, b, s, a: _exp2(b, a[0], spec.value.isa)


@intrinsic
def exp2m1(typing, x, spec):
    """2 ** x - 1, to a few ulp also where x is small. For -126 <= x <= 127."""

    def emit(c, b, s, a):
        scale, fraction = _split(b, a[0], spec.value.isa)
        return spec.value.isa.fma(b, scale, fraction, b.fsub(scale, constant(scale.type, 1.0)))

    return x(x, spec), emit
