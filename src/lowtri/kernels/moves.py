"""Passes of the backward over one tile: rows of Q and dO packed, weights and moves (dS^T), slopes, the gradient of the bias, and the
care for rows that are not finite.

A tile is rows of 64 floats, a lane for each query, as in ``passes``.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.exponent import exp2
from lowtri.kernels.inner import inner
from lowtri.kernels.passes import LOG2E, ROW, all_finite, fill, number, numbers
from lowtri.kernels.simd import above_or, fma, load, mul, only, read, read_word, splat, store, sub, where_finite, write
from lowtri.kernels.walk import ALL

__all__ = [
    "bias_out",
    "clean_rows",
    "keep_slope",
    "keys_finite",
    "rows_in",
    "spread_broken",
    "times_slope",
    "weigh",
]


@inner
def rows_in(source, row_step, step, n, size, lse, target, row, half):
    """n rows of ``size`` numbers, packed to rows of ``row`` floats with 0 at the end; a query that sees nothing comes in as 0.

    Returns whether every number that came in is finite.
    """
    finite, wide = True, 4 if half is None else 2
    for i in range(n):
        from_row, to = source + wide * i * row_step, target + 4 * i * row
        if read(lse + 4 * i) == -np.inf:
            fill(to, row, np.float32(0.0))
        elif step == 1 and size == row:
            for d in range(0, size, 16):
                x = numbers(from_row + wide * d, half)
                finite = finite and where_finite(x)
                store(to + 4 * d, x)
        else:
            for d in range(row):
                x = number(from_row + wide * d * step, half) if d < size else np.float32(0.0)
                finite = finite and np.isfinite(x)
                write(to + 4 * d, x)
    return finite


@inner
def weigh(scores, moves, unit, words, keys, lse, delta):
    """Scores become weights, and dP becomes moves = weights * (dP - delta); 0 at hidden pairs, whatever stood there.

    ``unit`` brings scores to units of log 2, where the log-sum-exp already is.
    """
    zero, unit = splat(np.float32(0.0)), splat(unit)
    for j in range(keys):
        word = read_word(words + 8 * j) if words else ALL
        for lane in range(0, ROW, 64):
            place, to = scores + ROW * j + lane, moves + ROW * j + lane
            power = fma(load(place), unit, sub(zero, load(lse + lane)))
            # At most 1, also where scores are so large that rounding says more.
            weight = exp2(above_or(power, zero, zero, power))
            move = mul(weight, sub(load(to), load(delta + lane)))
            if word != ALL:
                weight = only(word, np.uint64(lane // 4), weight, zero)
                move = only(word, np.uint64(lane // 4), move, zero)
            store(place, weight)
            store(to, move)


@inner
def keep_slope(scores, slopes, keys, softcap):
    """The slope of the softcap at each capped score: 1 - (capped / c) ** 2."""
    one, per_c = splat(np.float32(1.0)), splat(np.float32(1.0) / (softcap * LOG2E))
    for at in range(0, ROW * keys, 64):
        part = mul(load(scores + at), per_c)
        store(slopes + at, sub(one, mul(part, part)))


@inner
def times_slope(moves, slopes, words, keys):
    """Moves through the softcap; hidden pairs stay 0."""
    zero = splat(np.float32(0.0))
    for j in range(keys):
        word = read_word(words + 8 * j) if words else ALL
        for lane in range(0, ROW, 64):
            place = moves + ROW * j + lane
            store(place, only(word, np.uint64(lane // 4), mul(load(place), load(slopes + ROW * j + lane)), zero))


@inner
def bias_out(moves, dbias, q_step, k_step, n, keys):
    """Add moves to the gradient of the bias; a step of 0 adds up over what the bias broadcasts."""
    for j in range(keys):
        for i in range(n):
            to = dbias + 4 * (i * q_step + j * k_step)
            write(to, read(to) + read(moves + ROW * j + 4 * i))


@inner
def clean_rows(source, rows, size, target):
    """A copy of packed rows with 0 in those that are not finite."""
    for i in range(rows):
        good = all_finite(source + 4 * i * size, size)
        for at in range(0, 4 * size, 64):
            x = load(source + 4 * i * size + at)
            store(target + 4 * i * size + at, x if good else splat(np.float32(0.0)))


@inner
def spread_broken(weights, words, keys, source, n, size, target):
    """target[j] += weights[j, i] * source[i] for those rows i that are not finite: from the keys that query i sees only."""
    for i in range(n):
        row = source + 4 * i * size
        if not all_finite(row, size):
            for j in range(keys):
                if (read_word(words + 8 * j) >> np.uint64(i)) & np.uint64(1):
                    weight = read(weights + ROW * j + 4 * i)
                    for d in range(size):
                        to = target + 4 * (j * size + d)
                        write(to, read(to) + weight * read(row + 4 * d))


@inner
def keys_finite(keys, k_n, k_d, count, size, half):
    """Whether all numbers of ``count`` key rows are finite."""
    wide, good = 4 if half is None else 2, True
    for j in range(count):
        row = keys + wide * j * k_n
        if k_d == 1 and size % 16 == 0:
            for d in range(0, size, 16):
                good = good and where_finite(numbers(row + wide * d, half))
        else:
            for d in range(size):
                good = good and np.isfinite(number(row + wide * d * k_d, half))
    return good
