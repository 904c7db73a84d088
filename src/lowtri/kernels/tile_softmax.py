"""One tile of online softmax for products on tile registers: weights are rounded to pairs of bf16 in the pass that computes them.

Scores and the running shift and sum are those of :mod:`lowtri.kernels.softmax`. On AVX-512 one
instruction of 2 ** x takes the fraction, a polynomial of degree 4 its power, and one instruction scales.
"""

from __future__ import annotations

from typing import Any

from numba.extending import intrinsic

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2_saturated
from lowtri.kernels.operations.baseline import halves_of_pairs
from lowtri.kernels.simd import add, any_greater, fma, load, maximum, splat, store, sub
from lowtri.kernels.softmax import LARGE, MAX_RISE, new_shift, shifts_large_scores
from lowtri.kernels.spec import HALF_ROW

__all__ = ["pair", "softmax_vector", "unpack_pairs"]


@intrinsic
def pair_weights(typing, low, high, spec):
    """16 pairs of bf16 from two vectors of weights, rounded."""
    return low(low, high, spec), lambda c, b, s, a: spec.value.operations.pair_weights(b, *a[:2])


@intrinsic
def pair(typing, low, high, spec):
    """16 pairs of bf16 from two vectors, rounded."""
    return low(low, high, spec), lambda c, b, s, a: spec.value.operations.pair(b, *a[:2])


def _half(index: int) -> Any:
    @intrinsic
    def half(typing, x):
        return x(x), lambda c, b, s, a: halves_of_pairs(b, a[0])[index]

    return half


low_numbers, high_numbers = _half(0), _half(1)


@device_function
def weights_in_pairs(column, factors, shift, first, last, target, spec):
    """Weights 2 ** (factors * score + shift) of 16 queries as pairs of keys; returns their sum."""
    zero, step = splat(0.0, spec), HALF_ROW
    a = b = c = d = zero
    j = first
    while j + 4 <= last:
        row, to = column + step * j, target + step * (j // 2)
        e = exp2_saturated(fma(load(row, spec), factors, shift, spec), spec)
        f = exp2_saturated(fma(load(row + step, spec), factors, shift, spec), spec)
        g = exp2_saturated(fma(load(row + 2 * step, spec), factors, shift, spec), spec)
        h = exp2_saturated(fma(load(row + 3 * step, spec), factors, shift, spec), spec)
        store(to, pair_weights(e, f, spec))
        store(to + step, pair_weights(g, h, spec))
        a, b, c, d = add(a, e), add(b, f), add(c, g), add(d, h)
        j += 4
    while j < last:
        e, f = exp2_saturated(fma(load(column + step * j, spec), factors, shift, spec), spec), zero
        if j + 1 < last:
            f = exp2_saturated(fma(load(column + step * (j + 1), spec), factors, shift, spec), spec)
        store(target + step * (j // 2), pair_weights(e, f, spec))
        a, b = add(a, e), add(b, f)
        j += 2
    while j % 32:
        store(target + step * (j // 2), zero)
        j += 2
    return add(add(a, b), add(c, d))


@device_function
def softmax_vector(lane, scores, unit, first, last, m, l, output, size, pairs, spec):
    """Weights 2 ** (unit * score - m) of 16 queries as pairs of keys (keys / 2, 32); m, l and the output so far are rescaled.

    The weights are computed with the shift so far; their sum tells whether one may exceed the limit, beyond which the shift is
    raised. Only then, and while a query has seen no key, is the greatest score looked for.

    Args:
        lane: the first of the 16 queries among the 32 of ``scores`` and ``pairs``, in bytes.
        scores: address of (keys, 32).  unit: factor > 0, rounded together with the shift.
        first, last: the first key, a multiple of 32, and one past the last. Pairs are written from the first key on, with zeros
            up to a multiple of 32.
        m, l: addresses of 16 numbers.  output: address of (size, 64).
    """
    if last > first:
        column, to, factors, zero = scores + lane, pairs + lane, splat(unit, spec), splat(0.0, spec)
        old = load(m, spec)
        # A maximum that rose by more than MAX_RISE has a weight of 2 ** MAX_RISE, less the error of exp2. The limit is lower, so that
        # no query's shift depends on whether another query of the vector exceeds it.
        limit = splat(2.0**MAX_RISE - 1.0, spec)
        shift = total = sub(zero, old)
        careful = any_greater(maximum(shift, old), splat(LARGE, spec))
        while True:
            if careful:
                shift = new_shift(column, HALF_ROW, factors, first, last, m, l, output, size, spec)
                if shifts_large_scores(column, HALF_ROW, factors, shift, first, last, spec):
                    factors, shift = splat(1.0, spec), zero
            total = weights_in_pairs(column, factors, shift, first, last, to, spec)
            if careful or not any_greater(total, limit):
                break
            careful = True
        store(l, add(load(l, spec), total))


@device_function
def unpack_pairs(pairs, half, keys, weights, spec):
    """Pairs of keys (keys / 2, 32) of one half of the queries, as its weights in (keys, 64) in float32."""
    for j in range(0, keys, 2):
        for lane in range(0, HALF_ROW, 64):
            both = load(pairs + HALF_ROW * (j // 2) + lane, spec)
            target = weights + spec.row_bytes * j + HALF_ROW * half + lane
            store(target, low_numbers(both))
            if j + 1 < keys:
                store(target + spec.row_bytes, high_numbers(both))
