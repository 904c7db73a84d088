"""The gradients of attention, tile by tile of the same plan.

A task is one key/value head (or, where there are more threads than heads, every n-th row of its queries). It owns its share of dK
and dV, so nothing is added up by two threads at once and the result does not depend on who was faster. Five products a tile, all
with queries in lanes; ``weights`` and ``moves`` (dS^T) come out as the A of the next ones, so nothing is turned:

    scores  = K Q^T                      weights = 2 ** (scores - lse)
    dP^T    = V dO^T                     moves   = weights * (dP - delta),   delta = sum of dO * O
    dV     += weights dO                 dK     += moves Q                   dQ^T += K^T moves

Source: FlashAttention (Dao et al. 2022), appendix B.4; delta as in FlashAttention-2 (2023).
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.exponent import exp2
from lowtri.kernels.forward import KEYS
from lowtri.kernels.inner import inlined, inner
from lowtri.kernels.passes import (
    ALL,
    LOG2E,
    QUERIES,
    ROW,
    add_bias,
    all_finite,
    cap,
    fill,
    mix_broken,
    seen_range,
    times,
    turn_in,
    turn_out,
)
from lowtri.kernels.product import product, product_add
from lowtri.kernels.simd import (
    bits_float,
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
    sub,
    write,
)

__all__ = ["FIELDS", "backward", "padded", "room"]

# The descriptor: addresses, sizes, and strides in floats, all int64. dk and dv are (parts, B, Hkv, Nk, padded size), packed.
FIELDS = (
    *("self", "next_task", "next_room", "tasks", "room", "room_bytes", "parts"),
    *("batch", "heads", "group", "nq", "nk", "d", "dv", "rows"),
    *("q", "q_b", "q_h", "q_n", "q_d", "k", "k_b", "k_h", "k_n", "k_d", "v", "v_b", "v_h", "v_n", "v_d"),
    *("do", "do_b", "do_h", "do_n", "do_d", "lse", "delta", "dq", "dk", "dvalue"),
    *("bias", "bias_b", "bias_h", "bias_q", "bias_k", "dbias", "dbias_p", "dbias_b", "dbias_h", "dbias_q", "dbias_k"),
    *("sheet", "sheet_b", "sheet_h", "row_start", "runs", "tile_bits", "bits", "scale", "softcap"),
)
# fmt: off
(
    SELF, NEXT_TASK, NEXT_ROOM, TASKS, ROOM, ROOM_BYTES, PARTS,
    BATCH, HEADS, GROUP, NQ, NK, D, DV, PLAN_ROWS,
    Q, Q_B, Q_H, Q_N, Q_D, K, K_B, K_H, K_N, K_D, V, V_B, V_H, V_N, V_D,
    DO, DO_B, DO_H, DO_N, DO_D, LSE, DELTA, DQ, DK, DVALUE,
    BIAS, BIAS_B, BIAS_H, BIAS_Q, BIAS_K, DBIAS, DBIAS_P, DBIAS_B, DBIAS_H, DBIAS_Q, DBIAS_K,
    SHEET, SHEET_B, SHEET_H, ROW_START, RUNS, TILE_BITS, BITS, SCALE, SOFTCAP,
) = range(len(FIELDS))
# fmt: on

FULL = 2


def padded(size: int) -> int:
    """A head size rounded up to whole vectors: what a packed row of Q, dO, dK or dV takes."""
    return -(-size // 16) * 16


def room(d: int, dv: int) -> int:
    """Bytes that one thread works in."""
    turned = ROW * (2 * d + dv + 3 * KEYS + 2)
    return turned + 4 * (QUERIES + KEYS) * (padded(d) + padded(dv))


@inner
def rows_in(source, row_step, step, n, size, lse, target, row):
    """n rows of ``size`` floats, packed to rows of ``row`` with 0 at the end; a query that sees nothing comes in as 0.

    Returns whether every number that came in is finite.
    """
    finite = True
    for i in range(n):
        sees = read(lse + 4 * i) != -np.inf
        for d in range(row):
            x = np.float32(0.0)
            if sees and d < size:
                x = read(source + 4 * (i * row_step + d * step))
                finite = finite and np.isfinite(x)
            write(target + 4 * (i * row + d), x)
    return finite


@inner
def weigh(scores, moves, words, keys, lse, delta):
    """Scores become weights, and dP becomes moves = weights * (dP - delta); 0 at hidden pairs, whatever stood there."""
    zero = splat(np.float32(0.0))
    for j in range(keys):
        word = read_word(words + 8 * j) if words else ALL
        for lane in range(0, ROW, 64):
            place, to = scores + ROW * j + lane, moves + ROW * j + lane
            weight = exp2(sub(load(place), load(lse + lane)))
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
def keys_finite(keys, k_n, k_d, count, size):
    """Whether all numbers of ``count`` key rows are finite."""
    for j in range(count):
        for d in range(size):
            if not np.isfinite(read(keys + 4 * (j * k_n + d * k_d))):
                return False
    return True


@inlined
def backward_tile(t, here, part, b, h, r):
    """One tile of queries: its dQ, and what it adds to dK, dV and d bias."""
    d, dv, nk, kv = t[D], t[DV], t[NK], h // t[GROUP]
    d_row, dv_row = -(-d // 16) * 16, -(-dv // 16) * 16
    queries = here
    d_out = queries + ROW * d
    dq = d_out + ROW * dv
    scores = dq + ROW * d
    moves = scores + ROW * KEYS
    slopes = moves + ROW * KEYS
    lse = slopes + ROW * KEYS
    delta = lse + ROW
    q_rows = delta + ROW
    do_rows = q_rows + 4 * QUERIES * d_row
    clean_q = do_rows + 4 * QUERIES * dv_row
    clean_do = clean_q + 4 * max(KEYS, QUERIES) * d_row
    n = min(QUERIES, t[NQ] - r * QUERIES)
    scale, softcap = np.float32(bits_float(t[SCALE])), np.float32(bits_float(t[SOFTCAP]))
    line = (b * t[HEADS] + h) * t[NQ] + r * QUERIES
    from_q = t[Q] + 4 * (b * t[Q_B] + h * t[Q_H] + r * QUERIES * t[Q_N])
    from_do = t[DO] + 4 * (b * t[DO_B] + h * t[DO_H] + r * QUERIES * t[DO_N])
    finite = rows_in(from_q, t[Q_N], t[Q_D], n, d, t[LSE] + 4 * line, q_rows, d_row)
    finite = rows_in(from_do, t[DO_N], t[DO_D], n, dv, t[LSE] + 4 * line, do_rows, dv_row) and finite
    turn_in(q_rows, d_row, 1, n, d, queries)
    turn_in(do_rows, dv_row, 1, n, dv, d_out)
    times(queries, QUERIES * d, scale * LOG2E)
    for i in range(QUERIES):
        # A query that sees nothing, and a lane without one, give weights of 0: 2 ** (0 - inf).
        shift, share = np.float32(np.inf), np.float32(0.0)
        if i < n and read(t[LSE] + 4 * (line + i)) != -np.inf:
            shift, share = read(t[LSE] + 4 * (line + i)) * LOG2E, read(t[DELTA] + 4 * (line + i))
        write(lse + 4 * i, shift)
        write(delta + 4 * i, share)
    fill(dq, QUERIES * d, np.float32(0.0))
    head_row = ((part * t[BATCH] + b) * (t[HEADS] // t[GROUP]) + kv) * nk
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
            product(from_k, t[K_N], t[K_D], queries, scores, keys, d)
            if softcap > 0:
                cap(scores, keys, softcap)
                keep_slope(scores, slopes, keys, softcap)
            if t[BIAS]:
                start = b * t[BIAS_B] + h * t[BIAS_H] + r * QUERIES * t[BIAS_Q] + key0 * t[BIAS_K]
                add_bias(scores, t[BIAS] + 4 * start, t[BIAS_Q], t[BIAS_K], n, keys)
            product(from_v, t[V_N], t[V_D], d_out, moves, keys, dv)
            weigh(scores, moves, words, keys, lse, delta)
            if t[DBIAS]:
                start = (
                    part * t[DBIAS_P] + b * t[DBIAS_B] + h * t[DBIAS_H] + r * QUERIES * t[DBIAS_Q] + key0 * t[DBIAS_K]
                )
                bias_out(moves, t[DBIAS] + 4 * start, t[DBIAS_Q], t[DBIAS_K], n, keys)
            if softcap > 0:
                times_slope(moves, slopes, words, keys)
            to_dk = t[DK] + 4 * (head_row + key0) * d_row
            to_dv = t[DVALUE] + 4 * (head_row + key0) * dv_row
            some_q, some_do = q_rows, do_rows
            if words and not finite:  # a row of Q or dO is not finite, and some keys are hidden from it
                spread_broken(scores, words, keys, do_rows, n, dv_row, to_dv)
                spread_broken(moves, words, keys, q_rows, n, d_row, to_dk)
                clean_rows(q_rows, n, d_row, clean_q)
                clean_rows(do_rows, n, dv_row, clean_do)
                some_q, some_do = clean_q, clean_do
            product_add(scores, QUERIES, 1, some_do, dv_row, to_dv, keys, n, dv_row)
            product_add(moves, QUERIES, 1, some_q, d_row, to_dk, keys, n, d_row)
            k_n, k_d = t[K_N], t[K_D]
            if words and not keys_finite(from_k, k_n, k_d, keys, d):
                mix_broken(from_k, k_n, k_d, moves, words, keys, dq, d, clean_q, None)
                from_k, k_d, k_n = clean_q, 1, d
            product_add(from_k, k_d, k_n, moves, QUERIES, dq, d, keys, QUERIES)
    times(dq, QUERIES * d, scale)
    turn_out(dq, n, d, t[DQ] + 4 * line * d, d)


def backward(descriptor):
    """Take tasks until none is left."""
    t = descriptor
    here = t[ROOM] + t[ROOM_BYTES] * fetch_add(t[SELF] + 8 * NEXT_ROOM, 1)
    kv_heads = t[HEADS] // t[GROUP]
    while True:
        task = fetch_add(t[SELF] + 8 * NEXT_TASK, 1)
        if task >= t[TASKS]:
            return
        part, head = task % t[PARTS], task // t[PARTS]
        b, kv = head // kv_heads, head % kv_heads
        for h in range(kv * t[GROUP], (kv + 1) * t[GROUP]):
            for r in range(part, t[PLAN_ROWS], t[PARTS]):
                backward_tile(t, here, part, b, h, r)
