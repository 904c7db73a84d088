"""Attention, tile by tile of the plan.

A task is one tile of 64 queries of one head. Queries are in lanes: the tile is transposed once to (D, 64), scores are
S^T = K Q^T, softmax works lane by lane, and O^T += V^T P^T, so keys and values are read without a copy, with any strides.

    for each run of key tiles in the plan's row:
        scores of the tile               score_tile
        softcap, bias                    finish_scores, if the call has them
        hidden pairs to -inf             apply_mask, if the run is PARTIAL
        weights, and the running sum     softmax_tile
        dropped weights to 0             drop_weights, if the call has dropout
        output += weights x values       add_weighted_rows

On AMX the steps are those of :mod:`lowtri.kernels.amx_forward`. Source: FlashAttention (Dao et al. 2022), with the operand orientation
that was measured to be the fastest on CPUs.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import amx_forward, dropout, rows
from lowtri.kernels.abi import KEYS
from lowtri.kernels.amx import configure_tiles, restore_tiles
from lowtri.kernels.device import device_function, scratch_at, take, tasks
from lowtri.kernels.operands import (
    clear_slots,
    finite_rows_operand,
    key_operand,
    summed_rows_operand,
    transposed_queries,
    value_operand,
)
from lowtri.kernels.simd import LOG2E, as_number, read
from lowtri.kernels.softmax import apply_mask, finish_scores, softmax_tile, store_lse
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_products import add_weighted_rows, score_tile
from lowtri.kernels.tiles import ALL_TILES, tile_count, tile_of_queries, tile_spans, visible_tiles
from lowtri.kernels.values import Packed, Packing, Softmax, Sums, Tokens


def forward(call):
    """The kernel: takes tasks until none is left, the last rows first: under a causal mask they have the most keys.

    The thread's tile configuration is restored when its tasks are done. Kernels raise no exceptions, so there is no other way out.
    """
    own, plan_rows = scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread)), call.plan.rows
    configure_tiles(own.tile_configuration, call.spec)
    clear_slots(own)
    for task in tasks(call):
        head, row = task // plan_rows, plan_rows - 1 - task % plan_rows
        forward_tile(call, own, tile_of_queries(call, head // call.heads, head % call.heads, row))
    restore_tiles(own.tile_configuration, call.spec)


@device_function
def forward_tile(call, own, queries):
    """One tile of queries: its output and log-sum-exp, written to the arrays."""
    spec, non_finite = call.spec, False
    while True:
        attend_tile(call, own, queries, non_finite)
        if non_finite or rows.sums_finite(Sums(own.output, queries.count, call.value_dim), spec):
            break
        # Some value is NaN or inf. It must not reach queries that do not see it: compute the tile again, with the non-finite path.
        non_finite = True
    store_lse(call, own, queries)
    if call.dropout.key_words:  # where all weights are dropped, the sums become 0, and so do the outputs
        rows.multiply_by(own.total, QUERIES, as_number(call.dropout.share, spec), spec)
    store_output(call, own, queries)


@device_function
def attend_tile(call, own, queries, non_finite):
    """One tile of queries: outputs before the division, shifts and totals, in the thread's scratch memory."""
    spec = call.spec
    begin_tile(call, own, queries)
    if spec.uses_amx:
        amx_forward.attend_tile(call, own, queries, non_finite)
    else:
        softmax = Softmax(own.shift, own.total, Sums(own.output, queries.count, call.value_dim))
        rows.zero_sums(softmax.output, spec)
        seen, fetched = tile_count(call, queries), 0
        for keys in visible_tiles(call, queries, 0, ALL_TILES):
            # Tasks go from the last row to the first, so what the next one sees first lies before this one's first tile.
            ahead = KEYS if fetched else -KEYS
            prefetch_queries_and_output(call, queries, fetched)
            fetched += 16
            spans = tile_spans(keys, queries.count, spec)
            k = key_operand(call, own, keys, seen)  # (keys, D)
            score_tile(k, own.queries, own.scores, call.head_dim, ahead, spans, spec)  # (keys, 64)
            weigh_tile(call, own, queries, keys, spans, softmax)
            if non_finite:
                v = finite_values(call, own, keys)
            else:
                v = value_operand(call, own, keys, seen)  # (keys, Dv)
            weights = summed_rows_operand(rows.packed_rows(own.scores, keys.count, QUERIES), own.weights, spec)
            add_weighted_rows(v, weights, softmax.output, keys, ahead, spans, spec)  # (64, Dv)


@device_function
def begin_tile(call, own, queries):
    """The queries in lanes, and the state before the first key: a sink is a key without a value, which is visible before all others."""
    spec = call.spec
    q = rows.rows_of(call.q, call.q_strides, queries, call.head_dim, spec)
    transposed_queries(q, own.rows, own.queries, spec)  # (D, 64)
    if spec.packs_bf16:
        rows.fill(own.zeros, rows.round_up(call.value_dim, 32), 0.0, spec)
    shift, total = as_number(-np.inf, spec), as_number(0.0, spec)
    if call.sinks:
        shift = read(call.sinks + spec.number_bytes * queries.head, spec) * as_number(LOG2E, spec)
        total = as_number(1.0, spec) if shift > -np.inf else as_number(0.0, spec)
    if call.dropout.key_words:
        dropout.write_query_words(call, own, queries)
    rows.fill(own.shift, QUERIES, shift, spec)
    rows.fill(own.total, QUERIES, total, spec)


@device_function
def prefetch_queries_and_output(call, queries, first):
    """Prefetch 16 rows of the next task's queries, from ``first`` on, and those of this task's output."""
    spec, last = call.spec, min(first + 16, queries.count)
    before = Tokens(queries.batch, queries.head, max(queries.first - QUERIES, 0), QUERIES)
    rows.prefetch_rows(rows.rows_of(call.q, call.q_strides, before, call.head_dim, spec), first, last, spec)
    rows.prefetch_rows(rows.rows_of(call.o, call.o_strides, queries, call.value_dim, spec), first, last, spec)


@device_function
def weigh_tile(call, own, queries, keys, spans, softmax):
    """Scores become weights, those that are dropped 0."""
    spec, scale = call.spec, as_number(call.options.scale, call.spec) * as_number(LOG2E, call.spec)
    if scale <= 0:  # softmax takes the maximum before it multiplies
        rows.multiply_by(own.scores, QUERIES * keys.count, scale, spec)
        scale = as_number(1.0, spec)
    scale = finish_scores(call, Packed(own.scores, spec.row_bytes), scale, queries, keys, 0)
    if keys.mask_words:
        apply_mask(own.scores, keys, 0, spans, spec)
    softmax_tile(own.scores, scale, spans, softmax, spec)
    if call.dropout.key_words:
        dropout.draw_tile(call, own, keys, 0, queries.count)
        dropout.drop_weights(own, keys)


@device_function
def finite_values(call, own, keys):
    """The values as an operand with 0 in place of rows that are not finite, whose sums are added pair by pair."""
    spec = call.spec
    v = rows.rows_of(call.v, call.v_strides, keys, call.value_dim, spec)
    rows.add_non_finite_keys(v, own.scores, keys, 0, Sums(own.output, QUERIES, call.value_dim), own.values, spec)
    copy = rows.Rows(own.values, rows.padded(spec, call.value_dim), 1, keys.count, call.value_dim)
    return finite_rows_operand(copy, Packing(own.kept_values, own.rows, own.zeros), spec)


@device_function
def store_output(call, own, queries):
    """The output of a tile of queries, divided by the totals of its weights, written to the array."""
    spec, size = call.spec, call.value_dim
    o = rows.rows_of(call.o, call.o_strides, queries, size, spec)
    if not spec.uses_amx:
        columns = rows.padded(spec, size)
        for i in range(o.count):
            row, total = own.output + spec.number_bytes * columns * i, read(own.total + spec.number_bytes * i, spec)
            factor = as_number(1.0, spec) / total
            if not total > 0:  # 0 if no key was seen, NaN if the sum is NaN
                rows.fill(row, columns, total, spec)
                factor = as_number(1.0, spec)
            rows.round_row(row, size, factor, o.at + spec.input_bytes * i * o.row, spec)
    else:
        amx_forward.store_output(own, o)
