"""One tile of online softmax, with queries in lanes.

A tile of scores is (keys, 64): a row for each key, a lane for each query. One factor, ``scale_log2``, brings scores to units of log 2,
so that exp is 2 ** x. Per query there is a running shift ``m`` and a running sum ``l`` of 2 ** (scale_log2 * score - m). Maximum, sum
and rescaling go lane by lane; nothing is added up across lanes. For products on tile registers, the weights of one unit of work are
rounded to pairs of bf16 in the pass that computes them.

Source: Milakov and Gimelshein 2018; the lazy rescaling of FlashAttention-4's description (2025), here with a limit of 2 ** 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import intrinsic

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.exponent import exp2, exp2_saturated
from lowtri.kernels.operands import row_operand
from lowtri.kernels.operations.baseline import halves_of_pairs
from lowtri.kernels.simd import (
    add,
    any_greater,
    element,
    fma,
    load,
    maximum,
    mul,
    select_greater,
    splat,
    store,
    sub,
)
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_output import rescale_output

__all__ = ["softmax_unit", "weights_operand", "wide_weights"]

LARGE = 2.0**20  # units of log 2: above it a float32's last digit is an eighth or more
MAX_RISE = 8.0  # rescale only if the maximum rose by more: weights stay below 2 ** 8


@device_function
def new_shift(scores, step, factors, first, last, m, l, output, vector, size, spec):
    """Minus the shift of a vector of queries after these scores, ``step`` bytes apart.

    m, l and the output of these queries, the vector of that number, are rescaled if the maximum rose.
    """
    hidden, zero = splat(-np.inf, spec), splat(0.0, spec)
    a = b = c = d = hidden  # four independent chains of maxima, for instruction-level parallelism
    j = first
    while j + 4 <= last:
        row = scores + step * j
        a, b = maximum(load(row, spec), a, spec), maximum(load(row + step, spec), b, spec)
        c, d = maximum(load(row + 2 * step, spec), c, spec), maximum(load(row + 3 * step, spec), d, spec)
        j += 4
    while j < last:
        a = maximum(load(scores + step * j, spec), a, spec)
        j += 1
    greatest = mul(maximum(maximum(a, b, spec), maximum(c, d, spec), spec), factors)
    old = load(m, spec)
    limit = add(old, splat(MAX_RISE, spec))
    if any_greater(greatest, limit):
        # Lane by lane: the keys of one query do not change a bit of another query's result.
        new = select_greater(greatest, limit, maximum(greatest, old, spec), old)
        rescale = exp2(sub(old, select_greater(new, hidden, new, zero)), spec)
        store(m, new)
        store(l, mul(load(l, spec), rescale))
        rescale_output(output, vector, size, rescale, spec)
        old = new
    # A query that has not seen a key yet has no maximum: with shift 0 its weights are 2 ** -inf = 0.
    return sub(zero, select_greater(old, hidden, old, zero))


@device_function
def shifts_large_scores(scores, step, factors, shift, first, last, spec):
    """Whether a shift is large: then the scores become factors * score + shift.

    fma rounds the shift but not the product; for scores this large the difference exceeds 1. So both are rounded.
    """
    amount, large = maximum(shift, sub(splat(0.0, spec), shift), spec), splat(LARGE, spec)
    if not any_greater(amount, large):
        return False
    for address in range(scores + step * first, scores + step * last, step):
        x = load(address, spec)
        rounded = add(mul(x, factors), shift)
        store(address, select_greater(amount, large, rounded, fma(x, factors, shift, spec)))
    return True


@device_function
def softmax_tile(scores, scale_log2, spans, m, l, output, size, spec):
    """Scores become weights 2 ** (scale_log2 * score - m); m, l and the output so far are rescaled to the new shift.

    Args:
        scores: address of (keys, 64).  scale_log2: factor > 0, rounded together with the shift.
        spans: the first key and one past the last for each 16 queries; other scores are not touched.
        m, l: addresses of 64 numbers.  output, size: see :mod:`lowtri.kernels.tile_output`.
    """
    step = spec.row_bytes
    for vector in range(spec.row_bytes // 64):
        lane, part = 64 * vector, (spec.lanes * vector) >> 4
        first, last, factors = element(spans, 2 * part), element(spans, 2 * part + 1), splat(scale_log2, spec)
        column = scores + lane
        shift = new_shift(column, step, factors, first, last, m + lane, l + lane, output, vector, size, spec)
        if shifts_large_scores(column, step, factors, shift, first, last, spec):
            factors, shift = splat(1.0, spec), splat(0.0, spec)
        a = b = splat(0.0, spec)
        j = first
        while j + 2 <= last:
            row = column + step * j
            e = exp2(fma(load(row, spec), factors, shift, spec), spec)
            f = exp2(fma(load(row + step, spec), factors, shift, spec), spec)
            store(row, e)
            store(row + step, f)
            a, b = add(a, e), add(b, f)
            j += 2
        if j < last:
            row = column + step * j
            e = exp2(fma(load(row, spec), factors, shift, spec), spec)
            store(row, e)
            a = add(a, e)
        store(l + lane, add(load(l + lane, spec), add(a, b)))


# One unit of work.


@intrinsic
def pair_weights(typing, low, high, spec):
    """16 pairs of bf16 from two vectors of weights, rounded."""
    return low(low, high, spec), lambda c, b, s, a: spec.value.operations.pair_weights(b, *a[:2])


def _half(index: int) -> Any:
    @intrinsic
    def half(typing, x):
        return x(x), lambda c, b, s, a: halves_of_pairs(b, a[0])[index]

    return half


low_numbers, high_numbers = _half(0), _half(1)


@device_function
def weights_in_pairs(column, factors, shift, first, last, target, spec):
    """Weights 2 ** (factors * score + shift) of 16 queries as pairs of keys; returns their sum."""
    zero, step = splat(0.0, spec), spec.unit_row
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
def softmax_vector(lane, scores, scale_log2, first, last, m, l, output, size, pairs, spec):
    """Weights 2 ** (scale_log2 * score - m) of 16 queries as pairs of keys (keys / 2, 32); m, l and the output so far are rescaled.

    The weights are computed with the shift so far; their sum tells whether one may exceed the limit, beyond which the shift is
    raised. Only then, and while a query has seen no key, is the greatest score looked for.

    Args:
        lane: the first of the 16 queries among the 32 of ``scores`` and ``pairs``, in bytes.
        scores: address of (keys, 32).  scale_log2: factor > 0, rounded together with the shift.
        first, last: the first key, a multiple of 32, and one past the last. Pairs are written from the first key on, with zeros
            up to a multiple of 32.
        m, l: addresses of 16 numbers.  output: address of (size, 64).
    """
    if last > first:
        column, to, factors, zero = scores + lane, pairs + lane, splat(scale_log2, spec), splat(0.0, spec)
        old = load(m, spec)
        # A maximum that rose by more than MAX_RISE has a weight of 2 ** MAX_RISE, less the error of exp2. The limit is lower, so that
        # no query's shift depends on whether another query of the vector exceeds it.
        limit = splat(2.0**MAX_RISE - 1.0, spec)
        shift = total = sub(zero, old)
        needs_maximum = any_greater(maximum(shift, old, spec), splat(LARGE, spec))
        while True:
            if needs_maximum:
                shift = new_shift(column, spec.unit_row, factors, first, last, m, l, output, 0, size, spec)
                if shifts_large_scores(column, spec.unit_row, factors, shift, first, last, spec):
                    factors, shift = splat(1.0, spec), zero
            total = weights_in_pairs(column, factors, shift, first, last, to, spec)
            if needs_maximum or not any_greater(total, limit):
                break
            needs_maximum = True
        store(l, add(load(l, spec), total))


@by_spec
def softmax_unit(spec):
    """:func:`lowtri.kernels.softmax.softmax_tile` for a unit; on tiles the weights become ``pairs``, and scores remain."""

    def in_pairs(scores, scale_log2, spans, m, l, output, size, pairs, spec):
        first, last = spans[0], spans[1]
        for lane in range(0, spec.unit_row, 64):
            softmax_vector(lane, scores, scale_log2, first, last, m + lane, l + lane, output + lane, size, pairs, spec)

    def in_place(scores, scale_log2, spans, m, l, output, size, pairs, spec):
        softmax_tile(scores, scale_log2, spans, m, l, output, size, spec)

    return in_pairs if spec.on_tiles else in_place


@by_spec
def wide_weights(spec):
    """Set the scores of a unit to the weights, of which ``pairs`` has the pairs of keys; elsewhere they are the weights."""

    def unpacked(scores, pairs, keys, spec):
        for j in range(0, keys, 2):
            for lane in range(0, spec.unit_row, 64):
                both, target = load(pairs + spec.unit_row * (j // 2) + lane, spec), scores + spec.unit_row * j + lane
                store(target, low_numbers(both))
                if j + 1 < keys:
                    store(target + spec.unit_row, high_numbers(both))

    def in_place(scores, pairs, keys, spec):
        pass

    return unpacked if spec.on_tiles else in_place


@by_spec
def weights_operand(spec):
    """The weights of a unit as an operand with words along the keys; ``pairs`` is scratch, which on tiles has them."""

    def from_scores(scores, keys, pairs, spec):
        return row_operand(scores, keys, QUERIES, pairs, spec)

    def from_pairs(scores, keys, pairs, spec):
        return pairs

    return from_pairs if spec.on_tiles else from_scores
