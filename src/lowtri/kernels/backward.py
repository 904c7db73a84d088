"""The gradients of attention, tile by tile of the same plan.

A task is one key/value head (or, where there are more threads than heads, every n-th row of its queries). It has its own sums of dK
and dV, so the result does not depend on the order in which threads finish. There are five products per tile, all with queries in
lanes; ``weights`` and ``ds`` (dS^T) are the left operands of the next products without being transposed:

    scores  = K Q^T                      weights = 2 ** (scores - lse)
    dP^T    = V dO^T                     dS      = weights * (dP - delta),   delta = sum of dO * O
    dV     += weights dO                 dK     += dS Q                      dQ += dS^T K

dP and delta are rounded separately, so their difference has an error of a few roundings of |dO| |V|. Where one key has all the weight,
the plain formula computes both from the same numbers and gives exactly 0; this kernel gives a result of the size of that error.

Source: FlashAttention (Dao et al. 2022), appendix B.4; delta as in FlashAttention-2 (2023).
"""

from __future__ import annotations

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.ds import (
    add_d_bias,
    apply_softcap_derivative,
    ds_operands,
    first_row,
    load_lse_and_delta,
    pack_query_rows,
    scale_rows,
    softcap_derivative,
    weights_and_ds,
    weights_and_ds_operands,
    zero_rows,
)
from lowtri.kernels.operands import (
    finite_rows_operand,
    head_operand,
    key_operand,
    row_operand,
    transposed_queries,
    transposed_tile,
)
from lowtri.kernels.plan_walk import visible_tiles
from lowtri.kernels.record import take
from lowtri.kernels.rows import (
    fill,
    multiply_by,
    padded,
    round_up,
    transpose_in,
    word_count,
)
from lowtri.kernels.scores import LOG2E, add_bias, apply_softcap
from lowtri.kernels.scratch import KEYS
from lowtri.kernels.simd import as_number
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_output import (
    add_non_finite_keys,
    add_non_finite_queries,
    fill_output,
    input_rows_finite,
    store_scaled,
    zero_non_finite_rows,
)
from lowtri.kernels.tile_products import add_to_rows, product_keys, pv_rows, score_tile, tile_spans
from lowtri.kernels.tiles import configure_tiles, restore_tiles

__all__ = ["backward"]


@by_spec
def transposed_rows(spec):
    """n query rows as an operand with queries in lanes: from the array if it is read in pairs, else from ``packed``, their copy."""

    def from_copy(source, row_step, step, n, size, packed, row, scratch, target, spec):
        transpose_in(packed, row, 1, n, size, round_up(n, 16), target, spec)

    def from_array(source, row_step, step, n, size, packed, row, scratch, target, spec):
        transposed_queries(source, row_step, step, n, size, scratch, target, spec)

    return from_array if spec.per_word > 1 else from_copy


@by_spec
def keys_for_dq(spec):
    """K as an operand with words along the keys; widened rows are still in scratch memory, ``rows``, from the scores.

    ``head`` is the number of the key/value head; ``keys_of_head`` the address of its first key.
    """

    def as_they_are(call, keys_of_head, head, key0, keys, zeros, rows, packed, spec):
        step = call.k_strides
        source = keys_of_head + spec.input_bytes * key0 * step.n
        return key_operand(source, step.n, step.d, keys, call.d, zeros, rows, spec)

    def widened(call, keys_of_head, head, key0, keys, zeros, rows, packed, spec):
        return rows, padded(spec, call.d)

    def transposed(call, keys_of_head, head, key0, keys, zeros, rows, packed, spec):
        return transposed_tile(call, keys_of_head, call.k_strides, call.d, head, key0, packed, rows, zeros, spec), 0

    return {"widened": widened, "tiles": transposed}.get(spec.operand, as_they_are)


@device_function
def backward_tile(call, memory, part, b, h, r, dk, grad_v, spec):
    """One tile of queries: its dQ, and what it adds to d bias and to the head's dK and dV, which begin at these addresses."""
    d, dv, nk, kv = call.d, call.dv, call.nk, h // call.group
    input_bytes, number_bytes = spec.input_bytes, spec.number_bytes
    d_row, dv_row = call.dk_layout.size, call.dv_layout.size
    offsets, q_step, k_step = call.offsets, call.q_strides, call.k_strides
    v_step, do_step = call.v_strides, call.d_output_strides
    queries, d_output, dq = memory + offsets.queries, memory + offsets.d_output, memory + offsets.dq
    scores, ds, d_softcap = memory + offsets.scores, memory + offsets.ds, memory + offsets.d_softcap
    shift, shift_low, delta = memory + offsets.shift, memory + offsets.shift_low, memory + offsets.delta
    zeros = memory + offsets.zeros
    q_rows, do_rows = memory + offsets.q_rows, memory + offsets.d_output_rows
    k_rows, v_rows, k_packed = memory + offsets.keys, memory + offsets.values, memory + offsets.packed_keys
    finite_q, finite_do = memory + offsets.finite_q, memory + offsets.finite_d_output
    n = min(QUERIES, call.nq - r * QUERIES)
    scale, softcap = as_number(call.options.scale, spec), as_number(call.options.softcap, spec)
    query0 = (b * call.heads + h) * call.nq + r * QUERIES
    lse = call.lse + number_bytes * query0
    q = call.q + input_bytes * (b * q_step.b + h * q_step.h + r * QUERIES * q_step.n)
    do = call.d_output + input_bytes * (b * do_step.b + h * do_step.h + r * QUERIES * do_step.n)
    finite = pack_query_rows(q, q_step.n, q_step.d, n, d, lse, q_rows, d_row, spec)
    finite = pack_query_rows(do, do_step.n, do_step.d, n, dv, lse, do_rows, dv_row, spec) and finite
    transposed_rows(q, q_step.n, q_step.d, n, d, q_rows, d_row, finite_q, queries, spec)
    transposed_rows(do, do_step.n, do_step.d, n, dv, do_rows, dv_row, finite_do, d_output, spec)
    q_words = row_operand(q_rows, n, d_row, memory + offsets.q_pairs, spec)
    do_words = row_operand(do_rows, n, dv_row, memory + offsets.d_output_pairs, spec)
    seeing = load_lse_and_delta(call, b, h, r, n, shift, shift_low, delta, spec)
    if spec.per_word > 1:
        fill(zeros, round_up(d, 32), 0.0, spec)
    fill_output(dq, n, d, 0.0, spec)
    head, head_k = b * (call.heads // call.group) + kv, call.k + input_bytes * (b * k_step.b + kv * k_step.h)
    for visible_key, visible_count, visible_bits in visible_tiles(call.plan, b, h, r, KEYS, nk):
        key0, keys, mask_bits = product_keys(visible_key, visible_count, visible_bits, nk, spec)
        k_tile = head_k + input_bytes * key0 * k_step.n
        v_tile = call.v + input_bytes * (b * v_step.b + kv * v_step.h + key0 * v_step.n)
        k, k_n, k_d = head_operand(k_tile, k_step.n, k_step.d, keys, d, k_rows, spec)
        spans, groups = tile_spans(mask_bits, keys, n, spec)
        score_tile(k, k_n, k_d, queries, scores, spec.row_bytes, word_count(d, spec), KEYS, spans, groups, spec)
        v, v_n, v_d = head_operand(v_tile, v_step.n, v_step.d, keys, dv, v_rows, spec)
        score_tile(v, v_n, v_d, d_output, ds, spec.row_bytes, word_count(dv, spec), KEYS, spans, groups, spec)
        scale_log2 = scale * as_number(LOG2E, spec)
        if softcap > 0 or call.bias:  # these passes need scaled scores
            multiply_by(scores, QUERIES * keys, scale_log2, spec)
            scale_log2 = as_number(1.0, spec)
        if softcap > 0:
            apply_softcap(scores, QUERIES * keys, softcap, spec)
            softcap_derivative(scores, d_softcap, keys, softcap, spec)
        if call.bias:
            step = call.bias_strides
            index = b * step.b + h * step.h + r * QUERIES * step.q + key0 * step.k
            add_bias(scores, spec.row_bytes, call.bias + number_bytes * index, step.q, step.k, n, keys, spec)
        # A row of Q, dO or K is not finite, and some pairs are hidden: it is added pair by pair where it is visible.
        non_finite = mask_bits != 0 and not (finite and input_rows_finite(k_tile, k_step.n, k_step.d, keys, d, spec))
        tile_dk = dk + number_bytes * key0 * call.dk_layout.n
        tile_dv = grad_v + number_bytes * key0 * call.dv_layout.n
        q_operand, do_operand, ds_operand = q_words, do_words, d_softcap
        if (
            non_finite
            or softcap > 0
            or call.d_bias
            or not weights_and_ds_operands(
                scores, ds, scale_log2, mask_bits, seeing, keys, shift, shift_low, delta, d_softcap, spec
            )
        ):
            weights_and_ds(scores, ds, scale_log2, mask_bits, seeing, keys, shift, shift_low, delta, spec)
            if call.d_bias:
                step = call.d_bias_strides
                index = part * step.part + b * step.b + h * step.h + r * QUERIES * step.q + key0 * step.k
                add_d_bias(ds, call.d_bias + number_bytes * index, step.q, step.k, n, keys, spec)
            if softcap > 0:
                apply_softcap_derivative(ds, d_softcap, mask_bits, keys, spec)
            if non_finite:
                add_non_finite_queries(scores, mask_bits, keys, do_rows, n, dv_row, tile_dv, call.dv_layout.n, spec)
                add_non_finite_queries(ds, mask_bits, keys, q_rows, n, d_row, tile_dk, call.dk_layout.n, spec)
                zero_non_finite_rows(q_rows, n, d_row, finite_q, spec)
                zero_non_finite_rows(do_rows, n, dv_row, finite_do, spec)
                q_operand = row_operand(finite_q, n, d_row, finite_q, spec)
                do_operand = row_operand(finite_do, n, dv_row, finite_do, spec)
                add_non_finite_keys(k_tile, k_step.n, k_step.d, ds, mask_bits, 0, QUERIES, keys, dq, d, k_rows, spec)
            ds_operand = ds_operands(scores, ds, keys, d_softcap, spec)
        if non_finite:
            k, k_row = finite_rows_operand(k_rows, keys, d, v_rows, zeros, k_packed, spec)
        else:
            k, k_row = keys_for_dq(call, head_k, head, key0, keys, zeros, k_rows, k_packed, spec)
        add_to_rows(scores, do_operand, tile_dv, call.dv_layout, keys, spans, groups, n, spec)
        add_to_rows(ds, q_operand, tile_dk, call.dk_layout, keys, spans, groups, n, spec)
        cut_bits = mask_bits if groups > 1 else 0
        pv_rows(k, k_row, ds_operand, dq, d, keys, 0, cut_bits, spans, n, spec)
    step = call.dq_strides
    target = call.dq + number_bytes * (b * step.b + h * step.h + r * QUERIES * step.n)
    store_scaled(dq, n, d, scale, target, step.n, spec)


def backward(call):
    """The kernel: takes tasks until none is left. Sums, and the gradients that it writes, have the compute dtype."""
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
        grad_v = call.grad_v + first_row(call.dv_layout, part, b, kv, call.spec)
        zero_rows(dk, call.dk_layout, call.spec)
        zero_rows(grad_v, call.dv_layout, call.spec)
        for h in range(kv * call.group, (kv + 1) * call.group):
            r = part
            while r < call.plan.rows:  # a range of a step that could be 0 would raise
                backward_tile(call, memory, part, b, h, r, dk, grad_v, call.spec)
                r += call.parts
        scale_rows(dk, call.dk_layout, as_number(call.options.scale, call.spec), call.spec)
    restore_tiles(configuration, call.spec)
