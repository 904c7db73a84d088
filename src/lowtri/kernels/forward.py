"""Attention, tile by tile of the plan.

A task is one tile of 64 queries of one head. Queries are in lanes: the tile is transposed once to (D, 64), scores are
S^T = K Q^T, softmax works lane by lane, and O^T += V^T P^T, so keys and values are read without a copy, with any strides.

    for each run of key tiles in the plan's row:
        scores of the tile               score_tile
        softcap, bias                    passes over the tile, if the call has them
        hidden pairs to -inf             apply_mask, if the run is PARTIAL
        weights, and the running sum     softmax_unit
        output += weights x values       pv_unit

With products on tile registers the unit of work is one half of the queries, and its product with the values follows the next unit's
scores; V is transposed once for each key/value head, in one copy that all threads share.

Source: FlashAttention (Dao et al. 2022), with the operand orientation that was measured to be the fastest on CPUs.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.operands import (
    clear_pack_cache,
    finite_rows_operand,
    packed_keys,
    packed_values,
    store_rounded_block,
    transposed_queries,
)
from lowtri.kernels.plan_walk import tile_count, visible_tiles
from lowtri.kernels.record import take
from lowtri.kernels.rows import (
    fill,
    fill_columns,
    multiply_by,
    padded,
    prefetch_rows,
    round_row,
    round_up,
    transpose_out,
    word_count,
)
from lowtri.kernels.scores import LN2, LOG2E, add_bias, apply_mask, apply_softcap, times_log2e
from lowtri.kernels.scratch import KEYS
from lowtri.kernels.simd import as_number, div, load, mul, read, select_greater, splat, store, write
from lowtri.kernels.softmax import softmax_unit, weights_operand, wide_weights
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_output import add_non_finite_keys, fill_output, output_finite
from lowtri.kernels.tile_products import finish_pv, passes_over_keys, product_keys, pv_unit, score_tile, unit_spans
from lowtri.kernels.tiles import configure_tiles, restore_tiles

__all__ = ["forward"]


@device_function
def attend_tile(call, memory, b, h, r, non_finite, spec):
    """One tile of queries of one head: output before the division, shift m and sum l, in the thread's scratch memory."""
    d, dv, nk, kv, input_bytes, number_bytes = (
        call.d,
        call.dv,
        call.nk,
        h // call.group,
        spec.input_bytes,
        spec.number_bytes,
    )
    offsets, bias_step = call.offsets, call.bias_strides
    q_step, k_step, v_step = call.q_strides, call.k_strides, call.v_strides
    queries, scores, pairs = memory + offsets.queries, memory + offsets.scores, memory + offsets.weights
    m, l, output = memory + offsets.shift, memory + offsets.total, memory + offsets.output
    values, zeros, rows = memory + offsets.values, memory + offsets.zeros, memory + offsets.rows
    kept_keys, kept_values = memory + offsets.kept_keys, memory + offsets.kept_values
    n = min(QUERIES, call.nq - r * QUERIES)
    scale = as_number(call.options.scale, spec) * as_number(LOG2E, spec)
    softcap = as_number(call.options.softcap, spec)
    q = call.q + input_bytes * (b * q_step.b + h * q_step.h + r * QUERIES * q_step.n)
    transposed_queries(q, q_step.n, q_step.d, n, d, rows, queries, spec)
    d_words = word_count(d, spec)
    if spec.per_word > 1:
        fill(zeros, round_up(dv, 32), 0.0, spec)
    # A sink is a key without a value, which is visible before all others.
    start_m, start_l = as_number(-np.inf, spec), as_number(0.0, spec)
    if call.sinks:
        start_m = read(call.sinks + number_bytes * h, spec) * as_number(LOG2E, spec)
        start_l = as_number(1.0, spec) if start_m > -np.inf else as_number(0.0, spec)
    fill(m, QUERIES, start_m, spec)
    fill(l, QUERIES, start_l, spec)
    # On tiles the first product of each half of the queries sets the output, one bit of ``written`` for each half.
    written = 0 if spec.on_tiles and not non_finite else 3
    if written:
        fill_output(output, n, dv, 0.0, spec)
    head = b * (call.heads // call.group) + kv
    k = call.k + input_bytes * (b * k_step.b + kv * k_step.h)
    v = call.v + input_bytes * (b * v_step.b + kv * v_step.h)
    seen = tile_count(call.plan, b, h, r)
    passes, left = passes_over_keys(n, d, dv, spec), (0, 0, 0, 0, False)
    for first_query in range(0, n, QUERIES // passes):
        fetched = 0
        for visible_key, visible_count, visible_bits in visible_tiles(call.plan, b, h, r, KEYS, nk):
            key0, keys, mask_bits = product_keys(visible_key, visible_count, visible_bits, nk, spec)
            # Tasks go from the last row to the first, so what the next one sees first lies before this one's first tile.
            ahead = KEYS if fetched else -KEYS
            fetched = prefetch_queries_and_output(call, b, h, r, fetched, spec)
            for query in range(first_query, min(n, first_query + QUERIES // passes), spec.unit_queries):
                spans, groups = unit_spans(mask_bits, keys, n, query, spec)
                if spec.on_tiles and spans[0] == spans[1]:
                    continue
                count, lane = min(spec.unit_queries, n - query), number_bytes * query
                k_words, k_n, k_d = packed_keys(call, k, k_step, head, key0, keys, seen, kept_keys, spec)
                unit_queries = queries + lane * round_up(d_words, 16) if query else queries
                score_tile(k_words, k_n, k_d, unit_queries, scores, spec.unit_row, d_words, ahead, spans, groups, spec)
                finish_pv(left, pairs, dv, spec)
                scale_log2 = scale
                if softcap > 0 or call.bias or scale <= 0:  # these passes need scaled scores
                    multiply_by(scores, spec.unit_queries * keys, scale, spec)
                    scale_log2 = as_number(1.0, spec)
                if softcap > 0:
                    apply_softcap(scores, spec.unit_queries * keys, softcap, spec)
                if call.bias:
                    index = b * bias_step.b + h * bias_step.h + (r * QUERIES + query) * bias_step.q + key0 * bias_step.k
                    bias = call.bias + number_bytes * index
                    add_bias(scores, spec.unit_row, bias, bias_step.q, bias_step.k, count, keys, spec)
                if mask_bits:
                    apply_mask(scores, mask_bits, query, spans, spec)
                is_first = not (written >> (query // 32)) & 1
                rescaled = 0 if is_first else dv
                softmax_unit(scores, scale_log2, spans, m + lane, l + lane, output + lane, rescaled, pairs, spec)
                if non_finite:
                    wide_weights(scores, pairs, keys, spec)
                    v_rows, lanes = v + input_bytes * key0 * v_step.n, spec.unit_queries
                    add_non_finite_keys(
                        v_rows,
                        v_step.n,
                        v_step.d,
                        scores,
                        mask_bits,
                        query,
                        lanes,
                        keys,
                        output + lane,
                        dv,
                        values,
                        spec,
                    )
                    v_words, v_row = finite_rows_operand(values, keys, dv, rows, zeros, kept_values, spec)
                else:
                    v_words, v_row = packed_values(
                        call, v, v_step, head, key0, keys, seen, zeros, values, kept_values, spec
                    )
                weights = weights_operand(scores, keys, pairs, spec)
                cut_bits = mask_bits if groups > 1 else 0
                left = pv_unit(
                    v_words, v_row, weights, output + lane, dv, keys, ahead, cut_bits, spans, n, is_first, spec
                )
                written |= 1 << (query // 32)
    finish_pv(left, pairs, dv, spec)
    for half in range(2):  # queries that see nothing
        if not (written >> half) & 1:
            fill_columns(output + 128 * half, dv, 32, 0.0, spec)
    return n


@by_spec
def prefetch_queries_and_output(spec):
    """Prefetch 16 rows of the next task's queries, from ``first`` on, and those of this task's output; returns the next ``first``."""

    def rows(call, b, h, r, first, spec):
        q_step, o_step, last = call.q_strides, call.o_strides, min(first + 16, min(QUERIES, call.nq - r * QUERIES))
        q = call.q + spec.input_bytes * (b * q_step.b + h * q_step.h + max(r - 1, 0) * QUERIES * q_step.n)
        o = call.o + spec.input_bytes * (b * o_step.b + h * o_step.h + r * QUERIES * o_step.n)
        prefetch_rows(q, q_step.n, first, last, call.d, spec)
        prefetch_rows(o, o_step.n, first, last, call.dv, spec)
        return first + 16

    def nothing(call, b, h, r, first, spec):  # on tiles this was measured to gain little or to lose
        return first + 16

    return nothing if spec.on_tiles else rows


@by_spec
def store_output(spec):
    """The output of a tile of n queries, divided by the sums of its weights, written to the array from ``o`` on."""

    def rows(call, memory, n, o, spec):
        columns = padded(spec, call.dv)
        for i in range(n):
            row = memory + call.offsets.output + spec.number_bytes * columns * i
            total = read(memory + call.offsets.total + spec.number_bytes * i, spec)
            factor = as_number(1.0, spec) / total
            if not total > 0:  # 0 if no key was seen, NaN if the sum is NaN
                fill(row, columns, total, spec)
                factor = as_number(1.0, spec)
            round_row(row, call.dv, factor, o + spec.input_bytes * i * call.o_strides.n, spec)

    def columns(call, memory, n, o, spec):
        output, l, dv, step = memory + call.offsets.output, memory + call.offsets.total, call.dv, call.o_strides.n
        if n == QUERIES and dv % 32 == 0:
            for lane in range(0, QUERIES, 16):
                total = load(l + 4 * lane, spec)
                for d in range(0, dv, 32):
                    block = output + spec.row_bytes * d + 4 * lane
                    store_rounded_block(block, spec.row_bytes, total, o + 2 * (lane * step + d), 2 * step, spec)
            return
        zero, one, rows = splat(0.0, spec), splat(1.0, spec), memory + call.offsets.rows
        for lane in range(0, 4 * round_up(n, 16), 64):
            total = load(l + lane, spec)
            factor = select_greater(total, zero, div(one, total), total)  # as above
            for d in range(dv):
                address = output + spec.row_bytes * d + lane
                store(address, select_greater(total, zero, mul(load(address, spec), factor), total))
        transpose_out(output, n, dv, rows, dv, spec)
        for i in range(n):
            round_row(rows + 4 * i * dv, dv, as_number(1.0, spec), o + 2 * i * step, spec)

    return columns if spec.on_tiles else rows


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
    step, non_finite = call.o_strides, False
    while True:
        n = attend_tile(call, memory, b, h, r, non_finite, spec)
        if non_finite or output_finite(memory + call.offsets.output, n, call.dv, spec):
            break
        # Some value is NaN or inf. It must not reach queries that do not see it: compute the tile again, with the non-finite path.
        non_finite = True
    o = call.o + spec.input_bytes * (b * step.b + h * step.h + r * QUERIES * step.n)
    store_output(call, memory, n, o, spec)
    store_lse(call, memory, b, h, r, n, spec)


def forward(call):
    """The kernel: takes tasks until none is left, the last rows first: under a causal mask they have the most keys.

    The thread's tile configuration is restored when its tasks are done. Kernels raise no exceptions, so there is no other way out.
    """
    memory = call.scratch + call.thread_bytes * take(call.next_thread)
    configuration, rows = memory + call.offsets.tile_configuration, call.plan.rows
    configure_tiles(configuration, call.spec)
    clear_pack_cache(memory + call.offsets.kept_keys, memory + call.offsets.kept_values, call.spec)
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            break
        head, r = task // rows, rows - 1 - task % rows
        forward_tile(call, memory, head // call.heads, head % call.heads, r, call.spec)
    restore_tiles(configuration, call.spec)
