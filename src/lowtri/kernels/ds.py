"""The backward's passes over one tile: rows of Q and dO, weights and dS^T, the softcap's derivative, the gradient of the bias.

A tile consists of rows of 64 numbers, with one lane for each query. dS is the gradient of the scores.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2
from lowtri.kernels.lanes import reduce_sum
from lowtri.kernels.plan_walk import ALL_QUERIES, FIRST_16
from lowtri.kernels.product import product_add
from lowtri.kernels.rows import fill, multiply_by, word_count
from lowtri.kernels.scores import LOG2E, times_log2e
from lowtri.kernels.simd import (
    all_lanes_finite,
    as_number,
    fma,
    load,
    load_input,
    mul,
    read,
    read_input,
    read_word,
    select_bits,
    select_greater,
    splat,
    store,
    sub,
    write,
)
from lowtri.kernels.spec import QUERIES

__all__ = [
    "add_d_bias",
    "add_to_rows",
    "first_row",
    "scale_rows",
    "zero_rows",
    "pack_query_rows",
    "load_lse_and_delta",
    "softcap_derivative",
    "apply_softcap_derivative",
    "weights_and_ds",
]

_BLOCK = 24  # keys; a multiple of the rows of every register tile


@device_function
def pack_query_rows(source, row_step, step, n, size, lse, target, row, spec):
    """Pack n rows of an array to ``row`` numbers each, padded with 0; a query that sees no key becomes a row of 0.

    Returns whether all of these numbers are finite.
    """
    finite, input_bytes, number_bytes = True, spec.input_bytes, spec.number_bytes
    for i in range(n):
        input_row, packed_row = source + input_bytes * i * row_step, target + number_bytes * i * row
        if read(lse + number_bytes * i, spec) == -np.inf:
            fill(packed_row, row, 0.0, spec)
        elif step == 1 and size == row:
            for d in range(0, size, spec.lanes):
                x = load_input(input_row + input_bytes * d, spec)
                finite = finite and all_lanes_finite(x)
                store(packed_row + number_bytes * d, x)
        else:
            for d in range(row):
                x = read_input(input_row + input_bytes * d * step, spec) if d < size else as_number(0.0, spec)
                finite = finite and np.isfinite(x)
                write(packed_row + number_bytes * d, x, spec)
    return finite


@device_function
def row_product(one, two, step, size, spec):
    """The sum of products of two rows of arrays, in the compute dtype; the first is packed, the second has a step."""
    total, number, whole = splat(0.0, spec), spec.input_bytes, size - size % spec.lanes if step == 1 else 0
    for d in range(0, whole, spec.lanes):
        total = fma(load_input(one + number * d, spec), load_input(two + number * d, spec), total, spec)
    result = reduce_sum(total)
    for d in range(whole, size):
        result += read_input(one + number * d, spec) * read_input(two + number * d * step, spec)
    return result


@device_function
def load_lse_and_delta(call, b, h, r, n, shift, shift_low, tile_delta, spec):
    """The log-sum-exp of 64 queries in units of log 2, what it loses to rounding (0 if there is no lse_low), and their delta.

    ``shift_low`` is 0 for kernels that round weights to bf16, which do not need it.

    A lane without a query and a query that sees no key get a shift of inf, hence weights 2 ** (0 - inf) = 0.
    """
    step, do_step, input_bytes = call.output_strides, call.d_output_strides, spec.input_bytes
    output = call.output + input_bytes * (b * step.b + h * step.h + r * QUERIES * step.n)
    d_output = call.d_output + input_bytes * (b * do_step.b + h * do_step.h + r * QUERIES * do_step.n)
    query0 = (b * call.heads + h) * call.nq + r * QUERIES
    for i in range(QUERIES):
        offset, number = spec.number_bytes * i, spec.number_bytes * (query0 + i)
        log2_sum, low, delta = as_number(np.inf, spec), as_number(0.0, spec), as_number(0.0, spec)
        if i < n and read(call.lse + number, spec) != -np.inf:
            log2_sum = times_log2e(read(call.lse + number, spec), spec)
            low = read(call.lse_low + number, spec) if call.lse_low else low
            row, d_row = output + input_bytes * i * step.n, d_output + input_bytes * i * do_step.n
            delta = row_product(row, d_row, do_step.d, call.dv, spec)
            if call.d_lse:
                delta -= read(call.d_lse + number, spec)
        write(shift + offset, log2_sum, spec)
        if shift_low:
            write(shift_low + offset, low, spec)
        write(tile_delta + offset, delta, spec)
        if call.delta and i < n:
            write(call.delta + number, delta, spec)


@device_function
def first_row(sums, part, b, kv, spec):
    """The offset in bytes of a task's first row in dK or dV."""
    return spec.number_bytes * (part * sums.part + b * sums.b + kv * sums.h)


@device_function
def zero_rows(rows, sums, spec):
    """Set the rows of a task in dK or dV to 0."""
    for j in range(sums.rows):
        fill(rows + spec.number_bytes * j * sums.n, sums.size, 0.0, spec)


@device_function
def scale_rows(rows, sums, factor, spec):
    """Multiply the rows of a task in dK by the factor of the scores."""
    for j in range(sums.rows):
        multiply_by(rows + spec.number_bytes * j * sums.n, sums.size, factor, spec)


@device_function
def add_to_rows(weights, operand, target, sums, keys, spans, groups, n, spec):
    """Target += weights operand, of weights or dS (keys, 64) and rows of n queries: what a tile adds to rows of dV or dK.

    ``spans`` are the keys that each 16 queries see. Where they differ, each block of keys is multiplied by the queries that see any.
    """
    block = _BLOCK if groups > 1 else keys
    for j in range(0, keys, block):
        rows, first, last = min(block, keys - j), QUERIES, 0
        for group in range(4):
            if spans[2 * group] < j + rows and spans[2 * group + 1] > j:
                first, last = min(first, 16 * group), 16 * group + 16
        count, start = min(last, n) - first, word_count(first, spec)
        if count > 0:
            a, b = (
                weights + spec.row_bytes * j + spec.number_bytes * start,
                operand + spec.number_bytes * start * sums.size,
            )
            c, depth = target + spec.number_bytes * j * sums.n, word_count(count, spec)
            product_add(a, QUERIES, 1, b, sums.size, c, sums.n, rows, depth, sums.size, spec)


@device_function
def weights_and_ds(scores, ds, unit, mask_bits, keys, n, shift, shift_low, delta, spec):
    """Scores become weights, and dP becomes dS = weights * (dP - delta); both are 0 at hidden pairs.

    ``unit`` is the factor that brings scores to units of log 2, those of the shift. Where none of 16 queries sees a key, the scores
    need not be computed.
    """
    zero, unit = splat(0.0, spec), splat(unit, spec)
    computed = ALL_QUERIES >> np.uint64((QUERIES - n) & -16)
    for j in range(keys):
        word = (read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES) & computed
        for lane in range(0, QUERIES, spec.lanes):
            offset = spec.number_bytes * lane
            score, d_score_at = scores + spec.row_bytes * j + offset, ds + spec.row_bytes * j + offset
            if (word >> np.uint64(lane & -16)) & FIRST_16 == 0:
                store(score, zero)
                store(d_score_at, zero)
                continue
            power = fma(load(score, spec), unit, sub(zero, load(shift + offset, spec)), spec)
            power = sub(power, load(shift_low + offset, spec))
            # At most 1, also for scores so large that rounding would exceed it.
            weight = exp2(select_greater(power, zero, zero, power), spec)
            d_score = mul(weight, sub(load(d_score_at, spec), load(delta + offset, spec)))
            if word != ALL_QUERIES:
                weight = select_bits(word, np.uint64(lane), weight, zero)
                d_score = select_bits(word, np.uint64(lane), d_score, zero)
            store(score, weight)
            store(d_score_at, d_score)


@device_function
def softcap_derivative(scores, d_softcap, keys, softcap, spec):
    """The derivative of the softcap at each capped score: 1 - (capped / c) ** 2."""
    one, per_c = splat(1.0, spec), splat(as_number(1.0, spec) / (softcap * as_number(LOG2E, spec)), spec)
    for offset in range(0, spec.row_bytes * keys, 64):
        tanh = mul(load(scores + offset, spec), per_c)
        store(d_softcap + offset, sub(one, mul(tanh, tanh)))


@device_function
def apply_softcap_derivative(ds, d_softcap, mask_bits, keys, spec):
    """Multiply dS by the derivative of the softcap; hidden pairs stay 0."""
    zero = splat(0.0, spec)
    for j in range(keys):
        word = read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES
        for lane in range(0, QUERIES, spec.lanes):
            offset = spec.row_bytes * j + spec.number_bytes * lane
            x = mul(load(ds + offset, spec), load(d_softcap + offset, spec))
            store(ds + offset, select_bits(word, np.uint64(lane), x, zero))


@device_function
def add_d_bias(ds, d_bias, q_step, k_step, n, keys, spec):
    """Add dS to the gradient of the bias; along a broadcast axis its step is 0, so that entries are summed."""
    for j in range(keys):
        for i in range(n):
            d_bias_ij = d_bias + spec.number_bytes * (i * q_step + j * k_step)
            write(d_bias_ij, read(d_bias_ij, spec) + read(ds + spec.row_bytes * j + spec.number_bytes * i, spec), spec)
