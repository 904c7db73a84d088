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

from lowtri.kernels.inner import inlined, inner
from lowtri.kernels.passes import (
    LN2,
    LOG2E,
    QUERIES,
    ROW,
    add_bias,
    all_finite,
    cap,
    fill,
    halves_out,
    in_words,
    mix_broken,
    pair_rows,
    pair_values,
    times,
    turn_in,
    turn_out,
)
from lowtri.kernels.product import product, product_add
from lowtri.kernels.simd import (
    above_or,
    bits_float,
    div,
    fetch_add,
    load,
    mul,
    read,
    read_int32,
    splat,
    store,
    write,
)
from lowtri.kernels.softmax import hide, softmax_tile
from lowtri.kernels.walk import spans_of, tiles

__all__ = ["FIELDS", "KEYS", "forward", "forward_half", "room"]

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


def room(d: int, dv: int) -> int:
    """Bytes that one thread works in: queries, scores, output, shift, sum, and a clean copy of one tile's values."""
    return ROW * (d + KEYS + dv + 2 + KEYS // 2 + dv) + 4 * (KEYS + 1) * dv


@inner
def score_tile(keys, k_n, k_d, queries, scores, d, spans, parts, half):
    """Scores of one tile, of all 64 queries or of each 16 with the keys in their span. Steps in words."""
    for part in range(parts):
        a, b, lane = spans[2 * part], spans[2 * part + 1], 64 * part
        at, to = keys + 4 * a * k_n, scores + ROW * a + lane
        product(at, k_n, k_d, queries + lane, QUERIES, to, QUERIES, b - a, d, QUERIES // parts, half)


@inner
def mix_tile(values, v_d, v_n, weights, output, dv, spans, parts, half):
    """Output += values^T weights, of all 64 queries or 16 by 16. Of bf16, values and weights are pairs of keys."""
    for part in range(parts):
        a, b, lane = in_words(spans[2 * part], half), in_words(spans[2 * part + 1], half), 64 * part
        at, some, to = values + 4 * a * v_n, weights + ROW * a + lane, output + lane
        product_add(at, v_d, v_n, some, QUERIES, to, QUERIES, dv, b - a, QUERIES // parts, half)


@inner
def attend_tile(t, here, b, h, r, careful, half):
    """One tile of queries of one head: its output (Dv, 64) before the division, shift m and sum l, in the thread's room.

    ``half`` is None for float32 and 1 for bf16, and known when the kernel is compiled. bf16 is read in pairs: two neighbours of a
    head for the scores, two neighbouring keys for the output.
    """
    d, dv, nk, kv = t[D], t[DV], t[NK], h // t[GROUP]
    queries = here
    scores = queries + ROW * d
    output = scores + ROW * KEYS
    m = output + ROW * dv
    l = m + ROW
    pairs = l + ROW
    clean = pairs + ROW * (KEYS // 2)
    zeros = clean + 4 * KEYS * dv
    n = min(QUERIES, t[NQ] - r * QUERIES)
    scale, softcap = np.float32(bits_float(t[SCALE])) * LOG2E, np.float32(bits_float(t[SOFTCAP]))
    wide = 4 if half is None else 2
    from_q = t[Q] + wide * (b * t[Q_B] + h * t[Q_H] + r * QUERIES * t[Q_N])
    words_d, k_n = in_words(d, half), in_words(t[K_N], half)
    turn_in(from_q, in_words(t[Q_N], half), t[Q_D], n, words_d, queries)
    if half is not None:
        fill(zeros, dv, np.float32(0.0))
    # A sink is a key that has been seen before the first one, with no value.
    start_m, start_l = np.float32(-np.inf), np.float32(0.0)
    if t[SINKS]:
        start_m = read(t[SINKS] + 4 * h) * LOG2E
        start_l = np.float32(1.0) if start_m > -np.inf else np.float32(0.0)
    fill(m, QUERIES, start_m)
    fill(l, QUERIES, start_l)
    fill(output, QUERIES * dv, np.float32(0.0))
    sheet = read_int32(t[SHEET] + 4 * (b * t[SHEET_B] + h * t[SHEET_H]))
    row = t[ROW_START] + 8 * (sheet * t[PLAN_ROWS] + r)
    for key0, keys, words in tiles(row, t[RUNS], t[TILE_BITS], t[BITS], KEYS, nk):
        from_k = t[K] + wide * (b * t[K_B] + kv * t[K_H] + key0 * t[K_N])
        from_v = t[V] + wide * (b * t[V_B] + kv * t[V_H] + key0 * t[V_N])
        spans, parts = spans_of(words, keys)
        score_tile(from_k, k_n, t[K_D], queries, scores, words_d, spans, parts, half)
        unit = scale
        if softcap > 0 or t[BIAS] or scale <= 0:  # these work on scaled scores
            times(scores, QUERIES * keys, scale)
            unit = np.float32(1.0)
        if softcap > 0:
            cap(scores, keys, softcap)
        if t[BIAS]:
            start = b * t[BIAS_B] + h * t[BIAS_H] + r * QUERIES * t[BIAS_Q] + key0 * t[BIAS_K]
            add_bias(scores, t[BIAS] + 4 * start, t[BIAS_Q], t[BIAS_K], n, keys)
        if words:
            hide(scores, words, spans)
        softmax_tile(scores, unit, spans, m, l, output, dv)
        weights, v_n, v_d = scores, t[V_N], t[V_D]
        if careful:
            mix_broken(from_v, v_n, v_d, scores, words, keys, output, dv, clean, half)
        if half is not None:
            if careful:
                pair_rows(clean, keys, dv, clean)
            else:
                pair_values(from_v, v_n, keys, dv, zeros, clean)
            pair_rows(scores, keys, QUERIES, pairs)
            weights = pairs
        if careful or half is not None:
            from_v, v_n, v_d = clean, dv, 1
        mix_tile(from_v, v_d, v_n, weights, output, dv, spans, parts, half)
    return output, m, l, n


@inlined
def forward_tile(t, here, b, h, r, half):
    """One tile of queries, from the plan's row to the output and log-sum-exp in memory."""
    dv = t[DV]
    careful = False
    while True:
        output, m, l, n = attend_tile(t, here, b, h, r, careful, half)
        if careful or all_finite(output, QUERIES * dv):
            break
        # Somebody met a NaN or inf among the values; what was hidden must leave no trace: again, row by row.
        careful = True
    zero, one = splat(np.float32(0.0)), splat(np.float32(1.0))
    for lane in range(0, ROW, 64):
        total = load(l + lane)
        share = above_or(total, zero, div(one, total), total)  # 0 where nothing was seen, NaN where the sum is
        for d in range(dv):
            place = output + ROW * d + lane
            store(place, above_or(total, zero, mul(load(place), share), total))
    to = b * t[O_B] + h * t[O_H] + r * QUERIES * t[O_N]
    if half is None:
        turn_out(output, n, dv, t[O] + 4 * to, t[O_N])
    else:
        rows = output + ROW * (dv + 2 + KEYS // 2) + 4 * (KEYS + 1) * dv
        turn_out(output, n, dv, rows, dv)
        halves_out(rows, n, dv, t[O] + 2 * to, t[O_N])
    if t[LSE]:
        to = t[LSE] + 4 * ((b * t[HEADS] + h) * t[NQ] + r * QUERIES)
        for i in range(n):
            total = read(l + 4 * i)
            lse = np.float32(-np.inf)
            if total != 0:
                lse = read(m + 4 * i) * LN2 + np.log(total)
            write(to + 4 * i, lse)


@inlined
def take_tasks(t, half):
    """Take tasks until none is left. Rows from the last up: under a causal mask they are the heaviest."""
    here = t[ROOM] + t[ROOM_BYTES] * fetch_add(t[SELF] + 8 * NEXT_ROOM, 1)
    while True:
        task = fetch_add(t[SELF] + 8 * NEXT_TASK, 1)
        if task >= t[TASKS]:
            return
        head, r = task // t[PLAN_ROWS], t[PLAN_ROWS] - 1 - task % t[PLAN_ROWS]
        forward_tile(t, here, head // t[HEADS], head % t[HEADS], r, half)


def forward(descriptor):
    """The kernel for float32."""
    take_tasks(descriptor, None)


def forward_half(descriptor):
    """The kernel for bf16, where the CPU multiplies pairs of them."""
    take_tasks(descriptor, 1)
