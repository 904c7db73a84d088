"""2 ** x for a vector: the whole part of x sets the exponent bits, and a polynomial approximates 2 to the rest.

The polynomial has as many terms as the numbers that become of the weights can hold: see ``DEGREES``. Each is 1 + r * q(r), so that
2 ** 0 is exactly 1, with q fitted to the least relative error of 2 ** r. Source of the reduction by adding a large number: Cody and
Waite 1980.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from lowtri.kernels.operations.baseline import constant, integers

__all__ = ["DEGREES", "ERRORS", "exp2", "exp2_saturated", "exp2m1"]

# By the dtype of the arrays. Weights, and sums that are divided by their own sum, are rounded to it in the end, but log-sum-exps stay
# in float32: degree 3, whose error of 1e-4 is enough for the weights of bf16, is not enough for them.
DEGREES = {"bfloat16": 4, "float16": 4, "float32": 6, "float64": 13}
# The relative errors of the polynomials, with their coefficients in float32; float64 sums round to a few 1e-16.
ERRORS = {4: 3e-6, 6: 2e-8, 13: 4e-16}

# q by degree, highest power first: for the rest from the nearest whole number, and for the rest from the next lower one.
_NEAREST = {
    4: (9.58285310e-3, 5.59064246e-2, 2.40240986e-1, 6.93124193e-1),
    6: (1.5353361e-4, 1.3398875e-3, 9.6184369e-3, 5.5503324e-2, 2.4022648e-1, 6.9314718e-1),
    13: tuple(math.log(2) ** k / math.factorial(k) for k in range(13, 0, -1)),  # Taylor's
}
_LOWER = {
    4: (1.34266843e-2, 5.22424742e-2, 2.41280205e-1, 6.93044845e-1),
    6: (2.16129151e-4, 1.24678464e-3, 9.67545157e-3, 5.54852806e-2, 2.40229306e-1, 6.93147044e-1),
}


def _is_double(kind: Any) -> bool:
    return bool(kind.element == ir.DoubleType())


def _polynomial(b: Any, r: Any, coefficients: Any, operations: Any) -> Any:
    first, *rest = coefficients if _is_double(r.type) else map(np.float32, coefficients)
    p = constant(r.type, float(first))
    for c in rest:
        p = operations.fma(b, p, r, constant(r.type, float(c)))
    return p


def _split(b: Any, x: Any, degree: int, operations: Any) -> tuple[Any, Any]:
    """2 ** n for the whole number n nearest to x, and 2 ** (x - n) - 1. 2 ** n is 0 from the least exponent down, so for -inf, too."""
    bits, bias = (52, 1023) if _is_double(x.type) else (23, 127)
    kind, least = integers(x.type), constant(x.type, float(-bias))
    x = operations.at_least(b, x, least)
    # The last digit of a number this large is 1, so the sum is rounded to n + bias, which its last bits hold.
    large = constant(x.type, 1.5 * 2.0**bits + bias)
    shifted = b.fadd(x, large)
    scale = b.bitcast(b.shl(b.bitcast(shifted, kind), constant(kind, bits)), x.type)
    r = b.fsub(x, b.fsub(shifted, large))
    return scale, b.fmul(_polynomial(b, r, _NEAREST[degree], operations), r)


def _exp2(b: Any, x: Any, spec: Any) -> Any:
    degree, operations = DEGREES[spec.dtype], spec.operations
    if spec.isa.has_scale:  # the operation rounds its exponent down
        lower = degree in _LOWER
        r = operations.fraction(b, x, lower)
        p = _polynomial(b, r, (*(_LOWER if lower else _NEAREST)[degree], 1.0), operations)
        return operations.scale(b, p, x if lower else b.fsub(x, r))
    scale, fraction = _split(b, x, degree, operations)
    return operations.fma(b, scale, fraction, scale)


@intrinsic
def exp2(typing, x, spec):
    """2 ** x, to the precision that the dtype of the arrays needs; 0 for -inf and NaN for NaN. For x <= 127.

    The relative error is that of ``ERRORS``, and an ulp. Results below 2 ** -126, which are denormal, may be 0.
    """
    return x(x, spec), lambda c, b, s, a: _exp2(b, a[0], spec.value)


@intrinsic
def exp2_saturated(typing, x, spec):
    """:func:`exp2` for any x: at least 2 ** 127 from x = 127 on."""

    def emit(c, b, s, a):
        x, greatest = a[0], constant(a[0].type, 127.0)
        if not spec.value.isa.has_scale:  # the operation gives inf; exponent bits overflow
            x = b.select(b.fcmp_ordered(">", x, greatest), greatest, x)  # NaN stays NaN
        return _exp2(b, x, spec.value)

    return x(x, spec), emit


@intrinsic
def exp2m1(typing, x, spec):
    """2 ** x - 1, to a few ulp of the compute dtype also where x is small. For -126 <= x <= 127."""

    def emit(c, b, s, a):
        scale, fraction = _split(b, a[0], 13 if x.bits == 64 else 6, spec.value.operations)
        return spec.value.operations.fma(b, scale, fraction, b.fsub(scale, constant(scale.type, 1.0)))

    return x(x, spec), emit
