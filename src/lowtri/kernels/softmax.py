"""Passes over the scores of a tile: softcap, bias, mask, and online softmax; and what the log-sum-exp of a query is made from.

A tile of scores is (keys, 64): a row for each key, a lane for each query. ``scale_log2`` brings scores to units of log 2, so that exp
is 2 ** x. Per query there is a running shift and a running total of 2 ** (scale_log2 * score - shift); nothing is added up across
lanes. Source: Milakov and Gimelshein 2018; the lazy rescaling of FlashAttention-4's description (2025), here with a limit of 2 ** 8.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device import device_function
from lowtri.kernels.rows import multiply_by, rescale_sums, softmax_of_vector
from lowtri.kernels.simd import (
    LOG2E,
    add,
    add_transposed_to_log2,
    any_greater,
    as_number,
    div,
    exp2,
    exp2m1,
    fma,
    load,
    maximum,
    mul,
    read,
    read_word,
    select_bits,
    select_greater,
    splat,
    store,
    sub,
    to_log2,
    write,
)
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tiles import FIRST_16, edges_of
from lowtri.kernels.values import Packed

LN2 = 0.6931471805599453
LARGE = 2.0**20  # units of log 2: above it a float32's last digit is an eighth or more
MAX_RISE = 8.0  # rescale only if the maximum rose by more: weights stay below 2 ** 8


@device_function
def times_log2e(x, spec):
    """x * log2(e)."""
    return as_number(x, spec) * as_number(LOG2E, spec)


# Scores.


@device_function
def finish_scores(call, scores, scale_log2, queries, keys, derivative):
    """Softcap and bias, if the call has them, in units of log 2; returns what is left to multiply the scores by.

    Args:
        scores: a row for each key, rows in bytes. They are those of ``queries``, and of other lanes.
        derivative: where the derivative of the softcap is written; 0: nowhere.
    """
    spec, softcap = call.spec, call.options.softcap
    count = scores.row // spec.number_bytes * keys.count
    if softcap > 0 or call.bias:  # these passes need scaled scores
        multiply_by(scores.at, count, scale_log2, spec)
        scale_log2 = as_number(1.0, spec)
    if softcap > 0:
        apply_softcap(scores.at, count, softcap, spec)
        if derivative:
            softcap_derivative(scores.at, derivative, count, softcap, spec)
    if call.bias:
        add_bias(call, scores, queries, keys)
    return scale_log2


@device_function
def apply_softcap(scores, count, softcap, spec):
    """c * tanh(s / c) on ``count`` scores (whole vectors), by tanh(x) = (e^(2x) - 1) / (e^(2x) + 1)."""
    c = times_log2e(softcap, spec)
    to_exponent = splat(times_log2e(2.0, spec) / c, spec)
    two = splat(2.0, spec)
    upper = splat(60.0, spec)
    lower = splat(-60.0, spec)
    for offset in range(0, spec.number_bytes * count, 64):
        x = mul(load(scores + offset, spec), to_exponent)
        x = select_greater(x, upper, upper, select_greater(lower, x, lower, x))
        y = exp2m1(x, spec)
        store(scores + offset, mul(div(y, add(y, two)), splat(c, spec)))


@device_function
def softcap_derivative(scores, derivative, count, softcap, spec):
    """The derivative of the softcap at each capped score: 1 - (capped / c) ** 2."""
    c = as_number(softcap, spec) * as_number(LOG2E, spec)
    one, per_c = splat(1.0, spec), splat(as_number(1.0, spec) / c, spec)
    for offset in range(0, spec.number_bytes * count, 64):
        tanh = mul(load(scores + offset, spec), per_c)
        store(derivative + offset, sub(one, mul(tanh, tanh)))


@device_function
def add_bias(call, scores, queries, keys):
    """Add bias[i, j] * log2(e) to the scores; the bias has strides of 0 where it broadcasts."""
    spec = call.spec
    step = call.bias_strides
    number_bytes = call.spec.number_bytes
    place = queries.batch * step.b + queries.head * step.h + queries.first * step.q + keys.first * step.k
    bias = call.bias + number_bytes * place
    # Whole blocks of neighbouring numbers first, then the pairs that are left.
    whole_queries = queries.count - queries.count % spec.lanes
    whole_keys = keys.count - keys.count % spec.lanes if step.k == 1 else 0
    for j in range(0, whole_keys, spec.lanes):
        for i in range(0, whole_queries, spec.lanes):
            block = bias + number_bytes * (i * step.q + j)
            place = scores.at + scores.row * j + number_bytes * i
            add_transposed_to_log2(block, number_bytes * step.q, place, scores.row, spec)
    for j in range(keys.count):
        for i in range(whole_queries if j < whole_keys else 0, queries.count):
            x = to_log2(read(bias + number_bytes * (i * step.q + j * step.k), spec), spec)
            address = scores.at + scores.row * j + number_bytes * i
            write(address, read(address, spec) + x, spec)


@device_function
def apply_mask(scores, keys, first_query, spans, spec):
    """Set the scores of hidden pairs to -inf; the first lane is that of ``first_query``."""
    hidden, number_bytes = splat(-np.inf, spec), spec.number_bytes
    for part in range(spec.queries_per_step // 16):
        first, seen = first_query + 16 * part, edges_of(spans, part)
        for j in range(seen.first, seen.stop):
            word = read_word(keys.mask_words + 8 * j)
            if (word >> np.uint64(first)) & FIRST_16 != FIRST_16:
                for lane in range(0, 16, spec.lanes):
                    address = scores + spec.step_row_bytes * j + number_bytes * (16 * part + lane)
                    store(address, select_bits(word, np.uint64(first + lane), load(address, spec), hidden))


# Online softmax.


@device_function
def softmax_tile(scores, scale_log2, spans, softmax, spec):
    """Scores become weights 2 ** (scale_log2 * score - shift); shifts, totals and the output so far are brought to the new shift.

    Args:
        scores: address of (keys, 64), of which those in the spans are read.
        scale_log2: factor > 0, rounded together with the shift.
    """
    step = spec.row_bytes
    for vector in range(spec.row_bytes // 64):
        column, seen = Packed(scores + 64 * vector, step), edges_of(spans, (spec.lanes * vector) >> 4)
        state, factors = softmax_of_vector(softmax, vector, spec), splat(scale_log2, spec)
        shift = new_shift(column, factors, seen, state, spec)
        if shifts_large_scores(column, factors, shift, seen, spec):
            factors, shift = splat(1.0, spec), splat(0.0, spec)
        a = b = splat(0.0, spec)
        j = seen.first
        while j + 2 <= seen.stop:
            row = column.at + step * j
            e = exp2(fma(load(row, spec), factors, shift, spec), spec)
            f = exp2(fma(load(row + step, spec), factors, shift, spec), spec)
            store(row, e)
            store(row + step, f)
            a, b = add(a, e), add(b, f)
            j += 2
        if j < seen.stop:
            row = column.at + step * j
            e = exp2(fma(load(row, spec), factors, shift, spec), spec)
            store(row, e)
            a = add(a, e)
        store(state.total, add(load(state.total, spec), add(a, b)))


@device_function
def new_shift(scores, factors, keys, softmax, spec):
    """Minus the shift of a vector of queries after the scores of these keys; if the maximum rose, their state is rescaled."""
    step = scores.row
    hidden = splat(-np.inf, spec)
    zero = splat(0.0, spec)
    a = b = c = d = hidden  # four independent chains of maxima, for instruction-level parallelism
    j = keys.first
    while j + 4 <= keys.stop:
        row = scores.at + step * j
        a, b = maximum(load(row, spec), a, spec), maximum(load(row + step, spec), b, spec)
        c, d = maximum(load(row + 2 * step, spec), c, spec), maximum(load(row + 3 * step, spec), d, spec)
        j += 4
    while j < keys.stop:
        a = maximum(load(scores.at + step * j, spec), a, spec)
        j += 1
    greatest = mul(maximum(maximum(a, b, spec), maximum(c, d, spec), spec), factors)
    old = load(softmax.shift, spec)
    limit = add(old, splat(MAX_RISE, spec))
    if any_greater(greatest, limit):
        # Lane by lane: the keys of one query do not change a bit of another query's result.
        new = select_greater(greatest, limit, maximum(greatest, old, spec), old)
        rescale = exp2(sub(old, select_greater(new, hidden, new, zero)), spec)
        store(softmax.shift, new)
        store(softmax.total, mul(load(softmax.total, spec), rescale))
        rescale_sums(softmax.output, rescale, spec)
        old = new
    # A query that has not seen a key yet has no maximum: with shift 0 its weights are 2 ** -inf = 0.
    return sub(zero, select_greater(old, hidden, old, zero))


@device_function
def shifts_large_scores(scores, factors, shift, keys, spec):
    """Whether a shift is large: then the scores become factors * score + shift.

    fma rounds the shift but not the product; for scores this large the difference exceeds 1. So both are rounded.
    """
    amount, large = maximum(shift, sub(splat(0.0, spec), shift), spec), splat(LARGE, spec)
    if not any_greater(amount, large):
        return False
    for address in range(scores.at + scores.row * keys.first, scores.at + scores.row * keys.stop, scores.row):
        x = load(address, spec)
        rounded = add(mul(x, factors), shift)
        store(address, select_greater(amount, large, rounded, fma(x, factors, shift, spec)))
    return True


# The log-sum-exp of a query.


@device_function
def query_number(call, array, queries):
    """The address of the number of the first of these queries, in an array (B, Hq, Nq) of the compute dtype."""
    return array + call.spec.number_bytes * ((queries.batch * call.heads + queries.head) * call.nq + queries.first)


@device_function
def store_lse(call, own, queries):
    """The log-sum-exp of a tile of queries, written to the array, and what it loses to rounding."""
    spec = call.spec
    if call.lse:
        lse_of_tile, residual_of_tile = query_number(call, call.lse, queries), 0
        if call.lse_residual:
            residual_of_tile = query_number(call, call.lse_residual, queries)
        for i in range(queries.count):
            number = spec.number_bytes * i
            total = read(own.total + number, spec)
            lse = as_number(-np.inf, spec)
            residual = as_number(0.0, spec)
            if total != 0:
                shift = read(own.shift + number, spec)
                lse = shift * as_number(LN2, spec) + np.log(total)
                residual = shift - times_log2e(lse, spec) + np.log2(total)
            write(lse_of_tile + number, lse, spec)
            if residual_of_tile:
                write(residual_of_tile + number, residual, spec)


@device_function
def load_lse(call, own, queries):
    """The log-sum-exp of 64 queries in units of log 2, and what it loses to rounding; inf without a query or a visible key.

    Returns a word that has the bits of the other queries.
    """
    spec, seeing = call.spec, np.uint64(0)
    lse_of_tile, residual_of_tile = query_number(call, call.lse, queries), 0
    if call.lse_residual:
        residual_of_tile = query_number(call, call.lse_residual, queries)
    for i in range(QUERIES):
        number = spec.number_bytes * i
        lse_log2, residual = as_number(np.inf, spec), as_number(0.0, spec)
        if i < queries.count and read(lse_of_tile + number, spec) != -np.inf:
            seeing |= np.uint64(1) << np.uint64(i)
            lse_log2 = times_log2e(read(lse_of_tile + number, spec), spec)
            if residual_of_tile:
                residual = read(residual_of_tile + number, spec)
        write(own.shift + number, lse_log2, spec)
        write(own.shift_residual + number, residual, spec)
    return seeing
