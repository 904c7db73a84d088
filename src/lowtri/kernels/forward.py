"""Attention, tile by tile of the plan.

A task is one tile of 64 queries of one head. Queries are in lanes: the tile is transposed once to (D, 64), scores are
S^T = K Q^T, softmax works lane by lane, and O^T += V^T P^T, so keys and values are read without a copy, with any strides.

    for each run of key tiles in the plan's row:
        scores of the tile               score_tile
        softcap, bias                    passes over the tile, if the call has them
        hidden pairs to -inf             apply_mask, if the run is PARTIAL
        weights, and the running sum     softmax_tile, softmax_in_pairs
    dropped weights to 0             drop_weights, drop_pairs, if the call has dropout
        output += weights x values       pv_rows, finish_pv

With products on tile registers the unit of work is one half of the queries, and its product with the values follows the next unit's
scores, since tile loads wait for stores that are under way; V is transposed once for each key/value head, in one copy that all threads
share.

Source: FlashAttention (Dao et al. 2022), with the operand orientation that was measured to be the fastest on CPUs.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import dropout, rows, tiles
from lowtri.kernels.abi import KEYS
from lowtri.kernels.device import device_function, scratch_at, take, tasks
from lowtri.kernels.product import configure_tiles, restore_tiles
from lowtri.kernels.simd import (
    as_number,
    div,
    load,
    mul,
    read,
    select_greater,
    splat,
    store,
    store_rounded_block,
    write,
)
from lowtri.kernels.spec import QUERIES


@device_function
def attend_tile(call, own, b, h, r, non_finite, spec):
    """One tile of queries of one head: output before the division, shift m and sum l, in the thread's scratch memory."""
    d, dv, kv, number_bytes, softcap = call.d, call.dv, h // call.group, spec.number_bytes, call.options.softcap
    m, l, output, scores, pairs = own.shift, own.total, own.output, own.scores, own.weights
    n, q_step = min(QUERIES, call.nq - r * QUERIES), call.q_strides
    scale = as_number(call.options.scale, spec) * as_number(tiles.LOG2E, spec)
    q = rows.input_row(call.q, q_step, b, h, r * QUERIES, spec)
    rows.transposed_queries(q, q_step.n, q_step.d, n, d, own.rows, own.queries, spec)
    if spec.in_pairs:
        rows.fill(own.zeros, rows.round_up(dv, 32), 0.0, spec)
    # A sink is a key without a value, which is visible before all others.
    start_m, start_l = as_number(-np.inf, spec), as_number(0.0, spec)
    if call.sinks:
        start_m = read(call.sinks + number_bytes * h, spec) * as_number(tiles.LOG2E, spec)
        start_l = as_number(1.0, spec) if start_m > -np.inf else as_number(0.0, spec)
    if call.dropout.key_words:
        dropout.write_query_words(call, own, b, h, r, n)
    rows.fill(m, QUERIES, start_m, spec)
    rows.fill(l, QUERIES, start_l, spec)
    # On tiles the first product of each half of the queries sets the output, one bit of ``written`` for each half.
    written = 0 if spec.on_tiles and not non_finite else 3
    if written:
        rows.zero_output(output, n, dv, spec)
    seen, left, per_pass = tiles.tile_count(call.plan, b, h, r), (0, 0, 0, 0, False), QUERIES
    if spec.on_tiles and d + dv <= 192 and 2 * n > QUERIES:
        # Long rows read K and V for one half of the queries after the other, so that the halves' memory stays in the first cache;
        # where heads are large, both halves share what they read.
        per_pass = QUERIES // 2
    for first_query in range(0, n, per_pass):
        fetched = 0
        for key0, keys, mask_bits in tiles.visible_tiles(call.plan, b, h, r, call.nk, 0, tiles.ALL_TILES, spec):
            # Tasks go from the last row to the first, so what the next one sees first lies before this one's first tile.
            ahead = KEYS if fetched else -KEYS
            if not spec.on_tiles:  # there this was measured to gain little or to lose
                prefetch_queries_and_output(call, b, h, r, fetched, spec)
            fetched += 16
            for query in range(first_query, min(n, first_query + per_pass), spec.unit_queries):
                spans, groups = tiles.unit_spans(mask_bits, keys, n, query, spec)
                if spec.on_tiles and spans[0] == spans[1]:
                    continue
                count, lane, scale_log2 = min(spec.unit_queries, n - query), number_bytes * query, scale
                k, k_n, k_d = rows.packed_keys(call, own, b, kv, key0, keys, seen, spec)
                queries = own.queries + lane * rows.round_up(rows.word_count(d, spec), 16) if query else own.queries
                tiles.score_tile(k, k_n, k_d, queries, scores, spec.unit_row, d, ahead, spans, groups, spec)
                tiles.finish_pv(left, pairs, dv, spec)
                if softcap > 0 or call.bias or scale <= 0:  # these passes need scaled scores
                    rows.multiply_by(scores, spec.unit_queries * keys, scale, spec)
                    scale_log2 = as_number(1.0, spec)
                if softcap > 0:
                    tiles.apply_softcap(scores, spec.unit_queries * keys, softcap, spec)
                if call.bias:
                    step = call.bias_strides
                    index = b * step.b + h * step.h + (r * QUERIES + query) * step.q + key0 * step.k
                    tiles.add_bias(scores, spec.unit_row, call.bias + number_bytes * index, step, count, keys, spec)
                if mask_bits:
                    tiles.apply_mask(scores, mask_bits, query, spans, spec)
                is_first = not (written >> (query // 32)) & 1
                if spec.on_tiles:
                    first, last, size = spans[0], spans[1], 0 if is_first else dv
                    tiles.softmax_in_pairs(
                        scores, scale_log2, first, last, m + lane, l + lane, output + lane, size, pairs, spec
                    )
                else:
                    tiles.softmax_tile(scores, scale_log2, spans, m, l, output, dv, spec)
                if call.dropout.key_words:
                    stop = min(n, query + spec.unit_queries)
                    dropout.draw_tile(call, own, b, key0, keys, query, stop)
                    if spec.on_tiles:
                        dropout.drop_pairs(pairs, own.kept, query, spans[0], spans[1], spec)
                    else:
                        dropout.drop_weights(scores, own.kept, keys, spec)
                if non_finite:
                    if spec.on_tiles:
                        tiles.unpack_weights(scores, pairs, keys, spec)
                    step, target, lanes = call.v_strides, output + lane, spec.unit_queries
                    v_rows = rows.input_row(call.v, step, b, kv, key0, spec)
                    rows.add_non_finite_keys(
                        v_rows, step, scores, mask_bits, query, lanes, keys, target, dv, own.values, spec
                    )
                    v, v_row = rows.finite_rows_operand(
                        own.values, keys, dv, own.rows, own.zeros, own.kept_values, spec
                    )
                else:
                    v, v_row = rows.packed_values(call, own, b, kv, key0, keys, seen, spec)
                if spec.on_tiles:
                    left = v, output + lane, spans[0], spans[1], is_first
                else:
                    weights = rows.row_operand(scores, keys, QUERIES, pairs, spec)
                    cut_bits = mask_bits if groups > 1 else 0
                    tiles.pv_rows(v, v_row, weights, output, dv, keys, ahead, cut_bits, spans, n, spec)
                written |= 1 << (query // 32)
    tiles.finish_pv(left, pairs, dv, spec)
    for half in range(2):  # queries that see nothing
        if not (written >> half) & 1:
            rows.fill_columns(output + 128 * half, dv, 32, 0.0, spec)
    return n


@device_function
def prefetch_queries_and_output(call, b, h, r, first, spec):
    """Prefetch 16 rows of the next task's queries, from ``first`` on, and those of this task's output."""
    last = min(first + 16, min(QUERIES, call.nq - r * QUERIES))
    q = rows.input_row(call.q, call.q_strides, b, h, max(r - 1, 0) * QUERIES, spec)
    o = rows.input_row(call.o, call.o_strides, b, h, r * QUERIES, spec)
    rows.prefetch_rows(q, call.q_strides.n, first, last, call.d, spec)
    rows.prefetch_rows(o, call.o_strides.n, first, last, call.dv, spec)


@device_function
def store_output(call, own, n, o, spec):
    """The output of a tile of n queries, divided by the sums of its weights, written to the array from ``o`` on."""
    output, l, dv, step = own.output, own.total, call.dv, call.o_strides.n
    if not spec.on_tiles:
        columns = rows.padded(spec, dv)
        for i in range(n):
            row, total = output + spec.number_bytes * columns * i, read(l + spec.number_bytes * i, spec)
            factor = as_number(1.0, spec) / total
            if not total > 0:  # 0 if no key was seen, NaN if the sum is NaN
                rows.fill(row, columns, total, spec)
                factor = as_number(1.0, spec)
            rows.round_row(row, dv, factor, o + spec.input_bytes * i * step, spec)
    elif n == QUERIES and dv % 32 == 0:
        for lane in range(0, QUERIES, 16):
            total = load(l + 4 * lane, spec)
            for d in range(0, dv, 32):
                block = output + spec.row_bytes * d + 4 * lane
                store_rounded_block(block, spec.row_bytes, total, o + 2 * (lane * step + d), 2 * step, spec)
    else:
        zero, one = splat(0.0, spec), splat(1.0, spec)
        for lane in range(0, 4 * rows.round_up(n, 16), 64):
            total = load(l + lane, spec)
            factor = select_greater(total, zero, div(one, total), total)  # as above
            for d in range(dv):
                address = output + spec.row_bytes * d + lane
                store(address, select_greater(total, zero, mul(load(address, spec), factor), total))
        rows.transpose_out(output, n, dv, own.rows, dv, spec)
        for i in range(n):
            rows.round_row(own.rows + 4 * i * dv, dv, as_number(1.0, spec), o + 2 * i * step, spec)


@device_function
def store_lse(call, own, b, h, r, n, spec):
    """The log-sum-exp of a tile of n queries, written to the array."""
    if call.lse:
        offset = spec.number_bytes * ((b * call.heads + h) * call.nq + r * QUERIES)
        for i in range(n):
            number = spec.number_bytes * i
            total, lse, low = read(own.total + number, spec), as_number(-np.inf, spec), as_number(0.0, spec)
            if total != 0:
                m = read(own.shift + number, spec)
                lse = m * as_number(tiles.LN2, spec) + np.log(total)
                low = m - tiles.times_log2e(lse, spec) + np.log2(total)
            write(call.lse + offset + number, lse, spec)
            if call.lse_low:
                write(call.lse_low + offset + number, low, spec)


@device_function
def forward_tile(call, own, b, h, r, spec):
    """One tile of queries: its output and log-sum-exp, written to the arrays."""
    non_finite = False
    while True:
        n = attend_tile(call, own, b, h, r, non_finite, spec)
        if non_finite or rows.output_finite(own.output, n, call.dv, spec):
            break
        # Some value is NaN or inf. It must not reach queries that do not see it: compute the tile again, with the non-finite path.
        non_finite = True
    store_lse(call, own, b, h, r, n, spec)
    if call.dropout.key_words:  # where all weights are dropped, the sums become 0, and so do the outputs
        rows.multiply_by(own.total, QUERIES, as_number(call.dropout.share, spec), spec)
    store_output(call, own, n, rows.input_row(call.o, call.o_strides, b, h, r * QUERIES, spec), spec)


def forward(call):
    """The kernel: takes tasks until none is left, the last rows first: under a causal mask they have the most keys.

    The thread's tile configuration is restored when its tasks are done. Kernels raise no exceptions, so there is no other way out.
    """
    own, plan_rows = scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread)), call.plan.rows
    configure_tiles(own.tile_configuration, call.spec)
    rows.clear_pack_cache(own, call.spec)
    for task in tasks(call):
        head, r = task // plan_rows, plan_rows - 1 - task % plan_rows
        forward_tile(call, own, head // call.heads, head % call.heads, r, call.spec)
    restore_tiles(own.tile_configuration, call.spec)
