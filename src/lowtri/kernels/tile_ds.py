"""Passes of the backward on tile registers: rows of Q and dO as bf16, weights and dS^T rounded to the operands of three products."""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2
from lowtri.kernels.plan_walk import ALL_QUERIES
from lowtri.kernels.rows import fill, interleave_input_rows
from lowtri.kernels.simd import (
    all_lanes_finite,
    fma,
    load,
    load_input,
    mul,
    read,
    read_word,
    select_bits,
    select_greater,
    splat,
    store,
    store_input,
    sub,
)
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_operands import copy_rows, whole, whole_16
from lowtri.kernels.tile_softmax import pair

__all__ = ["copy_query_rows", "pairs_of_rows", "round_tile", "weights_and_ds_pairs", "wide_weights_and_ds"]


@device_function
def copy_query_rows(source, row_step, step, n, size, lse, target, spec):
    """n rows of an array as 64 rows of ``whole(size)`` numbers; a query that sees no key, and rows past n, are 0.

    Returns whether all of these numbers are finite.
    """
    copy_rows(source, row_step, step, n, size, target, spec.row_bytes // 4, spec)
    finite, row = True, 2 * whole(size)
    for i in range(n):
        if read(lse + 4 * i, spec) == -np.inf:
            fill(target + i * row, row // 4, 0.0, spec)
        for offset in range(0, row, 32):
            finite = finite and all_lanes_finite(load_input(target + i * row + offset, spec))
    return finite


@device_function
def pairs_of_rows(rows, size, zeros, target, spec):
    """64 rows of ``whole(size)`` numbers as operand B (32, whole(size)): neighbouring rows in pairs."""
    interleave_input_rows(rows, whole(size), QUERIES, whole(size), zeros, target, spec)


@device_function
def zero_rows_past(scores, ds, ds_pairs, keys, spec):
    """Zeros after the last key: rows up to a multiple of 16, pairs up to a multiple of 32."""
    for j in range(keys, whole_16(keys)):
        fill(scores + spec.row_bytes * j, QUERIES // 2, 0.0, spec)
        fill(ds + spec.row_bytes * j, QUERIES // 2, 0.0, spec)
    first = (keys + 1) // 2
    fill(ds_pairs + spec.row_bytes * first, QUERIES * (whole(keys) // 2 - first), 0.0, spec)


@device_function
def round_tile(scores, ds, keys, ds_pairs, spec):
    """Weights and dS (keys, 64) rounded in place, to the first half of each row; and dS as pairs of keys."""
    zero = splat(0.0, spec)
    for j in range(0, keys, 2):
        for lane in range(0, QUERIES, 16):
            row = spec.row_bytes * j
            even, odd = load(ds + row + 4 * lane, spec), zero
            store_input(scores + row + 2 * lane, load(scores + row + 4 * lane, spec), spec)
            store_input(ds + row + 2 * lane, even, spec)
            if j + 1 < keys:
                row += spec.row_bytes
                odd = load(ds + row + 4 * lane, spec)
                store_input(scores + row + 2 * lane, load(scores + row + 4 * lane, spec), spec)
                store_input(ds + row + 2 * lane, odd, spec)
            store(ds_pairs + spec.row_bytes * (j // 2) + 4 * lane, pair(even, odd, spec))
    zero_rows_past(scores, ds, ds_pairs, keys, spec)


@device_function
def weight_and_ds(scores, ds, unit, word, lane, shift, delta, spec):
    """The weight and dS of 16 pairs; both 0 where the key is hidden. See :func:`lowtri.kernels.ds.weights_and_ds`."""
    zero = splat(0.0, spec)
    power = fma(load(scores, spec), unit, sub(zero, shift), spec)
    weight = exp2(select_greater(power, zero, zero, power), spec)
    d_score = mul(weight, sub(load(ds, spec), delta))
    if word != ALL_QUERIES:
        weight = select_bits(word, np.uint64(lane), weight, zero)
        d_score = select_bits(word, np.uint64(lane), d_score, zero)
    return weight, d_score


@device_function
def wide_weights_and_ds(scores, ds, unit, mask_bits, keys, shift, delta, spec):
    """Scores and dP (keys, 64) become weights and dS in float32: the numbers that :func:`weights_and_ds_pairs` rounds."""
    unit = splat(unit, spec)
    for j in range(keys):
        word = read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES
        for lane in range(0, QUERIES, 16):
            score, d_score = scores + spec.row_bytes * j + 4 * lane, ds + spec.row_bytes * j + 4 * lane
            shifts, deltas = load(shift + 4 * lane, spec), load(delta + 4 * lane, spec)
            weight, d_s = weight_and_ds(score, d_score, unit, word, lane, shifts, deltas, spec)
            store(score, weight)
            store(d_score, d_s)


@device_function
def weights_and_ds_pairs(scores, ds, unit, mask_bits, keys, shift, delta, ds_pairs, spec):
    """Scores and dP (keys, 64) become weights and dS, rounded as :func:`round_tile` rounds them, in one pass."""
    zero, unit, row = splat(0.0, spec), splat(unit, spec), spec.row_bytes
    for j in range(0, keys, 2):
        both = j + 1 < keys
        word = read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES
        next_word = read_word(mask_bits + 8 * j + 8) if mask_bits and both else ALL_QUERIES
        for lane in range(0, QUERIES, 16):
            score, d_score = scores + row * j, ds + row * j
            shifts, deltas, offset = load(shift + 4 * lane, spec), load(delta + 4 * lane, spec), 4 * lane
            weight, even = weight_and_ds(score + offset, d_score + offset, unit, word, lane, shifts, deltas, spec)
            store_input(score + 2 * lane, weight, spec)
            store_input(d_score + 2 * lane, even, spec)
            odd = zero
            if both:
                offset += row
                weight, odd = weight_and_ds(
                    score + offset, d_score + offset, unit, next_word, lane, shifts, deltas, spec
                )
                store_input(score + row + 2 * lane, weight, spec)
                store_input(d_score + row + 2 * lane, odd, spec)
            store(ds_pairs + row * (j // 2) + 4 * lane, pair(even, odd, spec))
    zero_rows_past(scores, ds, ds_pairs, keys, spec)
