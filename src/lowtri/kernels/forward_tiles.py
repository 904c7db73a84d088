"""Attention in bf16 on tile registers, tile by tile of the plan: :mod:`lowtri.kernels.forward` with its products on tiles.

    scores of the tile               tile_product, keys as they lie in the array
    softcap, bias                    passes over the tile, if the call has them
    hidden pairs to -inf             apply_mask, if the run is PARTIAL
    weights, as pairs of keys        softmax_pairs
    output += weights x values       tile_product_add, values transposed once for each key/value head

The transposed values are one copy of V, shared by all threads (:mod:`lowtri.kernels.shared_pack`); parts that no query sees are
neither read nor written. The key tiles of PARTIAL runs are extended to whole blocks of 32 keys, and each half of the 64 queries is
computed for the blocks that it sees.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.forward import store_lse, store_tile
from lowtri.kernels.non_finite import add_non_finite_keys, all_finite
from lowtri.kernels.plan_walk import visible_tiles
from lowtri.kernels.record import take
from lowtri.kernels.rows import fill, multiply_by
from lowtri.kernels.scores import LOG2E, add_bias, apply_mask_half, apply_softcap
from lowtri.kernels.scratch import KEYS
from lowtri.kernels.shared_pack import tile_places, transposed_tile
from lowtri.kernels.simd import as_number, load, read
from lowtri.kernels.spec import HALF, HALF_ROW, QUERIES
from lowtri.kernels.tile_halves import HIGH_HALF, LOW_HALF, extended, half_span, pv_half, score_half
from lowtri.kernels.tile_operands import queries_in_pairs, rows_for_a, store_rounded_block, whole, whole_16
from lowtri.kernels.tile_softmax import softmax_vector, unpack_pairs
from lowtri.kernels.tiles import configure_tiles, restore_tiles

__all__ = ["forward_tiles"]


@device_function
def attend_tile(call, memory, b, h, r, non_finite, spec):
    """One tile of queries of one head: output (Dv, 64) before the division, shift m and sum l, in the thread's scratch memory."""
    d, dv, nk, kv = call.d, call.dv, call.nk, h // call.group
    offsets, bias_step, q_step, k_step, v_step = (
        call.offsets,
        call.bias_strides,
        call.q_strides,
        call.k_strides,
        call.v_strides,
    )
    queries, scores, output = memory + offsets.queries, memory + offsets.scores, memory + offsets.output
    m, l, pairs = memory + offsets.shift, memory + offsets.total, memory + offsets.pairs
    n, columns = min(QUERIES, call.nq - r * QUERIES), whole_16(dv)
    scale = as_number(call.options.scale, spec) * as_number(LOG2E, spec)
    softcap = as_number(call.options.softcap, spec)
    q = call.q + 2 * (b * q_step.b + h * q_step.h + r * QUERIES * q_step.n)
    queries_in_pairs(q, q_step.n, q_step.d, n, d, memory + offsets.rows, queries, spec)
    # A sink is a key without a value, which is visible before all others.
    start_m, start_l = as_number(-np.inf, spec), as_number(0.0, spec)
    if call.sinks:
        start_m = read(call.sinks + 4 * h, spec) * as_number(LOG2E, spec)
        start_l = as_number(1.0, spec) if start_m > -np.inf else as_number(0.0, spec)
    fill(m, QUERIES, start_m, spec)
    fill(l, QUERIES, start_l, spec)
    fill(output, QUERIES * columns, 0.0, spec)
    fill(memory + offsets.zeros, columns, 0.0, spec)
    head, v = b * (call.heads // call.group) + kv, call.v + 2 * (b * v_step.b + kv * v_step.h)
    places = tile_places(call, memory, head, columns)
    # Long rows read K and V for one half of the queries after the other, so that the halves' memory stays in the first cache; where
    # heads are large, both halves share what they read.
    halves = (n + HALF - 1) // HALF
    together = halves if d + dv > 192 else 1
    weights_half = values = start = stop = 0  # of the unit before, whose product with the values is left
    for first_half in range(0, halves, together):
        for visible_key, visible_keys, visible_bits in visible_tiles(call.plan, b, h, r, KEYS, nk):
            key0, keys, mask_bits = extended(visible_key, visible_keys, visible_bits, nk)
            k = call.k + 2 * (b * k_step.b + kv * k_step.h + key0 * k_step.n)
            for half in range(first_half, first_half + together):
                first, last = half_span(mask_bits, keys, half)
                if first < last:
                    k_rows, k_row = rows_for_a(k, k_step.n, k_step.d, keys, d, memory + offsets.keys, spec)
                    half_queries = queries + half * HALF_ROW * (whole(d) // 2)
                    score_half(k_rows, k_row, half_queries, scores, whole(d) // 32, first, last, spec)
                    pv_half(values, pairs, output + HALF_ROW * weights_half, columns, start, stop, spec)
                    unit = scale
                    if softcap > 0 or call.bias or scale <= 0:  # these passes need scaled scores
                        multiply_by(scores, HALF * keys, scale, spec)
                        unit = as_number(1.0, spec)
                    if softcap > 0:
                        apply_softcap(scores, HALF * keys, softcap, spec)
                    if call.bias:
                        query = r * QUERIES + HALF * half
                        index = b * bias_step.b + h * bias_step.h + query * bias_step.q + key0 * bias_step.k
                        count = min(HALF, n - HALF * half)
                        add_bias(scores, HALF_ROW, call.bias + 4 * index, bias_step.q, bias_step.k, count, keys, spec)
                    if mask_bits:
                        apply_mask_half(scores, mask_bits, half, first, last, spec)
                    for lane in range(0, HALF_ROW, 64):
                        of_half = HALF_ROW * half + lane
                        softmax_vector(
                            lane, scores, unit, first, last, m + of_half, l + of_half, output + of_half, dv, pairs, spec
                        )
                    values = transposed_tile(v, v_step, dv, nk, key0, keys, places, non_finite, spec)
                    weights_half, start, stop = half, first, last
                    if non_finite:
                        pv_half(values, pairs, output + HALF_ROW * half, columns, start, stop, spec)
                        start = stop = 0
                        tile_v, weights = v + 2 * key0 * v_step.n, memory + offsets.weights
                        finite_rows = memory + offsets.finite_values
                        unpack_pairs(pairs, half, keys, weights, spec)
                        lanes = HIGH_HALF if half else LOW_HALF
                        add_non_finite_keys(
                            tile_v, v_step.n, v_step.d, weights, mask_bits, lanes, keys, output, dv, finite_rows, spec
                        )
    pv_half(values, pairs, output + HALF_ROW * weights_half, columns, start, stop, spec)
    return n


@device_function
def forward_tile(call, memory, b, h, r, spec):
    """One tile of queries: its output and log-sum-exp, written to the arrays."""
    dv, output = call.dv, memory + call.offsets.output
    non_finite = False
    while True:
        n = attend_tile(call, memory, b, h, r, non_finite, spec)
        if non_finite or all_finite(output, QUERIES * dv, spec):
            break
        # Some value is NaN or inf. It must not reach queries that do not see it: compute the tile again, with the non-finite path.
        non_finite = True
    o_step = call.o_strides
    if n == QUERIES and dv % 32 == 0:
        o = call.o + 2 * (b * o_step.b + h * o_step.h + r * QUERIES * o_step.n)
        for lane in range(0, QUERIES, 16):
            total = load(memory + call.offsets.total + 4 * lane, spec)
            for d in range(0, dv, 32):
                block, target = output + spec.row_bytes * d + 4 * lane, o + 2 * (lane * o_step.n + d)
                store_rounded_block(block, spec.row_bytes, total, target, 2 * o_step.n, spec)
        store_lse(call, memory, b, h, r, n, spec)
    else:
        store_tile(call, memory, b, h, r, n, spec)


def forward_tiles(call):
    """The kernel: takes tasks until none is left, the last rows first: under a causal mask they have the most keys.

    The thread's tile configuration is restored when its tasks are done. Kernels raise no exceptions, so there is no other way out.
    """
    memory = call.scratch + call.thread_bytes * take(call.next_thread)
    configuration, rows = memory + call.offsets.tile_configuration, call.plan.rows
    configure_tiles(configuration, call.spec)
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            break
        head, r = task // rows, rows - 1 - task % rows
        forward_tile(call, memory, head // call.heads, head % call.heads, r, call.spec)
    restore_tiles(configuration, call.spec)
