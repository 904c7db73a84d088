"""Passes over one tile: turning queries into lanes and back, softcap, bias, and the care for numbers that are not finite.

A tile is rows of 64 floats, a lane for each query.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.exponent import exp2_less_1
from lowtri.kernels.halves import load_halves, pair, pair_up, read_half, store_halves
from lowtri.kernels.inner import inner
from lowtri.kernels.lanes import transpose
from lowtri.kernels.simd import (
    above_or,
    add,
    div,
    load,
    mul,
    only,
    read,
    read_word,
    splat,
    store,
    where_finite,
    write,
)
from lowtri.kernels.walk import ALL

__all__ = [
    "LN2",
    "LOG2E",
    "QUERIES",
    "ROW",
    "add_bias",
    "all_finite",
    "cap",
    "fill",
    "halve",
    "halve_rows",
    "halves_out",
    "in_log2",
    "in_words",
    "mix_broken",
    "number",
    "numbers",
    "pair_rows",
    "pair_values",
    "times",
    "turn_in",
    "turn_out",
]

QUERIES = 64  # queries in a tile: four vectors of 16, and one machine word of bits
ROW = 4 * QUERIES  # bytes in a row
LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
GREATEST = np.finfo(np.float32).max


@inner
def fill(address, floats, value):
    """Set ``floats`` numbers (a multiple of 16) to one value."""
    for at in range(0, 4 * floats, 64):
        store(address + at, splat(value))


@inner
def turn_in(source, row_step, step, n, size, target):
    """n <= 64 rows of ``size`` floats become (size, 64): queries in lanes. Lanes past n repeat the last row."""
    if step == 1 and size >= 16:
        for lane in range(0, QUERIES, 16):
            top = min(lane, n - 1)
            last = min(n - 1 - top, 15)
            for d in range(0, size, 16):
                at = min(d, size - 16)  # the last block overlaps the one before
                transpose(source + 4 * (top * row_step + at), 4 * row_step, last, target + ROW * at + 4 * lane, ROW)
    else:
        for d in range(size):
            for i in range(QUERIES):
                write(target + ROW * d + 4 * i, read(source + 4 * (min(i, n - 1) * row_step + d * step)))


@inner
def turn_out(source, n, size, target, row_step):
    """(size, 64) becomes n <= 64 rows of ``size`` floats, one after the other."""
    whole = n - n % 16 if size >= 16 else 0
    for lane in range(0, whole, 16):
        for d in range(0, size, 16):
            at = min(d, size - 16)
            transpose(source + ROW * at + 4 * lane, ROW, 15, target + 4 * (lane * row_step + at), 4 * row_step)
    for i in range(whole, n):
        for d in range(size):
            write(target + 4 * (i * row_step + d), read(source + ROW * d + 4 * i))


@inner
def times(address, floats, factor):
    """Multiply ``floats`` numbers (a multiple of 16) by one factor."""
    for at in range(0, 4 * floats, 64):
        store(address + at, mul(load(address + at), splat(factor)))


@inner
def all_finite(address, floats):
    """Whether ``floats`` numbers (a multiple of 16) are all finite."""
    for at in range(0, 4 * floats, 64):
        if not where_finite(load(address + at)):
            return False
    return True


@inner
def cap(scores, keys, softcap):
    """c * tanh(s / c) on scores in units of log 2, by tanh(x) = (e^(2x) - 1) / (e^(2x) + 1)."""
    c = softcap * LOG2E
    to_exponent = splat(np.float32(2.0) * LOG2E / c)
    two, most, least = splat(np.float32(2.0)), splat(np.float32(60.0)), splat(np.float32(-60.0))
    for at in range(0, ROW * keys, 64):
        x = mul(load(scores + at), to_exponent)
        x = above_or(x, most, most, above_or(least, x, least, x))
        more = exp2_less_1(x)
        store(scores + at, mul(div(more, add(more, two)), splat(c)))


@inner
def in_log2(x):
    """x * log2(e); a number stays a number, since the least one often stands for "hidden" and a row of it has a mean."""
    y = x * LOG2E
    if y > GREATEST and x <= GREATEST:
        return GREATEST
    if y < -GREATEST and x >= -GREATEST:
        return -GREATEST
    return y


@inner
def add_bias(scores, bias, q_step, k_step, n, keys):
    """Add bias[i, j] * log2(e) to the scores; steps in floats, 0 where bias broadcasts."""
    for j in range(keys):
        row = scores + ROW * j
        for i in range(n):
            write(row + 4 * i, read(row + 4 * i) + in_log2(read(bias + 4 * (i * q_step + j * k_step))))


@inner
def number(address, half):
    """A float32, or (where ``half`` is not None) a bf16."""
    if half is None:
        return read(address)
    return read_half(address)


@inner
def in_words(count, half):
    """A count of numbers as a count of words: floats, or pairs of bf16, an odd last one beside 0."""
    return count if half is None else (count + 1) // 2


@inner
def numbers(address, half):
    """16 numbers that lie side by side, as floats."""
    if half is None:
        return load(address)
    return load_halves(address)


@inner
def mix_broken(values, v_n, v_d, weights, words, keys, output, dv, clean, half):
    """Output += weights x values for those rows of values that are not finite: they reach the queries that see them only.

    The other rows are left to the product: ``clean`` becomes a copy (keys, dv) with 0 in the broken rows.
    """
    size = 4 if half is None else 2
    for j in range(keys):
        finite = True
        for d in range(dv):
            x = number(values + size * (j * v_n + d * v_d), half)
            finite = finite and np.isfinite(x)
        for d in range(dv):
            x = number(values + size * (j * v_n + d * v_d), half)
            write(clean + 4 * (j * dv + d), x if finite else np.float32(0.0))
        if not finite:
            word = read_word(words + 8 * j) if words else ALL
            for d in range(dv):
                x = splat(number(values + size * (j * v_n + d * v_d), half))
                for lane in range(0, QUERIES, 16):
                    place = output + ROW * d + 4 * lane
                    so_far = load(place)
                    more = add(so_far, mul(load(weights + ROW * j + 4 * lane), x))
                    store(place, only(word, np.uint64(lane), more, so_far))


@inner
def pair_rows(rows, n, size, pairs):
    """Packed rows of floats (n, size) as pairs of bf16 (n / 2, size): neighbouring rows side by side, an odd last one beside 0."""
    zero = splat(np.float32(0.0))
    for j in range(0, n, 2):
        for at in range(0, 4 * size, 64):
            place = rows + 4 * size * j + at
            store(pairs + 2 * size * j + at, pair(load(place), load(place + 4 * size) if j + 1 < n else zero))


@inner
def halve_rows(rows, n):
    """Rows of 64 floats, rounded to bf16 where they stand: neighbours become pairs, in the first half of each row."""
    for j in range(n):
        for lane in range(0, QUERIES, 16):
            store_halves(rows + ROW * j + 2 * lane, load(rows + ROW * j + 4 * lane))


@inner
def pair_values(values, v_n, keys, dv, zeros, pairs):
    """Rows of bf16 values (keys, dv) as pairs (keys / 2, dv); steps in bf16 numbers, ``zeros`` a row of 0."""
    for j in range(0, keys, 2):
        low = values + 2 * j * v_n
        high = low + 2 * v_n if j + 1 < keys else zeros
        for d in range(0, dv, 16):
            store(pairs + 4 * (j // 2 * dv + d), pair_up(low + 2 * d, high + 2 * d))


@inner
def halve(numbers, count, halves):
    """``count`` floats (a multiple of 16) rounded to bf16."""
    for at in range(0, count, 16):
        store_halves(halves + 2 * at, load(numbers + 4 * at))


@inner
def halves_out(source, n, size, target, row_step):
    """n rows of ``size`` floats to rows of bf16, ``row_step`` numbers apart."""
    for i in range(n):
        halve(source + 4 * i * size, size, target + 2 * i * row_step)
