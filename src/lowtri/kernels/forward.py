"""Attention, tile by tile of the plan.

A task is one tile of 64 queries of one head. Queries stand in lanes: with the queries turned once (D, 64), scores are
S^T = K Q^T, weights come lane by lane, and O^T += V^T P^T, so keys and values are read where they lie, in any strides.

    for each run of key tiles in the plan's row:
        scores of the tile               product
        softcap, bias                    passes over the tile, where the call has them
        hidden pairs to -inf             only where the run is PARTIAL
        weights, and the running sum     softmax_tile
        output += weights x values       product_add

Source: FlashAttention (Dao et al. 2022), with the orientation measured best on CPUs.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function, inlined
from lowtri.kernels.non_finite import add_key_rows, all_finite
from lowtri.kernels.plan_walk import spans_of, tiles
from lowtri.kernels.product import product, product_add
from lowtri.kernels.record import take
from lowtri.kernels.rows import fill, head_words, in_words, key_words, store_rows, sum_words, times, turned_queries
from lowtri.kernels.scores import LN2, LOG2E, add_bias, apply_mask, cap
from lowtri.kernels.simd import above_or, div, load, mul, number, read, splat, store, write
from lowtri.kernels.softmax import softmax_tile
from lowtri.kernels.spec import QUERIES, KernelSpec

__all__ = ["KEYS", "forward", "scratch"]

KEYS = 96  # keys in a tile: 24 KB of scores stay in the first cache, and 96 is a multiple of the register tile's 6 rows


def scratch(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    """Bytes of each part of the memory that one thread works in."""
    row, wide = spec.row_bytes, spec.number_bytes
    direct, pairs = spec.rows == "direct", spec.rows == "pairs"
    return {
        "queries": row * d,
        "scores": row * KEYS,
        "output": row * dv,
        "shift": row,
        "total": row,
        "weights": row * KEYS // 2 if pairs else 0,
        "keys": wide * KEYS * d if spec.rows == "widened" else 0,
        "values": wide * KEYS * dv,  # also a copy without the rows that are not finite
        "zeros": wide * dv if pairs else 0,
        "rows": 0 if direct else row * max(d, dv),
    }


@device_function
def score_tile(keys, k_n, k_d, queries, scores, d, spans, parts, spec):
    """Scores of one tile, of all 64 queries or of each 16 with the keys in their span. Steps in words."""
    wide = spec.number_bytes
    for part in range(parts):
        a, b, lane = spans[2 * part], spans[2 * part + 1], 16 * wide * part
        at, to = keys + wide * a * k_n, scores + spec.row_bytes * a + lane
        product(at, k_n, k_d, queries + lane, QUERIES, to, QUERIES, b - a, d, QUERIES // parts, spec)


@device_function
def pv_tile(values, v_d, v_n, weights, output, dv, spans, parts, spec):
    """Output += values^T weights, of all 64 queries or 16 by 16. Steps in words."""
    wide = spec.number_bytes
    for part in range(parts):
        a, b, lane = in_words(spans[2 * part], spec), in_words(spans[2 * part + 1], spec), 16 * wide * part
        at, some, to = values + wide * a * v_n, weights + spec.row_bytes * a + lane, output + lane
        product_add(at, v_d, v_n, some, QUERIES, to, QUERIES, dv, b - a, QUERIES // parts, spec)


@device_function
def attend_tile(call, memory, b, h, r, non_finite, spec):
    """One tile of queries of one head: output (Dv, 64) before the division, shift m and sum l, in the thread's scratch memory."""
    d, dv, nk, kv, wide = call.d, call.dv, call.nk, h // call.group, spec.input_bytes
    at, q_step, k_step, v_step, bias_step = (
        call.offsets,
        call.q_strides,
        call.k_strides,
        call.v_strides,
        call.bias_strides,
    )
    queries, scores, output = memory + at.queries, memory + at.scores, memory + at.output
    m, l, values, zeros = memory + at.shift, memory + at.total, memory + at.values, memory + at.zeros
    n = min(QUERIES, call.nq - r * QUERIES)
    scale = number(call.options.scale, spec) * number(LOG2E, spec)
    softcap = number(call.options.softcap, spec)
    from_q = call.q + wide * (b * q_step.b + h * q_step.h + r * QUERIES * q_step.n)
    turned_queries(from_q, q_step.n, q_step.d, n, d, memory + at.rows, queries, spec)
    d_words = in_words(d, spec)
    if spec.per_word > 1:
        fill(zeros, dv, 0.0, spec)
    # A sink is a key that has been seen before the first one, with no value.
    start_m, start_l = number(-np.inf, spec), number(0.0, spec)
    if call.sinks:
        start_m = read(call.sinks + spec.number_bytes * h, spec) * number(LOG2E, spec)
        start_l = number(1.0, spec) if start_m > -np.inf else number(0.0, spec)
    fill(m, QUERIES, start_m, spec)
    fill(l, QUERIES, start_l, spec)
    fill(output, QUERIES * dv, 0.0, spec)
    for key0, keys, words in tiles(call.plan, b, h, r, KEYS, nk):
        from_k = call.k + wide * (b * k_step.b + kv * k_step.h + key0 * k_step.n)
        from_v = call.v + wide * (b * v_step.b + kv * v_step.h + key0 * v_step.n)
        spans, parts = spans_of(words, keys)
        k_words, k_n, k_d = head_words(from_k, k_step.n, k_step.d, keys, d, memory + at.keys, spec)
        score_tile(k_words, k_n, k_d, queries, scores, d_words, spans, parts, spec)
        unit = scale
        if softcap > 0 or call.bias or scale <= 0:  # these work on scaled scores
            times(scores, QUERIES * keys, scale, spec)
            unit = number(1.0, spec)
        if softcap > 0:
            cap(scores, QUERIES * keys, softcap, spec)
        if call.bias:
            start = b * bias_step.b + h * bias_step.h + r * QUERIES * bias_step.q + key0 * bias_step.k
            add_bias(scores, call.bias + spec.number_bytes * start, bias_step.q, bias_step.k, n, keys, spec)
        if words:
            apply_mask(scores, words, spans, spec)
        softmax_tile(scores, unit, spans, m, l, output, dv, spec)
        if non_finite:
            add_key_rows(from_v, v_step.n, v_step.d, scores, words, keys, output, dv, values, spec)
            v_words, v_n, v_d = sum_words(values, keys, dv, values, spec), dv, 1
        else:
            v_words, v_n, v_d = key_words(from_v, v_step.n, v_step.d, keys, dv, zeros, values, spec)
        weights = sum_words(scores, keys, QUERIES, memory + at.weights, spec)
        pv_tile(v_words, v_d, v_n, weights, output, dv, spans, parts, spec)
    return n


@inlined
def forward_tile(call, memory, b, h, r, spec):
    """One tile of queries, from the plan's row to the output and log-sum-exp in memory."""
    dv, at, o_step, wide = call.dv, call.offsets, call.o_strides, spec.number_bytes
    output, m, l = memory + at.output, memory + at.shift, memory + at.total
    non_finite = False
    while True:
        n = attend_tile(call, memory, b, h, r, non_finite, spec)
        if non_finite or all_finite(output, QUERIES * dv, spec):
            break
        # A query met a NaN or inf among the values; what is hidden must leave no trace: again, row by row.
        non_finite = True
    zero, one = splat(0.0, spec), splat(1.0, spec)
    for lane in range(0, spec.row_bytes, 64):
        total = load(l + lane, spec)
        share = above_or(total, zero, div(one, total), total)  # 0 where nothing was seen, NaN where the sum is
        for d in range(dv):
            place = output + spec.row_bytes * d + lane
            store(place, above_or(total, zero, mul(load(place, spec), share), total))
    to = call.o + spec.input_bytes * (b * o_step.b + h * o_step.h + r * QUERIES * o_step.n)
    store_rows(output, n, dv, memory + at.rows, to, o_step.n, spec)
    if call.lse:
        to = call.lse + wide * ((b * call.heads + h) * call.nq + r * QUERIES)
        for i in range(n):
            sum_of_i, lse = read(l + wide * i, spec), number(-np.inf, spec)
            if sum_of_i != 0:
                lse = read(m + wide * i, spec) * number(LN2, spec) + np.log(sum_of_i)
            write(to + wide * i, lse, spec)


def forward(call):
    """The kernel: takes tasks until none is left. Rows from the last up: under a causal mask they are the heaviest."""
    memory = call.scratch + call.thread_bytes * take(call.next_thread)
    rows = call.plan.rows
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            return
        head, r = task // rows, rows - 1 - task % rows
        forward_tile(call, memory, head // call.heads, head % call.heads, r, call.spec)
