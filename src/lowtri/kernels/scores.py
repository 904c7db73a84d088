"""Passes over a tile of scores: softcap, bias, mask. Scores are in units of log 2, so that exp is 2 ** x."""

from __future__ import annotations

import numpy as np
from numba.extending import intrinsic

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2m1
from lowtri.kernels.plan_walk import FIRST_16
from lowtri.kernels.simd import (
    add,
    as_number,
    div,
    element,
    load,
    mul,
    read,
    read_word,
    select_bits,
    select_greater,
    splat,
    store,
    write,
)

__all__ = ["LN2", "LOG2E", "add_bias", "apply_mask", "apply_softcap", "to_log2", "times_log2e"]

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


@device_function
def times_log2e(x, spec):
    """x * log2(e)."""
    return as_number(x, spec) * as_number(LOG2E, spec)


@device_function
def apply_softcap(scores, count, softcap, spec):
    """c * tanh(s / c) on ``count`` scores (whole vectors), by tanh(x) = (e^(2x) - 1) / (e^(2x) + 1)."""
    c = times_log2e(softcap, spec)
    to_exponent = splat(times_log2e(2.0, spec) / c, spec)
    two, upper, lower = splat(2.0, spec), splat(60.0, spec), splat(-60.0, spec)
    for offset in range(0, spec.number_bytes * count, 64):
        x = mul(load(scores + offset, spec), to_exponent)
        x = select_greater(x, upper, upper, select_greater(lower, x, lower, x))
        y = exp2m1(x, spec)
        store(scores + offset, mul(div(y, add(y, two)), splat(c, spec)))


@intrinsic
def max_number(typing, spec):
    """The greatest finite number."""
    kind = spec.value.number
    value = float(np.finfo(kind.name).max)
    return kind(spec), lambda c, b, s, a: c.get_constant(kind, value)


@device_function
def to_log2(x, spec):
    """x * log2(e), finite for finite x: biases often hide with ``finfo.min``, and a row of it gives the mean of all values."""
    y, limit = times_log2e(x, spec), max_number(spec)
    if y > limit and x <= limit:
        return limit
    if y < -limit and x >= -limit:
        return -limit
    return y


@device_function
def add_bias(scores, row, bias, q_step, k_step, n, keys, spec):
    """Add bias[i, j] * log2(e) to the scores; steps in numbers, 0 where bias broadcasts."""
    number_bytes = spec.number_bytes
    for j in range(keys):
        scores_of_key = scores + row * j
        for i in range(n):
            x = to_log2(read(bias + number_bytes * (i * q_step + j * k_step), spec), spec)
            address = scores_of_key + number_bytes * i
            write(address, read(address, spec) + x, spec)


@device_function
def apply_mask(scores, mask_bits, query, spans, spec):
    """Set the scores of hidden pairs of a unit, whose first query is ``query``, to -inf.

    The mask bits are a word for each key, a bit for each of 64 queries.
    """
    hidden, number_bytes = splat(-np.inf, spec), spec.number_bytes
    for part in range(spec.unit_queries // 16):
        first = query + 16 * part
        for j in range(element(spans, 2 * part), element(spans, 2 * part + 1)):
            word = read_word(mask_bits + 8 * j)
            if (word >> np.uint64(first)) & FIRST_16 != FIRST_16:
                for lane in range(0, 16, spec.lanes):
                    address = scores + spec.unit_row * j + number_bytes * (16 * part + lane)
                    store(address, select_bits(word, np.uint64(first + lane), load(address, spec), hidden))
