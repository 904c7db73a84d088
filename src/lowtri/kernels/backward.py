"""The gradients of attention, tile by tile of the same plan.

A task is one key/value head (or, where there are more threads than heads, every n-th row of its queries). It owns its share of dK
and dV, so nothing is added up by two threads at once and the result does not depend on who was faster. Five products a tile, all
with queries in lanes; ``weights`` and ``moves`` (dS^T) come out as the A of the next ones, so nothing is turned:

    scores  = K Q^T                      weights = 2 ** (scores - lse)
    dP^T    = V dO^T                     moves   = weights * (dP - delta),   delta = sum of dO * O
    dV     += weights dO                 dK     += moves Q                   dQ^T += K^T moves

dP and delta round apart, so their difference is off by a few roundings of |dO| |V|, also where it should be 0 (one key has all the
weight) and the plain formula, which takes both from the same numbers, gives 0: the floor of the gradients' precision.

Source: FlashAttention (Dao et al. 2022), appendix B.4; delta as in FlashAttention-2 (2023).
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.forward import KEYS
from lowtri.kernels.inner import inlined
from lowtri.kernels.moves import (
    bias_out,
    clean_rows,
    keep_slope,
    keys_finite,
    rows_in,
    spread_broken,
    times_slope,
    weigh,
)
from lowtri.kernels.passes import (
    LOG2E,
    QUERIES,
    ROW,
    add_bias,
    cap,
    fill,
    halve_rows,
    in_words,
    mix_broken,
    pair_rows,
    pair_values,
    times,
    turn_in,
    turn_out,
)
from lowtri.kernels.product import product, product_add
from lowtri.kernels.simd import bits_float, fetch_add, read, read_int32, write
from lowtri.kernels.walk import tiles

__all__ = ["FIELDS", "backward", "backward_half", "padded", "room"]

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


def padded(size: int) -> int:
    """A head size rounded up to whole vectors: what a packed row of Q, dO, dK or dV takes."""
    return -(-size // 16) * 16


def room(d: int, dv: int) -> int:
    """Bytes that one thread works in."""
    turned = ROW * (2 * d + dv + 3 * KEYS + 2)
    rows = (4 + 4 + 2) * QUERIES * (padded(d) + padded(dv))  # as they come, clean, and in pairs
    return turned + rows + 4 * (KEYS + 1) * padded(d)


@inlined
def backward_tile(t, here, part, b, h, r, half):
    """One tile of queries: its dQ, and what it adds to dK, dV and d bias.

    ``half`` is None for float32 and 1 for bf16, and known when the kernel is compiled. bf16 is multiplied in pairs: neighbours of a
    head for scores and dP, neighbouring queries for dV and dK, neighbouring keys for dQ.
    """
    d, dv, nk, kv, wide = t[D], t[DV], t[NK], h // t[GROUP], 4 if half is None else 2
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
    clean_do = clean_q + 4 * QUERIES * d_row
    clean_k = clean_do + 4 * QUERIES * dv_row
    q_pairs = clean_k + 4 * KEYS * d_row
    do_pairs = q_pairs + 2 * QUERIES * d_row
    zeros = do_pairs + 2 * QUERIES * dv_row
    n = min(QUERIES, t[NQ] - r * QUERIES)
    scale, softcap = np.float32(bits_float(t[SCALE])), np.float32(bits_float(t[SOFTCAP]))
    line = (b * t[HEADS] + h) * t[NQ] + r * QUERIES
    from_q = t[Q] + wide * (b * t[Q_B] + h * t[Q_H] + r * QUERIES * t[Q_N])
    from_do = t[DO] + wide * (b * t[DO_B] + h * t[DO_H] + r * QUERIES * t[DO_N])
    finite = rows_in(from_q, t[Q_N], t[Q_D], n, d, t[LSE] + 4 * line, q_rows, d_row, half)
    finite = rows_in(from_do, t[DO_N], t[DO_D], n, dv, t[LSE] + 4 * line, do_rows, dv_row, half) and finite
    d_words, dv_words = in_words(d, half), in_words(dv, half)
    if half is None:
        turn_in(q_rows, d_row, 1, n, d, queries)
        turn_in(do_rows, dv_row, 1, n, dv, d_out)
    else:
        turn_in(from_q, t[Q_N] // 2, 1, n, d_words, queries)
        turn_in(from_do, t[DO_N] // 2, 1, n, dv_words, d_out)
        pair_rows(q_rows, n, d, q_pairs)
        pair_rows(do_rows, n, dv, do_pairs)
        fill(zeros, d, np.float32(0.0))
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
    for key0, keys, words in tiles(row, t[RUNS], t[TILE_BITS], t[BITS], KEYS, nk):
        k_n, k_d = t[K_N], t[K_D]
        from_k = t[K] + wide * (b * t[K_B] + kv * t[K_H] + key0 * k_n)
        from_v = t[V] + wide * (b * t[V_B] + kv * t[V_H] + key0 * t[V_N])
        product(from_k, in_words(k_n, half), k_d, queries, QUERIES, scores, QUERIES, keys, d_words, QUERIES, half)
        product(from_v, in_words(t[V_N], half), t[V_D], d_out, QUERIES, moves, QUERIES, keys, dv_words, QUERIES, half)
        unit = scale * LOG2E
        if softcap > 0 or t[BIAS]:  # these work on scaled scores
            times(scores, QUERIES * keys, unit)
            unit = np.float32(1.0)
        if softcap > 0:
            cap(scores, keys, softcap)
            keep_slope(scores, slopes, keys, softcap)
        if t[BIAS]:
            start = b * t[BIAS_B] + h * t[BIAS_H] + r * QUERIES * t[BIAS_Q] + key0 * t[BIAS_K]
            add_bias(scores, t[BIAS] + 4 * start, t[BIAS_Q], t[BIAS_K], n, keys)
        weigh(scores, moves, unit, words, keys, lse, delta)
        if t[DBIAS]:
            start = part * t[DBIAS_P] + b * t[DBIAS_B] + h * t[DBIAS_H] + r * QUERIES * t[DBIAS_Q] + key0 * t[DBIAS_K]
            bias_out(moves, t[DBIAS] + 4 * start, t[DBIAS_Q], t[DBIAS_K], n, keys)
        if softcap > 0:
            times_slope(moves, slopes, words, keys)
        to_dk = t[DK] + 4 * (head_row + key0) * d_row
        to_dv = t[DVALUE] + 4 * (head_row + key0) * dv_row
        some_q, some_do = q_rows, do_rows
        if half is not None:
            some_q, some_do = q_pairs, do_pairs
        if words != 0 and not (finite and keys_finite(from_k, k_n, k_d, keys, d, half)):
            # A row of Q, dO or K is not finite, and some pairs are hidden: it reaches those that see it, row by row.
            spread_broken(scores, words, keys, do_rows, n, dv_row, to_dv)
            spread_broken(moves, words, keys, q_rows, n, d_row, to_dk)
            clean_rows(q_rows, n, d_row, clean_q)
            clean_rows(do_rows, n, dv_row, clean_do)
            mix_broken(from_k, k_n, k_d, moves, words, keys, dq, d, clean_k, half)
            some_q, some_do = clean_q, clean_do
            if half is not None:
                pair_rows(clean_q, n, d, clean_q)
                pair_rows(clean_do, n, dv, clean_do)
                pair_rows(clean_k, keys, d, clean_k)
            from_k, k_n, k_d = clean_k, d, 1
        elif half is not None:
            pair_values(from_k, k_n, keys, d, zeros, clean_k)
            from_k, k_n, k_d = clean_k, d, 1
        key_moves = moves
        if half is not None:
            key_moves = slopes  # their room: softcap is done with
            pair_rows(moves, keys, QUERIES, key_moves)
            halve_rows(scores, keys)
            halve_rows(moves, keys)
        some_n, some_keys = in_words(n, half), in_words(keys, half)
        product_add(scores, QUERIES, 1, some_do, dv_row, to_dv, dv_row, keys, some_n, dv_row, half)
        product_add(moves, QUERIES, 1, some_q, d_row, to_dk, d_row, keys, some_n, d_row, half)
        product_add(from_k, k_d, k_n, key_moves, QUERIES, dq, QUERIES, d, some_keys, QUERIES, half)
    times(dq, QUERIES * d, scale)
    turn_out(dq, n, d, t[DQ] + 4 * line * d, d)


@inlined
def take_tasks(t, half):
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
                backward_tile(t, here, part, b, h, r, half)


def backward(descriptor):
    """The kernel for float32."""
    take_tasks(descriptor, None)


def backward_half(descriptor):
    """The kernel for bf16, where the CPU multiplies pairs of them; sums, and what it gives back, are float32."""
    take_tasks(descriptor, 1)
