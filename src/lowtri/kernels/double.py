"""Attention in float64 from the same plan: the loop of ``forward`` in plain numbers, and what its gradients share with it.

Only the product is written in vector words. The rest is what a reader would write, and LLVM makes vectors of it: whoever asks for
float64 wants digits. Rows that are not finite are looked for in every tile where something is hidden.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels import forward as table
from lowtri.kernels.forward import KEYS
from lowtri.kernels.inner import inlined, inner
from lowtri.kernels.passes import QUERIES
from lowtri.kernels.product import product_doubles_add
from lowtri.kernels.simd import bits_float, fetch_add, read_int32, read_word
from lowtri.kernels.walk import ALL, tiles

__all__ = [
    "LINE",
    "add_broken",
    "forward_double",
    "hidden",
    "fill",
    "numbers_at",
    "room",
    "row_finite",
    "scores_of",
    "turned",
]

LINE = 8 * QUERIES  # bytes of a row of 64 queries
NOTHING = -math.inf
# fmt: off
(
    SELF, NEXT_TASK, NEXT_ROOM, TASKS, ROOM, ROOM_BYTES,
    BATCH, HEADS, GROUP, NQ, NK, D, DV, PLAN_ROWS,
    Q, Q_B, Q_H, Q_N, Q_D, K, K_B, K_H, K_N, K_D, V, V_B, V_H, V_N, V_D,
    O, O_B, O_H, O_N, LSE, BIAS, BIAS_B, BIAS_H, BIAS_Q, BIAS_K, SINKS,
    SHEET, SHEET_B, SHEET_H, ROW_START, RUNS, TILE_BITS, BITS, SCALE, SOFTCAP,
) = range(len(table.FIELDS))
# fmt: on


def room(d: int, dv: int) -> int:
    """Bytes that one thread works in: queries, scores, output, shift and sum, and a clean copy of one tile's values."""
    return LINE * (d + KEYS + dv + 2) + 8 * KEYS * dv


@intrinsic
def numbers_at(typing, address):
    """Float64 in memory, by number: x[i]."""
    kind = types.CPointer(types.float64)
    return kind(types.intp), lambda c, b, s, a: b.inttoptr(a[0], ir.DoubleType().as_pointer())


@inner
def fill(address, count, value):
    """Set ``count`` numbers to one value."""
    for i in range(count):
        numbers_at(address)[i] = value


@inner
def turned(source, row_step, step, n, size, target):
    """n <= 64 rows of ``size`` numbers become (size, 64): queries in lanes. Lanes past n are 0."""
    x, to = numbers_at(source), numbers_at(target)
    for d in range(size):
        for i in range(QUERIES):
            to[d * QUERIES + i] = x[i * row_step + d * step] if i < n else 0.0


@inner
def hidden(words, j, i):
    """Whether key j of a tile is hidden from query i."""
    return words != 0 and (read_word(words + 8 * j) >> i) & 1 == 0


@inner
def scores_of(keys, k_n, k_d, queries, scores, count, d, scale, softcap, bias, q_step, k_step, n, words, slopes):
    """Scores (count, 64) of a tile: scaled, capped, with the bias; -inf where hidden, and in lanes past n.

    ``slopes``: where the slopes of the softcap go, or 0.
    """
    s = numbers_at(scores)
    fill(scores, count * QUERIES, 0.0)
    product_doubles_add(keys, k_n, k_d, queries, QUERIES, scores, QUERIES, count, d, QUERIES)
    for j in range(count):
        for i in range(QUERIES):
            s[j * QUERIES + i] *= scale
        if softcap > 0:
            for i in range(QUERIES):
                capped = math.tanh(s[j * QUERIES + i] / softcap)
                s[j * QUERIES + i] = softcap * capped
                if slopes:
                    numbers_at(slopes)[j * QUERIES + i] = 1.0 - capped * capped
        if bias:
            for i in range(n):
                s[j * QUERIES + i] += numbers_at(bias)[i * q_step + j * k_step]
        if n < QUERIES or (words and read_word(words + 8 * j) != ALL):
            for i in range(QUERIES):
                if i >= n or hidden(words, j, i):
                    s[j * QUERIES + i] = NOTHING


@inner
def row_finite(source, step, size):
    """Whether ``size`` numbers are all finite."""
    for d in range(size):
        if not math.isfinite(numbers_at(source)[d * step]):
            return False
    return True


@inner
def add_broken(source, row_step, step, weights, words, keys, output, size, clean):
    """Output (size, 64) += weights x rows for those rows that are not finite, at the queries that see them only.

    The others are left to the product: ``clean`` becomes a packed copy (keys, size) with 0 in the broken rows.
    """
    w, out, copy = numbers_at(weights), numbers_at(output), numbers_at(clean)
    for j in range(keys):
        row = source + 8 * j * row_step
        good = row_finite(row, step, size)
        for d in range(size):
            x = numbers_at(row)[d * step]
            copy[j * size + d] = x if good else 0.0
            if not good:
                for i in range(QUERIES):
                    if not hidden(words, j, i):
                        out[d * QUERIES + i] += w[j * QUERIES + i] * x


@inner
def soften(scores, keys, shift, total, output, size):
    """One tile of online softmax: scores become weights; shift, total and the output so far are brought to the new shift."""
    s, shift, total, out = numbers_at(scores), numbers_at(shift), numbers_at(total), numbers_at(output)
    for i in range(QUERIES):
        greatest = shift[i]
        for j in range(keys):
            if s[j * QUERIES + i] > greatest:
                greatest = s[j * QUERIES + i]
        if greatest > shift[i]:
            factor = math.exp(shift[i] - greatest)
            shift[i] = greatest
            total[i] *= factor
            for d in range(size):
                out[d * QUERIES + i] *= factor
    for j in range(keys):
        for i in range(QUERIES):
            weight = math.exp(s[j * QUERIES + i] - (shift[i] if shift[i] > NOTHING else 0.0))
            s[j * QUERIES + i] = weight
            total[i] += weight


@inner
def attend_tile(t, here, b, h, r):
    """One tile of queries of one head, from the plan's row to the output and log-sum-exp in memory."""
    d, dv, nk, kv = t[D], t[DV], t[NK], h // t[GROUP]
    queries = here
    scores = queries + LINE * d
    output = scores + LINE * KEYS
    shift = output + LINE * dv
    total = shift + LINE
    clean = total + LINE
    n = min(QUERIES, t[NQ] - r * QUERIES)
    scale, softcap = bits_float(t[SCALE]), bits_float(t[SOFTCAP])
    turned(t[Q] + 8 * (b * t[Q_B] + h * t[Q_H] + r * QUERIES * t[Q_N]), t[Q_N], t[Q_D], n, d, queries)
    fill(output, dv * QUERIES, 0.0)
    # A sink is a key that has been seen before the first one, with no value.
    sink = numbers_at(t[SINKS])[h] if t[SINKS] else NOTHING
    fill(shift, QUERIES, sink)
    fill(total, QUERIES, 1.0 if sink > NOTHING else 0.0)
    sheet = read_int32(t[SHEET] + 4 * (b * t[SHEET_B] + h * t[SHEET_H]))
    row = t[ROW_START] + 8 * (sheet * t[PLAN_ROWS] + r)
    for key0, keys, words in tiles(row, t[RUNS], t[TILE_BITS], t[BITS], KEYS, nk):
        from_k = t[K] + 8 * (b * t[K_B] + kv * t[K_H] + key0 * t[K_N])
        from_v, v_n, v_d = t[V] + 8 * (b * t[V_B] + kv * t[V_H] + key0 * t[V_N]), t[V_N], t[V_D]
        bias = 0
        if t[BIAS]:
            start = b * t[BIAS_B] + h * t[BIAS_H] + r * QUERIES * t[BIAS_Q] + key0 * t[BIAS_K]
            bias = t[BIAS] + 8 * start
        steps = (t[BIAS_Q], t[BIAS_K])
        scores_of(from_k, t[K_N], t[K_D], queries, scores, keys, d, scale, softcap, bias, *steps, n, words, 0)
        soften(scores, keys, shift, total, output, dv)
        if words:
            add_broken(from_v, v_n, v_d, scores, words, keys, output, dv, clean)
            from_v, v_n, v_d = clean, dv, 1
        product_doubles_add(from_v, v_d, v_n, scores, QUERIES, output, QUERIES, dv, keys, QUERIES)
    to = numbers_at(t[O] + 8 * (b * t[O_B] + h * t[O_H] + r * QUERIES * t[O_N]))
    for i in range(n):
        whole = numbers_at(total)[i]
        for d in range(dv):
            to[i * t[O_N] + d] = numbers_at(output)[d * QUERIES + i] / whole if whole != 0 else 0.0
        if t[LSE]:
            lse = numbers_at(shift)[i] + math.log(whole) if whole != 0 else NOTHING
            numbers_at(t[LSE])[(b * t[HEADS] + h) * t[NQ] + r * QUERIES + i] = lse


@inlined
def take_tasks(t):
    """Take tasks until none is left, as those of float32 are taken."""
    here = t[ROOM] + t[ROOM_BYTES] * fetch_add(t[SELF] + 8 * NEXT_ROOM, 1)
    while True:
        task = fetch_add(t[SELF] + 8 * NEXT_TASK, 1)
        if task >= t[TASKS]:
            return
        head, r = task // t[PLAN_ROWS], t[PLAN_ROWS] - 1 - task % t[PLAN_ROWS]
        attend_tile(t, here, head // t[HEADS], head % t[HEADS], r)


def forward_double(descriptor):
    """The kernel for float64."""
    take_tasks(descriptor)
