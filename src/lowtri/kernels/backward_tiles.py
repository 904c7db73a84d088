"""The gradients of attention in bf16 on tile registers: :mod:`lowtri.kernels.backward` with its products on tiles.

    scores  = K Q^T, dP^T = V dO^T        keys and values as they lie in the array; Q and dO as pairs along the head
    dV     += weights dO, dK += dS Q      weights and dS rounded in place; Q and dO as pairs of queries
    dQ^T   += K^T dS                      K transposed once for each key/value head; dS as pairs of keys

The transposed keys are one copy of K, shared by all threads. dK and dV have whole tiles of 16 rows.
"""

from __future__ import annotations

from lowtri.kernels.device_function import device_function
from lowtri.kernels.ds import (
    add_d_bias,
    apply_softcap_derivative,
    first_row,
    load_lse_and_delta,
    scale_rows,
    softcap_derivative,
    zero_rows,
)
from lowtri.kernels.non_finite import add_non_finite_keys, add_non_finite_queries, input_rows_finite
from lowtri.kernels.plan_walk import ALL_QUERIES, visible_tiles
from lowtri.kernels.record import take
from lowtri.kernels.rows import fill, multiply_by, transpose_in, transpose_out, widen_rows
from lowtri.kernels.scores import LOG2E, add_bias, apply_softcap
from lowtri.kernels.scratch import KEYS
from lowtri.kernels.shared_pack import tile_places, transposed_tile
from lowtri.kernels.simd import as_number, load, store
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_ds import copy_query_rows, pairs_of_rows, round_tile, weights_and_ds_pairs, wide_weights_and_ds
from lowtri.kernels.tile_halves import block_spans, extended, gradient_halves, pv_halves, score_halves
from lowtri.kernels.tile_operands import rows_for_a, whole, whole_16, zero_non_finite
from lowtri.kernels.tiles import configure_tiles, restore_tiles

__all__ = ["backward_tiles"]


@device_function
def load_queries(call, memory, b, h, r, n, spec):
    """The operands of one tile of queries: Q and dO, each as pairs along the head and as pairs of queries. Whether all are finite."""
    d, dv, offsets, q_step, do_step = call.d, call.dv, call.offsets, call.q_strides, call.d_output_strides
    lse, zeros = call.lse + 4 * ((b * call.heads + h) * call.nq + r * QUERIES), memory + offsets.zeros
    fill(zeros, max(whole(d), whole(dv)), 0.0, spec)
    q = call.q + 2 * (b * q_step.b + h * q_step.h + r * QUERIES * q_step.n)
    do = call.d_output + 2 * (b * do_step.b + h * do_step.h + r * QUERIES * do_step.n)
    q_rows, do_rows = memory + offsets.q_rows, memory + offsets.d_output_rows
    finite = True
    for array in range(2):
        source, row_step, step, size, rows = q, q_step.n, q_step.d, d, q_rows
        lanes, pairs = memory + offsets.queries, memory + offsets.q_pairs
        if array:
            source, row_step, step, size, rows = do, do_step.n, do_step.d, dv, do_rows
            lanes, pairs = memory + offsets.d_output, memory + offsets.d_output_pairs
        finite = copy_query_rows(source, row_step, step, n, size, lse, rows, spec) and finite
        transpose_in(rows, whole(size) // 2, 1, QUERIES, whole(size) // 2, QUERIES, lanes, spec)
        pairs_of_rows(rows, size, zeros, pairs, spec)
    return finite


@device_function
def add_non_finite(weights, mask_bits, keys, rows, n, size, target, memory, offsets, pairs, spec):
    """Target += weights rows for the rows that are not finite, pair by pair; ``pairs`` becomes the operand of the others."""
    wide, finite_rows = memory + offsets.wide_rows, memory + offsets.finite_rows
    widen_rows(rows, whole(size), 1, QUERIES, whole(size), wide, spec)
    add_non_finite_queries(weights, mask_bits, keys, wide, n, whole(size), target, whole(size), spec)
    for offset in range(0, 2 * QUERIES * whole(size), 64):
        store(finite_rows + offset, load(rows + offset, spec))
    zero_non_finite(finite_rows, n, size, spec)
    pairs_of_rows(finite_rows, size, memory + offsets.zeros, pairs, spec)


@device_function
def backward_tile(call, memory, part, b, h, r, dk, dv_sums, spec):
    """One tile of queries: its dQ, and what it adds to d bias and to the head's dK and dV, which begin at these addresses."""
    d, dv, nk, kv, offsets = call.d, call.dv, call.nk, h // call.group, call.offsets
    k_step, v_step = call.k_strides, call.v_strides
    queries, d_output, dq = memory + offsets.queries, memory + offsets.d_output, memory + offsets.dq
    scores, ds, d_softcap = memory + offsets.scores, memory + offsets.ds, memory + offsets.d_softcap
    shift, delta, ds_pairs = memory + offsets.shift, memory + offsets.delta, memory + offsets.ds_pairs
    n = min(QUERIES, call.nq - r * QUERIES)
    scale, softcap = as_number(call.options.scale, spec), as_number(call.options.softcap, spec)
    steps = whole(n) // 32
    finite = load_queries(call, memory, b, h, r, n, spec)
    load_lse_and_delta(call, b, h, r, n, shift, 0, delta, spec)
    fill(dq, QUERIES * whole_16(d), 0.0, spec)
    head = b * (call.heads // call.group) + kv
    head_k, head_v = call.k + 2 * (b * k_step.b + kv * k_step.h), call.v + 2 * (b * v_step.b + kv * v_step.h)
    places = tile_places(call, memory, head, whole_16(d))
    for visible_key, visible_keys, visible_bits in visible_tiles(call.plan, b, h, r, KEYS, nk):
        key0, keys, mask_bits = extended(visible_key, visible_keys, visible_bits, nk)
        spans = block_spans(mask_bits, keys, n)
        k_tile, v_tile = head_k + 2 * key0 * k_step.n, head_v + 2 * key0 * v_step.n
        for array in range(2):  # scores, then dP
            source, row_step, step, size, copy = k_tile, k_step.n, k_step.d, d, memory + offsets.keys
            b_operand, target = queries, scores
            if array:
                source, row_step, step, size, copy = v_tile, v_step.n, v_step.d, dv, memory + offsets.values
                b_operand, target = d_output, ds
            a, a_row = rows_for_a(source, row_step, step, keys, size, copy, spec)
            score_halves(a, a_row, b_operand, target, keys, whole(size) // 32, spans, spec)
        unit = scale * as_number(LOG2E, spec)
        if softcap > 0 or call.bias:  # these passes need scaled scores
            multiply_by(scores, QUERIES * keys, unit, spec)
            unit = as_number(1.0, spec)
        if softcap > 0:
            apply_softcap(scores, QUERIES * keys, softcap, spec)
            softcap_derivative(scores, d_softcap, keys, softcap, spec)
        if call.bias:
            bias_step = call.bias_strides
            index = b * bias_step.b + h * bias_step.h + r * QUERIES * bias_step.q + key0 * bias_step.k
            add_bias(scores, spec.row_bytes, call.bias + 4 * index, bias_step.q, bias_step.k, n, keys, spec)
        tile_dk, tile_dv = dk + 4 * key0 * whole(d), dv_sums + 4 * key0 * whole(dv)
        q_pairs, do_pairs = memory + offsets.q_pairs, memory + offsets.d_output_pairs
        # A row of Q, dO or K is not finite, and some pairs are hidden: it is added pair by pair where it is visible.
        non_finite = mask_bits != 0 and not (finite and input_rows_finite(k_tile, k_step.n, k_step.d, keys, d, spec))
        if non_finite or softcap > 0 or call.d_bias:
            wide_weights_and_ds(scores, ds, unit, mask_bits, keys, shift, delta, spec)
            if call.d_bias:
                db_step = call.d_bias_strides
                index = part * db_step.part + b * db_step.b + h * db_step.h + r * QUERIES * db_step.q + key0 * db_step.k
                add_d_bias(ds, call.d_bias + 4 * index, db_step.q, db_step.k, n, keys, spec)
            if softcap > 0:
                apply_softcap_derivative(ds, d_softcap, mask_bits, keys, spec)
            if non_finite:
                q_rows, do_rows = memory + offsets.q_rows, memory + offsets.d_output_rows
                q_pairs, do_pairs = memory + offsets.finite_q_pairs, memory + offsets.finite_d_output_pairs
                add_non_finite(scores, mask_bits, keys, do_rows, n, dv, tile_dv, memory, offsets, do_pairs, spec)
                add_non_finite(ds, mask_bits, keys, q_rows, n, d, tile_dk, memory, offsets, q_pairs, spec)
                wide_rows = memory + offsets.wide_rows
                add_non_finite_keys(
                    k_tile, k_step.n, k_step.d, ds, mask_bits, ALL_QUERIES, keys, dq, d, wide_rows, spec
                )
            round_tile(scores, ds, keys, ds_pairs, spec)
        else:
            weights_and_ds_pairs(scores, ds, unit, mask_bits, keys, shift, delta, ds_pairs, spec)
        gradient_halves(scores, do_pairs, tile_dv, steps, whole(dv), spans, spec)
        gradient_halves(ds, q_pairs, tile_dk, steps, whole(d), spans, spec)
        k_transposed = transposed_tile(head_k, k_step, d, nk, key0, keys, places, non_finite, spec)
        pv_halves(k_transposed, ds_pairs, dq, whole_16(d), spans, spec)
    multiply_by(dq, QUERIES * d, scale, spec)
    step = call.dq_strides
    transpose_out(dq, n, d, call.dq + 4 * (b * step.b + h * step.h + r * QUERIES * step.n), step.n, spec)


def backward_tiles(call):
    """The kernel: takes tasks until none is left. Sums, and the gradients that it writes, are float32."""
    memory = call.scratch + call.thread_bytes * take(call.next_thread)
    configuration, kv_heads = memory + call.offsets.tile_configuration, call.heads // call.group
    configure_tiles(configuration, call.spec)
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            break
        part, head = task % call.parts, task // call.parts
        b, kv = head // kv_heads, head % kv_heads
        dk = call.dk + first_row(call.dk_layout, part, b, kv, call.spec)
        dv_sums = call.dv_sums + first_row(call.dv_layout, part, b, kv, call.spec)
        zero_rows(dk, call.dk_layout, call.spec)
        zero_rows(dv_sums, call.dv_layout, call.spec)
        for h in range(kv * call.group, (kv + 1) * call.group):
            for r in range(part, call.plan.rows, call.parts):
                backward_tile(call, memory, part, b, h, r, dk, dv_sums, call.spec)
        scale_rows(dk, call.dk_layout, as_number(call.options.scale, call.spec), call.spec)
    restore_tiles(configuration, call.spec)
