"""Numbers of twice float64's precision, as sums of two float64 arrays: references that do not depend on what np.longdouble is.

NumPy's longdouble has 64 bits on x86-64 Linux, 53 on Windows and macOS, and 113, in software, on ARM Linux. Sources: the
error-free sums and products of Dekker (1971) and Knuth; products of matrices as in Ogita, Rump & Oishi (2005), Dot2.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = Any
_SPLIT = 2.0**27 + 1


class Two(NamedTuple):
    """The number ``high + low``; ``high`` is it, rounded."""

    high: Array
    low: Array


def add(a: Array, b: Array) -> Two:
    """The exact sum of two float64 numbers."""
    total = a + b
    other = total - a
    return Two(total, (a - (total - other)) + (b - other))


def _halves(x: Array) -> tuple[Array, Array]:
    """Two numbers of half the bits whose sum is ``x``."""
    scaled = _SPLIT * x
    high = scaled - (scaled - x)
    return high, x - high


def multiply(a: Array, b: Array) -> Two:
    """The exact product of two float64 numbers."""
    a1, a2 = _halves(a)
    b1, b2 = _halves(b)
    product = a * b
    return Two(product, a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2))


def plus(a: Two, b: Two) -> Two:
    total = add(a.high, b.high)
    return add(total.high, total.low + a.low + b.low)


def times(a: Two, b: Two) -> Two:
    product = multiply(a.high, b.high)
    return add(product.high, product.low + a.high * b.low + a.low * b.high)


def over(a: Two, b: Two) -> Two:
    quotient = a.high / b.high
    product = times(Two(quotient, np.zeros_like(quotient)), b)
    return add(quotient, ((a.high - product.high) - product.low + a.low) / b.high)


def matmul(a: Array | Two, b: Array) -> Two:
    """The product of matrices, (..., N, K) and (..., K, M)."""
    high, low = a if isinstance(a, Two) else (a, np.zeros_like(a))
    total = Two(np.zeros((*a[0].shape[:-1], b.shape[-1]) if isinstance(a, Two) else (*a.shape[:-1], b.shape[-1])), 0.0)
    for k in range(b.shape[-2]):
        row = b[..., k : k + 1, :]
        product = multiply(high[..., k : k + 1], row)
        total = plus(total, Two(product.high, product.low + low[..., k : k + 1] * row))
    return total


def _constant(value: Decimal) -> Two:
    return Two(float(value), float(value - Decimal(float(value))))


@cache
def _powers() -> tuple[Two, Two]:
    """2 ** (i / 1024) for i from -512 to 512, and log2(e)."""
    with localcontext() as context:
        context.prec = 50
        ln2 = Decimal(2).ln()
        table = [_constant((ln2 * i / 1024).exp()) for i in range(-512, 513)]
        return Two(*(np.array(part) for part in zip(*table, strict=True))), _constant(1 / ln2)


def exp2(x: Two) -> tuple[Two, Array]:
    """2 ** x as a number between 2 ** -0.51 and 2 ** 0.51, and the power of two that it is multiplied by."""
    table, _ = _powers()
    power = np.rint(x.high)
    index = np.rint((x.high - power) * 1024)
    rest = ((x.high - power) - index / 1024) + x.low  # at most 2 ** -11, and exact but for the low part
    near = Two(*(part[index.astype(int) + 512] for part in table))
    return add(near.high, near.low + near.high * np.expm1(rest * np.log(2))), power.astype(int)


def exp(x: Two) -> Two:
    """Also of -infinity; not of what overflows."""
    hidden = np.isneginf(x.high)
    number, power = exp2(times(Two(np.where(hidden, 0.0, x.high), np.where(hidden, 0.0, x.low)), _powers()[1]))
    return Two(*(np.where(hidden, 0.0, np.ldexp(part, power)) for part in number))
