"""One tile of online softmax, with queries in lanes.

A tile of scores is (keys, 64): a row for each key, a lane for each query. One factor, ``unit``, brings scores to units of log 2,
so that exp is 2 ** x. Per query there is a running shift ``m`` and a running sum ``l`` of 2 ** (unit * score - m). Maximum, sum
and rescaling go lane by lane; nothing is added up across lanes.

Source: Milakov and Gimelshein 2018; the lazy rescaling of FlashAttention-4's description (2025), here with a limit of 2 ** 8.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.exponent import exp2
from lowtri.kernels.inner import inner
from lowtri.kernels.passes import ROW
from lowtri.kernels.simd import above_or, add, any_above, fma, load, maximum, mul, only, read_word, splat, store, sub
from lowtri.kernels.walk import SIXTEEN

__all__ = ["hide", "softmax_tile"]

_VECTOR = 64  # bytes of 16 floats
_HIDDEN = np.float32(-np.inf)
_LARGE = np.float32(2.0**20)  # units of log 2: above it a float's last digit is an eighth or more
_RISE = np.float32(8.0)  # rescale only when the maximum rose by more: weights then stay below 2 ** 8


@inner
def hide(scores, words, spans):
    """Set the scores of hidden pairs to -inf: one machine word says which of 64 queries see a key."""
    hidden = splat(_HIDDEN)
    for part in range(4):
        lane, column = np.uint64(16 * part), scores + _VECTOR * part
        for j in range(spans[2 * part], spans[2 * part + 1]):
            word = read_word(words + 8 * j)
            if (word >> lane) & SIXTEEN != SIXTEEN:
                store(column + ROW * j, only(word, lane, load(column + ROW * j), hidden))


@inner
def softmax_tile(scores, unit, spans, m, l, output, size):
    """Scores become weights 2 ** (unit * score - m); m, l and the output so far (size, 64) are brought to the new shift.

    Args:
        scores: address of (keys, 64).  unit: factor > 0, rounded together with the shift.
        spans: the first key and one past the last for each of four vectors of queries; what lies outside is not touched.
        m, l: addresses of 64 floats.  output: address of (size, 64).
    """
    zero, unit = splat(np.float32(0.0)), splat(unit)
    for part in range(4):
        lane, first, last = _VECTOR * part, spans[2 * part], spans[2 * part + 1]
        # Four chains of maxima at once: each waits for itself only.
        a = splat(_HIDDEN)
        b, c, d = a, a, a
        j = first
        while j + 4 <= last:
            row = scores + ROW * j + lane
            a, b = maximum(load(row), a), maximum(load(row + ROW), b)
            c, d = maximum(load(row + 2 * ROW), c), maximum(load(row + 3 * ROW), d)
            j += 4
        while j < last:
            a = maximum(load(scores + ROW * j + lane), a)
            j += 1
        greatest = mul(maximum(maximum(a, b), maximum(c, d)), unit)
        old = load(m + lane)
        limit = add(old, splat(_RISE))
        if any_above(greatest, limit):
            # Each lane for itself: what its neighbours met leaves no trace, not even in the last digit.
            new = above_or(greatest, limit, maximum(greatest, old), old)
            factor = exp2(sub(old, above_or(new, splat(_HIDDEN), new, zero)))
            store(m + lane, new)
            store(l + lane, mul(load(l + lane), factor))
            for r in range(size):
                place = output + ROW * r + lane
                store(place, mul(load(place), factor))
            old = new
        # A query that has seen nothing yet has no shift: 0 serves, and 2 ** -inf is 0.
        shift = sub(zero, above_or(old, splat(_HIDDEN), old, zero))
        by = unit
        amount, large = maximum(shift, sub(zero, shift)), splat(_LARGE)
        if any_above(amount, large):
            # The product inside fma is not rounded and the shift is: here that would be more than a unit. Round both.
            for j in range(first, last):
                place = scores + ROW * j + lane
                store(place, above_or(amount, large, mul(load(place), unit), load(place)))
            by = above_or(amount, large, splat(np.float32(1.0)), unit)
        a, b, c, d = zero, zero, zero, zero
        j = first
        while j + 4 <= last:
            row = scores + ROW * j + lane
            e, f = exp2(fma(load(row), by, shift)), exp2(fma(load(row + ROW), by, shift))
            g, h = exp2(fma(load(row + 2 * ROW), by, shift)), exp2(fma(load(row + 3 * ROW), by, shift))
            store(row, e)
            store(row + ROW, f)
            store(row + 2 * ROW, g)
            store(row + 3 * ROW, h)
            a, b, c, d = add(a, e), add(b, f), add(c, g), add(d, h)
            j += 4
        while j < last:
            row = scores + ROW * j + lane
            e = exp2(fma(load(row), by, shift))
            store(row, e)
            a = add(a, e)
            j += 1
        store(l + lane, add(load(l + lane), add(add(a, b), add(c, d))))
