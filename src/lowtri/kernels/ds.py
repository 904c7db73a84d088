"""The backward's passes over one tile: rows of Q and dO, weights and dS^T, the softcap's derivative, the gradient of the bias.

A tile consists of rows of 64 numbers, with one lane for each query. dS is the gradient of the scores.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2
from lowtri.kernels.plan_walk import ALL_QUERIES
from lowtri.kernels.rows import fill
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
    "pack_query_rows",
    "load_lse_and_delta",
    "softcap_derivative",
    "apply_softcap_derivative",
    "weights_and_ds",
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
def load_lse_and_delta(lse, lse_low, delta, n, shift, shift_low, tile_delta, spec):
    """The log-sum-exp of 64 queries in units of log 2, what it loses to rounding (0 if ``lse_low`` is 0), and their delta.

    ``shift_low`` is 0 for kernels that round weights to bf16, which do not need it.

    A lane without a query and a query that sees no key get a shift of inf, hence weights 2 ** (0 - inf) = 0.
    """
    for i in range(QUERIES):
        offset = spec.number_bytes * i
        sees_keys = i < n and read(lse + offset, spec) != -np.inf
        log2_sum, low = as_number(np.inf, spec), as_number(0.0, spec)
        if sees_keys:
            log2_sum = times_log2e(read(lse + offset, spec), spec)
            low = read(lse_low + offset, spec) if lse_low else low
        write(shift + offset, log2_sum, spec)
        if shift_low:
            write(shift_low + offset, low, spec)
        write(tile_delta + offset, read(delta + offset, spec) if sees_keys else as_number(0.0, spec), spec)


@device_function
def weights_and_ds(scores, ds, unit, mask_bits, keys, shift, shift_low, delta, spec):
    """Scores become weights, and dP becomes dS = weights * (dP - delta); both are 0 at hidden pairs.

    ``unit`` is the factor that brings scores to units of log 2, those of the shift.
    """
    zero, unit = splat(0.0, spec), splat(unit, spec)
    for j in range(keys):
        word = read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES
        for lane in range(0, QUERIES, spec.lanes):
            offset = spec.number_bytes * lane
            score, d_score_at = scores + spec.row_bytes * j + offset, ds + spec.row_bytes * j + offset
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
