"""One tile of online softmax for products on tile registers: weights are rounded to pairs of bf16 in the pass that computes them.

Scores and the running shift and sum are those of :mod:`lowtri.kernels.softmax`. On AVX-512 one
instruction of 2 ** x takes the fraction, a polynomial of degree 4 its power, and one instruction scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import intrinsic

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2
from lowtri.kernels.isa.baseline import halves_of_pairs
from lowtri.kernels.simd import add, any_greater, fma, load, maximum, mul, select_greater, splat, store, sub

__all__ = ["pair", "softmax_pairs", "unpack_pairs"]

_LARGE = 2.0**20  # units of log 2: above it a float32's last digit is an eighth or more
_MAX_RISE = 8.0  # rescale only if the maximum rose by more: weights stay below 2 ** 8


@intrinsic
def pair(typing, low, high, spec):
    """16 pairs of bf16 from two vectors, rounded."""
    return low(low, high, spec), lambda c, b, s, a: spec.value.isa.pair(b, *a[:2])


def _half(index: int) -> Any:
    @intrinsic
    def half(typing, x):
        return x(x), lambda c, b, s, a: halves_of_pairs(b, a[0])[index]

    return half


low_numbers, high_numbers = _half(0), _half(1)


@device_function
def new_shift(scores, unit, first, last, m, l, output, size, spec):
    """The shift of 16 queries after these scores; m, l and the output so far (size, 64) are rescaled where the maximum rose."""
    step, hidden, zero = spec.row_bytes, splat(-np.inf, spec), splat(0.0, spec)
    a = b = c = d = hidden  # four independent chains of maxima, for instruction-level parallelism
    j = first
    while j + 4 <= last:
        row = scores + step * j
        a, b = maximum(load(row, spec), a), maximum(load(row + step, spec), b)
        c, d = maximum(load(row + 2 * step, spec), c), maximum(load(row + 3 * step, spec), d)
        j += 4
    while j < last:
        a = maximum(load(scores + step * j, spec), a)
        j += 1
    greatest = mul(maximum(maximum(a, b), maximum(c, d)), unit)
    old = load(m, spec)
    limit = add(old, splat(_MAX_RISE, spec))
    if any_greater(greatest, limit):
        # Lane by lane: the keys of one query do not change a bit of another query's result.
        new = select_greater(greatest, limit, maximum(greatest, old), old)
        factor = exp2(sub(old, select_greater(new, hidden, new, zero)), spec)
        store(m, new)
        store(l, mul(load(l, spec), factor))
        for r in range(size):
            store(output + step * r, mul(load(output + step * r, spec), factor))
        old = new
    # A query that has not seen a key yet has no maximum: with shift 0 its weights are 2 ** -inf = 0.
    return sub(zero, select_greater(old, hidden, old, zero))


@device_function
def softmax_pairs(scores, unit, spans, m, l, output, size, pairs, spec):
    """Weights 2 ** (unit * score - m) as pairs of keys (keys / 2, 64); m, l and the output so far are rescaled to the new shift.

    Args:
        scores: address of (keys, 64).  unit: factor > 0, rounded together with the shift.
        spans: for each 16 queries the first key, a multiple of 32, and one past the last. Pairs are written from the first key
            on, with zeros up to a multiple of 32.
        m, l: addresses of 64 numbers.  output: address of (size, 64).
    """
    zero, one, unit = splat(0.0, spec), splat(1.0, spec), splat(unit, spec)
    step = spec.row_bytes
    for vector in range(4):
        lane, first, last = 64 * vector, spans[2 * vector], spans[2 * vector + 1]
        column, to = scores + lane, pairs + lane
        shift = new_shift(column, unit, first, last, m + lane, l + lane, output + lane, size, spec)
        scale = unit
        amount, large = maximum(shift, sub(zero, shift)), splat(_LARGE, spec)
        if any_greater(amount, large):
            # fma rounds the shift but not the product; for scores this large the difference exceeds 1. So round both.
            for j in range(first, last):
                x = load(column + step * j, spec)
                store(column + step * j, select_greater(amount, large, mul(x, unit), x))
            scale = select_greater(amount, large, one, unit)
        a = b = c = d = zero
        j = first
        while j + 4 <= last:
            row, target = column + step * j, to + step * (j // 2)
            e = exp2(fma(load(row, spec), scale, shift, spec), spec)
            f = exp2(fma(load(row + step, spec), scale, shift, spec), spec)
            g = exp2(fma(load(row + 2 * step, spec), scale, shift, spec), spec)
            h = exp2(fma(load(row + 3 * step, spec), scale, shift, spec), spec)
            store(target, pair(e, f, spec))
            store(target + step, pair(g, h, spec))
            a, b, c, d = add(a, e), add(b, f), add(c, g), add(d, h)
            j += 4
        while j < last:
            e, f = exp2(fma(load(column + step * j, spec), scale, shift, spec), spec), zero
            if j + 1 < last:
                f = exp2(fma(load(column + step * (j + 1), spec), scale, shift, spec), spec)
            store(to + step * (j // 2), pair(e, f, spec))
            a, b = add(a, e), add(b, f)
            j += 2
        while j % 32:
            store(to + step * (j // 2), zero)
            j += 2
        store(l + lane, add(load(l + lane, spec), add(add(a, b), add(c, d))))


@device_function
def unpack_pairs(pairs, keys, weights, spec):
    """Pairs of keys (keys / 2, 64) as weights (keys, 64) in float32."""
    for j in range(0, keys, 2):
        for lane in range(0, spec.row_bytes, 64):
            both, target = load(pairs + spec.row_bytes * (j // 2) + lane, spec), weights + spec.row_bytes * j + lane
            store(target, low_numbers(both))
            if j + 1 < keys:
                store(target + spec.row_bytes, high_numbers(both))
