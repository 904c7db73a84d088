"""Online softmax of one unit; for products on tile registers, weights are rounded to pairs of bf16 in the pass that computes them.

Scores and the running shift and sum are those of :mod:`lowtri.kernels.softmax`.
"""

from __future__ import annotations

from typing import Any

from numba.extending import intrinsic

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.exponent import exp2_saturated
from lowtri.kernels.operands import row_operand
from lowtri.kernels.operations.baseline import halves_of_pairs
from lowtri.kernels.simd import add, any_greater, fma, load, maximum, splat, store, sub
from lowtri.kernels.softmax import LARGE, MAX_RISE, new_shift, shifts_large_scores, softmax_tile
from lowtri.kernels.spec import QUERIES

__all__ = ["softmax_unit", "weights_operand", "wide_weights"]


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
        needs_maximum = any_greater(maximum(shift, old), splat(LARGE, spec))
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
