"""The gradients of attention in float64: the five products of ``backward`` in plain numbers, tile by tile of the same plan.

A task owns a key/value head, or every n-th row of its queries, as there.
"""

from __future__ import annotations

import math

from lowtri.kernels import backward as table
from lowtri.kernels.double import (
    LINE,
    NOTHING,
    add_broken,
    fill,
    hidden,
    numbers_at,
    row_finite,
    scores_of,
    turned,
)
from lowtri.kernels.forward import KEYS
from lowtri.kernels.inner import inlined, inner
from lowtri.kernels.passes import QUERIES
from lowtri.kernels.product import product_doubles_add
from lowtri.kernels.simd import bits_float, fetch_add, read_int32
from lowtri.kernels.walk import tiles

__all__ = ["backward_double", "padded", "room"]

# fmt: off
(
    SELF, NEXT_TASK, NEXT_ROOM, TASKS, ROOM, ROOM_BYTES, PARTS,
    BATCH, HEADS, GROUP, NQ, NK, D, DV, PLAN_ROWS,
    Q, Q_B, Q_H, Q_N, Q_D, K, K_B, K_H, K_N, K_D, V, V_B, V_H, V_N, V_D,
    DO, DO_B, DO_H, DO_N, DO_D, LSE, DELTA, DQ, DK, DVALUE,
    BIAS, BIAS_B, BIAS_H, BIAS_Q, BIAS_K, DBIAS, DBIAS_P, DBIAS_B, DBIAS_H, DBIAS_Q, DBIAS_K,
    SHEET, SHEET_B, SHEET_H, ROW_START, RUNS, TILE_BITS, BITS, SCALE, SOFTCAP,
) = range(len(table.FIELDS))
# fmt: on


def padded(size: int) -> int:
    """A head size rounded up to what the product takes: a row of dK or dV."""
    return -(-size // 32) * 32


def room(d: int, dv: int) -> int:
    """Bytes that one thread works in."""
    return LINE * (2 * d + dv + 3 * KEYS) + 8 * QUERIES * (padded(d) + padded(dv)) + 8 * KEYS * d


@inner
def rows_in(source, row_step, step, n, size, lse, target, row):
    """n rows of ``size`` numbers, packed to rows of ``row`` with 0 at the end; 0 for a query that sees nothing."""
    x, to = numbers_at(source), numbers_at(target)
    for i in range(n):
        sees = numbers_at(lse)[i] != NOTHING
        for d in range(row):
            to[i * row + d] = x[i * row_step + d * step] if sees and d < size else 0.0


@inner
def spread(weights, words, keys, rows, n, size, target):
    """Target[j] += weights[j, i] * rows[i]; a row that is not finite reaches the keys that its query sees only.

    Such a row stands aside while the others go through the product, and comes back.
    """
    w, to = numbers_at(weights), numbers_at(target)
    start = 0
    for i in range(n + 1):
        broken = i < n and words != 0 and not row_finite(rows + 8 * i * size, 1, size)
        if i == n or broken:
            if i > start:
                part = weights + 8 * start
                product_doubles_add(
                    part, QUERIES, 1, rows + 8 * start * size, size, target, size, keys, i - start, size
                )
            start = i + 1
        if broken:
            for j in range(keys):
                if not hidden(words, j, i):
                    for d in range(size):
                        to[j * size + d] += w[j * QUERIES + i] * numbers_at(rows)[i * size + d]


@inner
def weigh(scores, moves, words, keys, n, lse, delta):
    """Scores become weights, and dP becomes moves = weights * (dP - delta); 0 at hidden pairs, whatever stood there."""
    s, m, l, share = numbers_at(scores), numbers_at(moves), numbers_at(lse), numbers_at(delta)
    for j in range(keys):
        for i in range(QUERIES):
            at = j * QUERIES + i
            if i >= n or l[i] == NOTHING or hidden(words, j, i):
                s[at], m[at] = 0.0, 0.0
            else:
                weight = math.exp(s[at] - l[i])
                s[at], m[at] = weight, weight * (m[at] - share[i])


@inner
def bias_out(moves, d_bias, q_step, k_step, n, keys):
    """Add moves to the gradient of the bias; a step of 0 adds up over what the bias broadcasts."""
    for j in range(keys):
        for i in range(n):
            numbers_at(d_bias)[i * q_step + j * k_step] += numbers_at(moves)[j * QUERIES + i]


@inner
def backward_tile(t, here, part, b, h, r):
    """One tile of queries: its dQ, and what it adds to dK, dV and d bias."""
    d, dv, nk, kv = t[D], t[DV], t[NK], h // t[GROUP]
    d_row, dv_row = -(-d // 32) * 32, -(-dv // 32) * 32
    queries = here
    d_out = queries + LINE * d
    dq = d_out + LINE * dv
    scores = dq + LINE * d
    moves = scores + LINE * KEYS
    slopes = moves + LINE * KEYS
    q_rows = slopes + LINE * KEYS
    do_rows = q_rows + 8 * QUERIES * d_row
    clean = do_rows + 8 * QUERIES * dv_row
    n = min(QUERIES, t[NQ] - r * QUERIES)
    scale, softcap = bits_float(t[SCALE]), bits_float(t[SOFTCAP])
    line = (b * t[HEADS] + h) * t[NQ] + r * QUERIES
    lse, delta = t[LSE] + 8 * line, t[DELTA] + 8 * line
    from_q = t[Q] + 8 * (b * t[Q_B] + h * t[Q_H] + r * QUERIES * t[Q_N])
    from_do = t[DO] + 8 * (b * t[DO_B] + h * t[DO_H] + r * QUERIES * t[DO_N])
    rows_in(from_q, t[Q_N], t[Q_D], n, d, lse, q_rows, d_row)
    rows_in(from_do, t[DO_N], t[DO_D], n, dv, lse, do_rows, dv_row)
    turned(q_rows, d_row, 1, n, d, queries)
    turned(do_rows, dv_row, 1, n, dv, d_out)
    fill(dq, d * QUERIES, 0.0)
    head_row = ((part * t[BATCH] + b) * (t[HEADS] // t[GROUP]) + kv) * nk
    sheet = read_int32(t[SHEET] + 4 * (b * t[SHEET_B] + h * t[SHEET_H]))
    row = t[ROW_START] + 8 * (sheet * t[PLAN_ROWS] + r)
    for key0, keys, words in tiles(row, t[RUNS], t[TILE_BITS], t[BITS], KEYS, nk):
        from_k, k_n, k_d = t[K] + 8 * (b * t[K_B] + kv * t[K_H] + key0 * t[K_N]), t[K_N], t[K_D]
        from_v = t[V] + 8 * (b * t[V_B] + kv * t[V_H] + key0 * t[V_N])
        bias, q_step, k_step = 0, t[BIAS_Q], t[BIAS_K]
        if t[BIAS]:
            bias = t[BIAS] + 8 * (b * t[BIAS_B] + h * t[BIAS_H] + r * QUERIES * q_step + key0 * k_step)
        options = (scale, softcap, bias, q_step, k_step)
        scores_of(from_k, k_n, k_d, queries, scores, keys, d, *options, n, words, slopes)
        fill(moves, keys * QUERIES, 0.0)
        product_doubles_add(from_v, t[V_N], t[V_D], d_out, QUERIES, moves, QUERIES, keys, dv, QUERIES)
        weigh(scores, moves, words, keys, n, lse, delta)
        if t[DBIAS]:
            to = part * t[DBIAS_P] + b * t[DBIAS_B] + h * t[DBIAS_H] + r * QUERIES * t[DBIAS_Q] + key0 * t[DBIAS_K]
            bias_out(moves, t[DBIAS] + 8 * to, t[DBIAS_Q], t[DBIAS_K], n, keys)
        if softcap > 0:
            for i in range(keys * QUERIES):
                if numbers_at(moves)[i] != 0.0:
                    numbers_at(moves)[i] *= numbers_at(slopes)[i]
        spread(scores, words, keys, do_rows, n, dv_row, t[DVALUE] + 8 * (head_row + key0) * dv_row)
        spread(moves, words, keys, q_rows, n, d_row, t[DK] + 8 * (head_row + key0) * d_row)
        if words:
            add_broken(from_k, k_n, k_d, moves, words, keys, dq, d, clean)
            from_k, k_n, k_d = clean, d, 1
        product_doubles_add(from_k, k_d, k_n, moves, QUERIES, dq, QUERIES, d, keys, QUERIES)
    for i in range(n):
        for e in range(d):
            numbers_at(t[DQ])[(line + i) * d + e] = numbers_at(dq)[e * QUERIES + i] * scale


@inlined
def take_tasks(t):
    """Take tasks until none is left."""
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


def backward_double(descriptor):
    """The kernel for float64."""
    take_tasks(descriptor)
