"""Attention, tile by tile of the plan.

A task is one tile of 64 queries of one head. Queries stand in lanes: with the queries turned once (D, 64), scores are
S^T = K Q^T, weights come lane by lane, and O^T += V^T P^T, so keys and values are read where they lie, in any strides.

    for each run of key tiles in the plan's row:
        scores of the tile               product
        softcap, bias                    passes over the tile, where asked for
        hidden pairs to -inf             only where the run is PARTIAL
        weights, and the running sum     softmax_tile
        output += weights x values       product_add

Source: FlashAttention (Dao et al. 2022), with the orientation measured best on CPUs.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from lowtri.kernels.product import product, product_add
from lowtri.kernels.simd import (
    above_or,
    add,
    bits_float,
    div,
    exp2_less_1,
    fetch_add,
    load,
    mul,
    only,
    read,
    read_int32,
    read_int64,
    read_word,
    splat,
    store,
    transpose,
    where_finite,
    write,
)
from lowtri.kernels.softmax import QUERIES, ROW, hide, softmax_tile
from lowtri.kernels.target import ROWS

__all__ = ["FIELDS", "KEYS", "forward", "room"]

KEYS = 96  # keys in a tile: 24 KB of scores stay in the first cache, and 96 is a multiple of the register tile's 6 rows

# The descriptor: addresses, sizes, and strides in floats, all int64.
FIELDS = (
    *("self", "next_task", "next_room", "tasks", "room", "room_bytes"),
    *("batch", "heads", "group", "nq", "nk", "d", "dv", "rows"),
    *("q", "q_b", "q_h", "q_n", "q_d", "k", "k_b", "k_h", "k_n", "k_d", "v", "v_b", "v_h", "v_n", "v_d"),
    *("o", "o_b", "o_h", "o_n", "lse", "bias", "bias_b", "bias_h", "bias_q", "bias_k", "sinks"),
    *("sheet", "sheet_b", "sheet_h", "row_start", "runs", "tile_bits", "bits", "scale", "softcap"),
)
# fmt: off
(
    SELF, NEXT_TASK, NEXT_ROOM, TASKS, ROOM, ROOM_BYTES,
    BATCH, HEADS, GROUP, NQ, NK, D, DV, PLAN_ROWS,
    Q, Q_B, Q_H, Q_N, Q_D, K, K_B, K_H, K_N, K_D, V, V_B, V_H, V_N, V_D,
    O, O_B, O_H, O_N, LSE, BIAS, BIAS_B, BIAS_H, BIAS_Q, BIAS_K, SINKS,
    SHEET, SHEET_B, SHEET_H, ROW_START, RUNS, TILE_BITS, BITS, SCALE, SOFTCAP,
) = range(len(FIELDS))
# fmt: on

LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
FULL = 2
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def room(d: int, dv: int) -> int:
    """Bytes that one thread works in: queries, scores, output, shift, sum, and a clean copy of one tile's values."""
    return ROW * (d + ROWS + KEYS + ROWS + dv + ROWS + 16 + 2) + 4 * KEYS * dv


@njit
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


@njit
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


@njit
def times(address, floats, factor):
    """Multiply ``floats`` numbers (a multiple of 16) by one factor."""
    for at in range(0, 4 * floats, 64):
        store(address + at, mul(load(address + at), splat(factor)))


@njit
def all_finite(address, floats):
    """Whether ``floats`` numbers (a multiple of 16) are all finite."""
    for at in range(0, 4 * floats, 64):
        if not where_finite(load(address + at)):
            return False
    return True


@njit
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


@njit
def add_bias(scores, bias, q_step, k_step, n, keys):
    """Add bias[i, j] * log2(e) to the scores; steps in floats, 0 where bias broadcasts."""
    for j in range(keys):
        row = scores + ROW * j
        for i in range(n):
            write(row + 4 * i, read(row + 4 * i) + read(bias + 4 * (i * q_step + j * k_step)) * LOG2E)


@njit
def seen_range(words, keys):
    """The first key and one past the last that any of 64 queries sees."""
    start, stop = 0, keys
    while start < stop and read_word(words + 8 * start) == 0:
        start += 1
    while stop > start and read_word(words + 8 * (stop - 1)) == 0:
        stop -= 1
    return start, stop


@njit
def mix_visible(values, v_n, v_d, weights, words, keys, output, dv, clean):
    """Output += weights x values where a value that is not finite may be hidden from some: it reaches those who see it only.

    Rows that are not finite are set to 0 in a clean copy (keys, dv) for the product, then added lane by lane.
    """
    for j in range(keys):
        finite = True
        for d in range(dv):
            x = read(values + 4 * (j * v_n + d * v_d))
            finite = finite and np.isfinite(x)
        for d in range(dv):
            x = read(values + 4 * (j * v_n + d * v_d))
            write(clean + 4 * (j * dv + d), x if finite else np.float32(0.0))
        if not finite:
            word = read_word(words + 8 * j) if words else _ALL
            for d in range(dv):
                x = splat(read(values + 4 * (j * v_n + d * v_d)))
                for lane in range(0, QUERIES, 16):
                    place = output + ROW * d + 4 * lane
                    so_far = load(place)
                    more = add(so_far, mul(load(weights + ROW * j + 4 * lane), x))
                    store(place, only(word, np.uint64(lane), more, so_far))
    product_add(clean, 1, dv, weights, QUERIES, output, QUERIES, dv, keys, QUERIES)


@njit
def attend_tile(t, here, b, h, r, careful):
    """One tile of queries of one head: its output (Dv, 64) before the division, shift m and sum l, in the thread's room."""
    d, dv, nk, kv = t[D], t[DV], t[NK], h // t[GROUP]
    queries = here
    scores = queries + ROW * (d + ROWS)
    output = scores + ROW * (KEYS + ROWS)
    m = output + ROW * (dv + ROWS)
    l = m + ROW
    clean = l + ROW
    n = min(QUERIES, t[NQ] - r * QUERIES)
    softcap = np.float32(bits_float(t[SOFTCAP]))
    turn_in(t[Q] + 4 * (b * t[Q_B] + h * t[Q_H] + r * QUERIES * t[Q_N]), t[Q_N], t[Q_D], n, d, queries)
    times(queries, QUERIES * d, np.float32(bits_float(t[SCALE])) * LOG2E)
    # A sink is a key that has been seen before the first one, with no value.
    start_m, start_l = np.float32(-np.inf), np.float32(0.0)
    if t[SINKS]:
        start_m = read(t[SINKS] + 4 * h) * LOG2E
        start_l = np.float32(1.0) if start_m > -np.inf else np.float32(0.0)
    for lane in range(0, ROW, 64):
        store(m + lane, splat(start_m))
        store(l + lane, splat(start_l))
    for at in range(0, ROW * dv, 64):
        store(output + at, splat(np.float32(0.0)))
    sheet = read_int32(t[SHEET] + 4 * (b * t[SHEET_B] + h * t[SHEET_H]))
    row = t[ROW_START] + 8 * (sheet * t[PLAN_ROWS] + r)
    for run in range(read_int64(row), read_int64(row + 8)):
        at = t[RUNS] + 16 * run
        first, last, kind, place = read_int32(at), read_int32(at + 4), read_int32(at + 8), read_int32(at + 12)
        for tile in range(first, last):
            begin, end, words = 0, min(KEYS, nk - tile * KEYS), 0
            if kind != FULL:
                words = t[BITS] + 8 * KEYS * read_int32(t[TILE_BITS] + 4 * (place + tile - first))
                begin, end = seen_range(words, end)
                words += 8 * begin
            keys, key0 = end - begin, tile * KEYS + begin
            from_k = t[K] + 4 * (b * t[K_B] + kv * t[K_H] + key0 * t[K_N])
            from_v = t[V] + 4 * (b * t[V_B] + kv * t[V_H] + key0 * t[V_N])
            product(from_k, t[K_N], t[K_D], queries, QUERIES, scores, QUERIES, keys, d, QUERIES)
            if softcap > 0:
                cap(scores, keys, softcap)
            if t[BIAS]:
                start = b * t[BIAS_B] + h * t[BIAS_H] + r * QUERIES * t[BIAS_Q] + key0 * t[BIAS_K]
                add_bias(scores, t[BIAS] + 4 * start, t[BIAS_Q], t[BIAS_K], n, keys)
            if kind != FULL:
                hide(scores, words, keys)
            softmax_tile(scores, keys, m, l, output, dv)
            if careful:
                mix_visible(from_v, t[V_N], t[V_D], scores, words, keys, output, dv, clean)
            else:
                product_add(from_v, t[V_D], t[V_N], scores, QUERIES, output, QUERIES, dv, keys, QUERIES)
    return output, m, l, n


@njit
def forward_tile(t, here, b, h, r):
    """One tile of queries, from the plan's row to the output and log-sum-exp in memory."""
    dv = t[DV]
    output, m, l, n = attend_tile(t, here, b, h, r, False)
    if not all_finite(output, QUERIES * dv):
        # Somebody met a NaN or inf among the values. If it was hidden it must leave no trace: again, pair by pair.
        output, m, l, n = attend_tile(t, here, b, h, r, True)
    zero, one = splat(np.float32(0.0)), splat(np.float32(1.0))
    for lane in range(0, ROW, 64):
        total = load(l + lane)
        share = above_or(total, zero, div(one, total), total)  # 0 where nothing was seen, NaN where the sum is
        for d in range(dv):
            place = output + ROW * d + lane
            store(place, above_or(total, zero, mul(load(place), share), total))
    turn_out(output, n, dv, t[O] + 4 * (b * t[O_B] + h * t[O_H] + r * QUERIES * t[O_N]), t[O_N])
    if t[LSE]:
        to = t[LSE] + 4 * ((b * t[HEADS] + h) * t[NQ] + r * QUERIES)
        for i in range(n):
            total = read(l + 4 * i)
            lse = np.float32(-np.inf)
            if total != 0:
                lse = read(m + 4 * i) * LN2 + np.log(total)
            write(to + 4 * i, lse)


def forward(descriptor):
    """Take tasks until none is left. Rows from the last up: under a causal mask they are the heaviest."""
    t = carray(descriptor, (len(FIELDS),))
    here = t[ROOM] + t[ROOM_BYTES] * fetch_add(t[SELF] + 8 * NEXT_ROOM, 1)
    while True:
        task = fetch_add(t[SELF] + 8 * NEXT_TASK, 1)
        if task >= t[TASKS]:
            return
        head, r = task // t[PLAN_ROWS], t[PLAN_ROWS] - 1 - task % t[PLAN_ROWS]
        forward_tile(t, here, head // t[HEADS], head % t[HEADS], r)
