"""One tile of online softmax, with queries in lanes.

A tile of scores is (keys, 64): a row for each key, a lane for each query. One factor, ``scale_log2``, brings scores to units of log 2,
so that exp is 2 ** x. Per query there is a running shift ``m`` and a running sum ``l`` of 2 ** (scale_log2 * score - m). Maximum, sum
and rescaling go lane by lane; nothing is added up across lanes.

Source: Milakov and Gimelshein 2018; the lazy rescaling of FlashAttention-4's description (2025), here with a limit of 2 ** 8.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2
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
from lowtri.kernels.tile_output import rescale_output

__all__ = ["LARGE", "MAX_RISE", "new_shift", "shifts_large_scores", "softmax_tile"]

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
        a, b = maximum(load(row, spec), a), maximum(load(row + step, spec), b)
        c, d = maximum(load(row + 2 * step, spec), c), maximum(load(row + 3 * step, spec), d)
        j += 4
    while j < last:
        a = maximum(load(scores + step * j, spec), a)
        j += 1
    greatest = mul(maximum(maximum(a, b), maximum(c, d)), factors)
    old = load(m, spec)
    limit = add(old, splat(MAX_RISE, spec))
    if any_greater(greatest, limit):
        # Lane by lane: the keys of one query do not change a bit of another query's result.
        new = select_greater(greatest, limit, maximum(greatest, old), old)
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
    amount, large = maximum(shift, sub(splat(0.0, spec), shift)), splat(LARGE, spec)
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
