"""Passes of the backward over one tile: rows of Q and dO, weights and dS^T, the softcap's slope, the gradient of the bias.

A tile is rows of 64 numbers, a lane for each query. Gradients bear their symbols: dS is the gradient of the scores.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.exponent import exp2
from lowtri.kernels.plan_walk import ALL
from lowtri.kernels.rows import fill
from lowtri.kernels.scores import LOG2E
from lowtri.kernels.simd import (
    above_or,
    fma,
    load,
    load_input,
    mul,
    number,
    only,
    read,
    read_input,
    read_word,
    splat,
    store,
    sub,
    where_finite,
    write,
)
from lowtri.kernels.spec import QUERIES

__all__ = ["add_d_bias", "query_rows", "shifts", "slopes_of", "times_slopes", "weights_and_ds"]


@device_function
def query_rows(source, row_step, step, n, size, lse, target, row, spec):
    """n rows of an array, packed to ``row`` numbers with 0 at the end; a query that sees nothing comes in as 0.

    Returns whether every number that came in is finite.
    """
    finite, wide = True, spec.input_bytes
    for i in range(n):
        from_row, to = source + wide * i * row_step, target + spec.number_bytes * i * row
        if read(lse + spec.number_bytes * i, spec) == -np.inf:
            fill(to, row, 0.0, spec)
        elif step == 1 and size == row:
            for d in range(0, size, spec.lanes):
                x = load_input(from_row + wide * d, spec)
                finite = finite and where_finite(x)
                store(to + spec.number_bytes * d, x)
        else:
            for d in range(row):
                x = read_input(from_row + wide * d * step, spec) if d < size else number(0.0, spec)
                finite = finite and np.isfinite(x)
                write(to + spec.number_bytes * d, x, spec)
    return finite


@device_function
def shifts(lse, delta, n, shift, share, spec):
    """The log-sum-exp of 64 queries in units of log 2, and their delta; a query that sees nothing, and a lane without one, get
    weights of 0: 2 ** (0 - inf)."""
    for i in range(QUERIES):
        at = spec.number_bytes * i
        sees = i < n and read(lse + at, spec) != -np.inf
        write(shift + at, read(lse + at, spec) * number(LOG2E, spec) if sees else number(np.inf, spec), spec)
        write(share + at, read(delta + at, spec) if sees else number(0.0, spec), spec)


@device_function
def weights_and_ds(scores, ds, unit, words, keys, shift, delta, spec):
    """Scores become weights, and dP becomes dS = weights * (dP - delta); 0 at hidden pairs, whatever stood there.

    ``unit`` brings scores to units of log 2, where the log-sum-exp already is.
    """
    zero, unit = splat(0.0, spec), splat(unit, spec)
    for j in range(keys):
        word = read_word(words + 8 * j) if words else ALL
        for lane in range(0, QUERIES, spec.lanes):
            at = spec.number_bytes * lane
            place, to = scores + spec.row_bytes * j + at, ds + spec.row_bytes * j + at
            power = fma(load(place, spec), unit, sub(zero, load(shift + at, spec)), spec)
            # At most 1, also where scores are so large that rounding says more.
            weight = exp2(above_or(power, zero, zero, power), spec)
            d_score = mul(weight, sub(load(to, spec), load(delta + at, spec)))
            if word != ALL:
                weight = only(word, np.uint64(lane), weight, zero)
                d_score = only(word, np.uint64(lane), d_score, zero)
            store(place, weight)
            store(to, d_score)


@device_function
def slopes_of(scores, slopes, keys, softcap, spec):
    """The slope of the softcap at each capped score: 1 - (capped / c) ** 2."""
    one, per_c = splat(1.0, spec), splat(number(1.0, spec) / (softcap * number(LOG2E, spec)), spec)
    for at in range(0, spec.row_bytes * keys, 64):
        part = mul(load(scores + at, spec), per_c)
        store(slopes + at, sub(one, mul(part, part)))


@device_function
def times_slopes(ds, slopes, words, keys, spec):
    """dS through the softcap; hidden pairs stay 0."""
    zero = splat(0.0, spec)
    for j in range(keys):
        word = read_word(words + 8 * j) if words else ALL
        for lane in range(0, QUERIES, spec.lanes):
            at = spec.row_bytes * j + spec.number_bytes * lane
            x = mul(load(ds + at, spec), load(slopes + at, spec))
            store(ds + at, only(word, np.uint64(lane), x, zero))


@device_function
def add_d_bias(ds, d_bias, q_step, k_step, n, keys, spec):
    """Add dS to the gradient of the bias; a step of 0 adds up over what the bias broadcasts."""
    for j in range(keys):
        for i in range(n):
            to = d_bias + spec.number_bytes * (i * q_step + j * k_step)
            write(to, read(to, spec) + read(ds + spec.row_bytes * j + spec.number_bytes * i, spec), spec)
