"""The backward's passes over one tile: rows of Q and dO, weights and dS^T, the softcap's derivative, the gradient of the bias.

A tile consists of rows of 64 numbers, with one lane for each query. dS is the gradient of the scores.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.exponent import exp2
from lowtri.kernels.plan_walk import ALL_QUERIES, FIRST_16
from lowtri.kernels.rows import fill, interleave_rows, multiply_by
from lowtri.kernels.scores import LOG2E, times_log2e
from lowtri.kernels.simd import (
    all_lanes_finite,
    as_number,
    fma,
    interleave,
    load,
    load_input,
    mul,
    read,
    read_input,
    read_word,
    reduce_sum,
    select_bits,
    select_greater,
    splat,
    store,
    store_input,
    sub,
    write,
)
from lowtri.kernels.spec import QUERIES

__all__ = [
    "add_d_bias",
    "first_row",
    "scale_rows",
    "zero_rows",
    "pack_query_rows",
    "load_lse_and_delta",
    "softcap_derivative",
    "apply_softcap_derivative",
    "ds_operands",
    "weights_and_ds",
    "weights_and_ds_operands",
]


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

    A lane without a query and a query that sees no key get a shift of inf, hence weights 2 ** (0 - inf) = 0. Returns a word that has
    the bits of the other queries.
    """
    step, do_step, input_bytes = call.output_strides, call.d_output_strides, spec.input_bytes
    output = call.output + input_bytes * (b * step.b + h * step.h + r * QUERIES * step.n)
    d_output = call.d_output + input_bytes * (b * do_step.b + h * do_step.h + r * QUERIES * do_step.n)
    query0, seeing = (b * call.heads + h) * call.nq + r * QUERIES, np.uint64(0)
    for i in range(QUERIES):
        offset, number = spec.number_bytes * i, spec.number_bytes * (query0 + i)
        log2_sum, low, delta = as_number(np.inf, spec), as_number(0.0, spec), as_number(0.0, spec)
        if i < n and read(call.lse + number, spec) != -np.inf:
            seeing |= np.uint64(1) << np.uint64(i)
            log2_sum = times_log2e(read(call.lse + number, spec), spec)
            low = read(call.lse_low + number, spec) if call.lse_low else low
            row, d_row = output + input_bytes * i * step.n, d_output + input_bytes * i * do_step.n
            delta = row_product(row, d_row, do_step.d, call.dv, spec)
            if call.d_lse:
                delta -= read(call.d_lse + number, spec)
        write(shift + offset, log2_sum, spec)
        write(shift_low + offset, low, spec)
        write(tile_delta + offset, delta, spec)
        if call.delta and i < n:
            write(call.delta + number, delta, spec)
    return seeing


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


@by_spec
def less_low(spec):
    """Powers of 2 less what the log-sum-exp of 16 queries loses to rounding, which weights rounded on the way to tiles do not need."""

    def less(power, shift_low, spec):
        return sub(power, load(shift_low, spec))

    def unchanged(power, shift_low, spec):
        return power

    return unchanged if spec.on_tiles else less


@device_function
def weight_and_ds(score, dp, scale_log2, word, lane, shift, shift_low, delta, spec):
    """The weight, and dS = weight * (dP - delta), of a key and a vector of queries from ``lane`` on; both are 0 where it is hidden.

    Where none of 16 queries sees the key, its scores need not be computed.
    """
    zero, offset = splat(0.0, spec), spec.number_bytes * lane
    if (word >> np.uint64(lane & -16)) & FIRST_16 == 0:
        return zero, zero
    power = fma(load(score + offset, spec), scale_log2, sub(zero, load(shift + offset, spec)), spec)
    power = less_low(power, shift_low + offset, spec)
    # At most 1, also for scores so large that rounding would exceed it.
    weight = exp2(select_greater(power, zero, zero, power), spec)
    ds = mul(weight, sub(load(dp + offset, spec), load(delta + offset, spec)))
    if word != ALL_QUERIES:
        return select_bits(word, np.uint64(lane), weight, zero), select_bits(word, np.uint64(lane), ds, zero)
    return weight, ds


@device_function
def weights_and_ds(scores, ds, scale_log2, mask_bits, seeing, keys, shift, shift_low, delta, spec):
    """Scores become weights, and dP becomes dS = weights * (dP - delta); both are 0 at hidden pairs.

    Args:
        scale_log2: the factor that brings scores to units of log 2, those of the shift.
        seeing: a word of the queries that see any key.
    """
    factor = splat(scale_log2, spec)
    for j in range(keys):
        word = (read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES) & seeing
        for lane in range(0, QUERIES, spec.lanes):
            row, offset = spec.row_bytes * j, spec.row_bytes * j + spec.number_bytes * lane
            weight, d_score = weight_and_ds(scores + row, ds + row, factor, word, lane, shift, shift_low, delta, spec)
            store(scores + offset, weight)
            store(ds + offset, d_score)


@by_spec
def weights_and_ds_operands(spec):
    """:func:`weights_and_ds` and :func:`ds_operands` in one pass; whether there is one for this spec."""

    def none(scores, ds, scale_log2, mask_bits, seeing, keys, shift, shift_low, delta, ds_pairs, spec):
        return False

    def in_pairs(scores, ds, scale_log2, mask_bits, seeing, keys, shift, shift_low, delta, ds_pairs, spec):
        factor, zero, row = splat(scale_log2, spec), splat(0.0, spec), spec.row_bytes
        for j in range(0, keys, 2):
            both = j + 1 < keys
            word = (read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES) & seeing
            next_word = (read_word(mask_bits + 8 * j + 8) if mask_bits and both else ALL_QUERIES) & seeing
            for lane in range(0, QUERIES, 16):
                score, dp, odd = scores + row * j, ds + row * j, zero
                weight, even = weight_and_ds(score, dp, factor, word, lane, shift, shift_low, delta, spec)
                # In place: the bf16 numbers of 16 queries end before the numbers that are still to be read.
                store_input(score + 2 * lane, weight, spec)
                store_input(dp + 2 * lane, even, spec)
                if both:
                    score, dp = score + row, dp + row
                    weight, odd = weight_and_ds(score, dp, factor, next_word, lane, shift, shift_low, delta, spec)
                    store_input(score + 2 * lane, weight, spec)
                    store_input(dp + 2 * lane, odd, spec)
                store(ds_pairs + row * (j // 2) + 4 * lane, interleave(even, odd, spec))
        return True

    return in_pairs if spec.per_word > 1 else none


@by_spec
def ds_operands(spec):
    """Weights and dS (keys, 64) as operands of dV and dK, in place; returns dS as the operand of dQ.

    In pairs, bf16 numbers fill the first half of each row, and ``ds_pairs`` is the memory of the latter.
    """

    def numbers(scores, ds, keys, ds_pairs, spec):
        return ds

    def in_pairs(scores, ds, keys, ds_pairs, spec):
        interleave_rows(ds, keys, QUERIES, ds_pairs, spec)
        for row in range(0, spec.row_bytes * keys, spec.row_bytes):
            for lane in range(0, QUERIES, 16):
                store_input(scores + row + 2 * lane, load(scores + row + 4 * lane, spec), spec)
                store_input(ds + row + 2 * lane, load(ds + row + 4 * lane, spec), spec)
        return ds_pairs

    return in_pairs if spec.per_word > 1 else numbers


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
