"""Passes over a tile of scores: softcap, bias, hidden pairs. Scores are in units of log 2, so that exp is 2 ** x."""

from __future__ import annotations

import numpy as np
from numba.extending import intrinsic

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2_less_1
from lowtri.kernels.plan_walk import SIXTEEN
from lowtri.kernels.simd import above_or, add, div, load, mul, number, only, read, read_word, splat, store, write

__all__ = ["LN2", "LOG2E", "add_bias", "apply_mask", "cap", "in_log2", "log2e"]

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


@device_function
def log2e(x, spec):
    """x * log2(e)."""
    return number(x, spec) * number(LOG2E, spec)


@device_function
def cap(scores, count, softcap, spec):
    """c * tanh(s / c) on ``count`` scores (whole vectors), by tanh(x) = (e^(2x) - 1) / (e^(2x) + 1)."""
    c = log2e(softcap, spec)
    to_exponent = splat(log2e(2.0, spec) / c, spec)
    two, most, least = splat(2.0, spec), splat(60.0, spec), splat(-60.0, spec)
    for at in range(0, spec.number_bytes * count, 64):
        x = mul(load(scores + at, spec), to_exponent)
        x = above_or(x, most, most, above_or(least, x, least, x))
        more = exp2_less_1(x, spec)
        store(scores + at, mul(div(more, add(more, two)), splat(c, spec)))


@intrinsic
def greatest(typing, spec):
    """The greatest number there is."""
    kind = spec.value.number
    most = float(np.finfo(kind.name).max)
    return kind(spec), lambda c, b, s, a: c.get_constant(kind, most)


@device_function
def in_log2(x, spec):
    """x * log2(e); a number stays a number, since the least one often stands for "hidden" and a row of it has a mean."""
    y, most = log2e(x, spec), greatest(spec)
    if y > most and x <= most:
        return most
    if y < -most and x >= -most:
        return -most
    return y


@device_function
def add_bias(scores, bias, q_step, k_step, n, keys, spec):
    """Add bias[i, j] * log2(e) to the scores; steps in numbers, 0 where bias broadcasts."""
    wide = spec.number_bytes
    for j in range(keys):
        row = scores + spec.row_bytes * j
        for i in range(n):
            x = in_log2(read(bias + wide * (i * q_step + j * k_step), spec), spec)
            write(row + wide * i, read(row + wide * i, spec) + x, spec)


@device_function
def apply_mask(scores, words, spans, spec):
    """Set the scores of hidden pairs to -inf: one machine word says which of 64 queries see a key."""
    hidden, wide = splat(-np.inf, spec), spec.number_bytes
    for part in range(4):
        for j in range(spans[2 * part], spans[2 * part + 1]):
            word = read_word(words + 8 * j)
            if (word >> np.uint64(16 * part)) & SIXTEEN != SIXTEEN:
                for lane in range(16 * part, 16 * part + 16, spec.lanes):
                    place = scores + spec.row_bytes * j + wide * lane
                    store(place, only(word, np.uint64(lane), load(place, spec), hidden))
