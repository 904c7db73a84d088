"""Attention, tile by tile of the plan.

A task is one tile of 64 queries of one head. Queries are in lanes: the tile is transposed once to (D, 64), scores are
S^T = K Q^T, softmax works lane by lane, and O^T += V^T P^T, so keys and values are read without a copy, with any strides.

    for each run of key tiles in the plan's row:
        scores of the tile               product
        softcap, bias                    passes over the tile, if the call has them
        hidden pairs to -inf             apply_mask, if the run is PARTIAL
        weights, and the running sum     softmax_tile
        output += weights x values       product_add

Source: FlashAttention (Dao et al. 2022), with the operand orientation that was measured to be the fastest on CPUs.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.kept_tiles import forget_tiles, kept_keys, kept_values
from lowtri.kernels.non_finite import add_non_finite_keys, columns_finite
from lowtri.kernels.plan_walk import ALL_QUERIES, key_spans, tile_count, visible_tiles
from lowtri.kernels.product import product, product_add
from lowtri.kernels.record import take
from lowtri.kernels.rows import (
    fill,
    fill_columns,
    multiply_by,
    row_operand,
    store_rows,
    transposed_queries,
    whole_groups,
    word_count,
)
from lowtri.kernels.scores import LN2, LOG2E, add_bias, apply_mask, apply_softcap, times_log2e
from lowtri.kernels.scratch import KEYS
from lowtri.kernels.simd import as_number, div, load, mul, read, select_greater, splat, store, write
from lowtri.kernels.softmax import softmax_tile
from lowtri.kernels.spec import QUERIES

__all__ = ["forward", "pv_tile", "score_tile", "store_lse", "store_tile"]


@device_function
def score_tile(keys, k_n, k_d, queries, scores, d, spans, groups, spec):
    """Scores of one tile: of all 64 queries, or of each 16 with the keys in their span. Steps in words."""
    for group in range(groups):
        start, stop, lane = spans[2 * group], spans[2 * group + 1], 16 * spec.number_bytes * group
        group_keys, group_scores = keys + spec.number_bytes * start * k_n, scores + spec.row_bytes * start + lane
        n = QUERIES // groups
        if stop > start:
            product(group_keys, k_n, k_d, queries + lane, QUERIES, group_scores, QUERIES, stop - start, d, n, spec)


@device_function
def pv_tile(values, v_d, v_n, weights, output, dv, spans, groups, spec):
    """Output += values^T weights, of all 64 queries or of each 16. Steps in words."""
    for group in range(groups):
        start, stop = word_count(spans[2 * group], spec), word_count(spans[2 * group + 1], spec)
        lane, n = 16 * spec.number_bytes * group, QUERIES // groups
        group_values, group_weights = values + spec.number_bytes * start * v_n, weights + spec.row_bytes * start + lane
        if stop > start:
            product_add(
                group_values, v_d, v_n, group_weights, QUERIES, output + lane, QUERIES, dv, stop - start, n, spec
            )


@device_function
def attend_tile(call, memory, b, h, r, non_finite, spec):
    """One tile of queries of one head: output (Dv, 64) before the division, shift m and sum l, in the thread's scratch memory."""
    d, dv, nk, kv, input_bytes = call.d, call.dv, call.nk, h // call.group, spec.input_bytes
    offsets, bias_step = call.offsets, call.bias_strides
    q_step, k_step, v_step = call.q_strides, call.k_strides, call.v_strides
    queries, scores, output = memory + offsets.queries, memory + offsets.scores, memory + offsets.output
    m, l, values, zeros = (
        memory + offsets.shift,
        memory + offsets.total,
        memory + offsets.values,
        memory + offsets.zeros,
    )
    n = min(QUERIES, call.nq - r * QUERIES)
    scale = as_number(call.options.scale, spec) * as_number(LOG2E, spec)
    softcap = as_number(call.options.softcap, spec)
    q = call.q + input_bytes * (b * q_step.b + h * q_step.h + r * QUERIES * q_step.n)
    transposed_queries(q, q_step.n, q_step.d, n, d, memory + offsets.rows, queries, spec)
    d_words = word_count(d, spec)
    if spec.per_word > 1:
        fill(zeros, dv, 0.0, spec)
    # A sink is a key without a value, which is visible before all others.
    start_m, start_l = as_number(-np.inf, spec), as_number(0.0, spec)
    if call.sinks:
        start_m = read(call.sinks + spec.number_bytes * h, spec) * as_number(LOG2E, spec)
        start_l = as_number(1.0, spec) if start_m > -np.inf else as_number(0.0, spec)
    fill(m, QUERIES, start_m, spec)
    fill(l, QUERIES, start_l, spec)
    fill_columns(output, dv, whole_groups(n), 0.0, spec)
    head = b * (call.heads // call.group) + kv
    k = call.k + input_bytes * (b * k_step.b + kv * k_step.h)
    v = call.v + input_bytes * (b * v_step.b + kv * v_step.h)
    seen = tile_count(call.plan, b, h, r)
    slots_k, slots_v = memory + offsets.kept_keys, memory + offsets.kept_values
    for key0, keys, mask_bits in visible_tiles(call.plan, b, h, r, KEYS, nk):
        spans, groups = key_spans(mask_bits, keys, n)
        k_words, k_n, k_d = kept_keys(k, k_step, head, key0, KEYS, nk, d, seen, slots_k, spec)
        score_tile(k_words, k_n, k_d, queries, scores, d_words, spans, groups, spec)
        unit = scale
        if softcap > 0 or call.bias or scale <= 0:  # these passes need scaled scores
            multiply_by(scores, QUERIES * keys, scale, spec)
            unit = as_number(1.0, spec)
        if softcap > 0:
            apply_softcap(scores, QUERIES * keys, softcap, spec)
        if call.bias:
            index = b * bias_step.b + h * bias_step.h + r * QUERIES * bias_step.q + key0 * bias_step.k
            add_bias(
                scores, spec.row_bytes, call.bias + spec.number_bytes * index, bias_step.q, bias_step.k, n, keys, spec
            )
        if mask_bits:
            apply_mask(scores, mask_bits, spans, spec)
        softmax_tile(scores, unit, spans, m, l, output, dv, spec)
        if non_finite:
            rows = v + input_bytes * key0 * v_step.n
            add_non_finite_keys(
                rows, v_step.n, v_step.d, scores, mask_bits, ALL_QUERIES, keys, output, dv, values, spec
            )
            v_words, v_n, v_d = row_operand(values, keys, dv, values, spec), dv, 1
        else:
            v_words, v_n, v_d = kept_values(v, v_step, head, key0, KEYS, nk, dv, seen, zeros, slots_v, spec)
        weights = row_operand(scores, keys, QUERIES, memory + offsets.weights, spec)
        pv_tile(v_words, v_d, v_n, weights, output, dv, spans, groups, spec)
    return n


@device_function
def store_tile(call, memory, b, h, r, n, spec):
    """The output and the log-sum-exp of a tile of n queries, written to the arrays."""
    dv, offsets, o_step, number_bytes = call.dv, call.offsets, call.o_strides, spec.number_bytes
    output, l = memory + offsets.output, memory + offsets.total
    zero, one = splat(0.0, spec), splat(1.0, spec)
    for lane in range(0, number_bytes * whole_groups(n), 64):
        total = load(l + lane, spec)
        # 0 for a query that saw no key, NaN if the sum is NaN.
        factor = select_greater(total, zero, div(one, total), total)
        for d in range(dv):
            address = output + spec.row_bytes * d + lane
            store(address, select_greater(total, zero, mul(load(address, spec), factor), total))
    o = call.o + spec.input_bytes * (b * o_step.b + h * o_step.h + r * QUERIES * o_step.n)
    store_rows(output, n, dv, memory + offsets.rows, o, o_step.n, spec)
    store_lse(call, memory, b, h, r, n, spec)


@device_function
def store_lse(call, memory, b, h, r, n, spec):
    """The log-sum-exp of a tile of n queries, written to the array."""
    number_bytes, m, l = spec.number_bytes, memory + call.offsets.shift, memory + call.offsets.total
    if call.lse:
        lse = call.lse + number_bytes * ((b * call.heads + h) * call.nq + r * QUERIES)
        for i in range(n):
            total_i, lse_i, low_i = read(l + number_bytes * i, spec), as_number(-np.inf, spec), as_number(0.0, spec)
            if total_i != 0:
                m_i = read(m + number_bytes * i, spec)
                lse_i = m_i * as_number(LN2, spec) + np.log(total_i)
                low_i = m_i - times_log2e(lse_i, spec) + np.log2(total_i)
            write(lse + number_bytes * i, lse_i, spec)
            if call.lse_low:
                write(call.lse_low + lse - call.lse + number_bytes * i, low_i, spec)


@device_function
def forward_tile(call, memory, b, h, r, spec):
    """One tile of queries: its output and log-sum-exp, written to the arrays."""
    dv, output = call.dv, memory + call.offsets.output
    non_finite = False
    while True:
        n = attend_tile(call, memory, b, h, r, non_finite, spec)
        if non_finite or columns_finite(output, dv, whole_groups(n), spec):
            break
        # Some value is NaN or inf. It must not reach queries that do not see it: compute the tile again, with the non-finite path.
        non_finite = True
    store_tile(call, memory, b, h, r, n, spec)


def forward(call):
    """The kernel: takes tasks until none is left, the last rows first: under a causal mask they have the most keys."""
    memory = call.scratch + call.thread_bytes * take(call.next_thread)
    rows = call.plan.rows
    forget_tiles(memory + call.offsets.kept_keys, memory + call.offsets.kept_values, call.spec)
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            return
        head, r = task // rows, rows - 1 - task % rows
        forward_tile(call, memory, head // call.heads, head % call.heads, r, call.spec)
