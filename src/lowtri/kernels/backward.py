"""The gradients of attention, tile by tile of the same plan.

A task is one key/value head (or, where there are more threads than heads, every n-th row of its queries). It has its own sums of dK
and dV, so the result does not depend on the order in which threads finish. There are five products per tile, all with queries in
lanes; ``weights`` and ``ds`` (dS^T, the gradient of the scores) are the left operands of the next products without being transposed:

    scores  = K Q^T                      weights = 2 ** (scores - lse)
    dP^T    = V dO^T                     dS      = weights * (dP - delta),   delta = sum of dO * O
    dV     += weights dO                 dK     += dS Q                      dQ += dS^T K

With dropout, dP and the weights of dV are 0 where a weight was dropped, and the others are divided by the share that is kept; delta is
that of the output, and so needs no change.

dP and delta are rounded separately, so their difference has an error of a few roundings of |dO| |V|. Where one key has all the weight,
the plain formula computes both from the same numbers and gives exactly 0; this kernel gives a result of the size of that error.

Source: FlashAttention (Dao et al. 2022), appendix B.4; delta as in FlashAttention-2 (2023).
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import dropout, rows, tiles
from lowtri.kernels.abi import KEYS
from lowtri.kernels.device import device_function, scratch_at, take, tasks
from lowtri.kernels.product import configure_tiles, restore_tiles
from lowtri.kernels.simd import (
    as_number,
    exp2,
    fma,
    interleave,
    load,
    load_input,
    mul,
    read,
    read_input,
    read_word,
    reduce_sum,
    select_bits,
    select_greater,
    splat,
    store,
    store_input,
    sub,
    write,
)
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tiles import LOG2E, add_bias, apply_softcap, times_log2e


@device_function
def query_rows(source, strides, n, size, lse, packed, row, pairs, copy, target, spec):
    """n rows of Q or dO as operands: ``target`` with queries in lanes, and ``packed`` with ``row`` numbers each, padded with 0.

    In ``packed`` a query that sees no key is a row of 0. ``pairs`` and ``copy`` are scratch. Returns the address of the latter operand,
    and whether all of its numbers are finite.
    """
    finite = True
    for i in range(n):
        packed_row = packed + spec.number_bytes * i * row
        if read(lse + spec.number_bytes * i, spec) == -np.inf:
            rows.fill(packed_row, row, 0.0, spec)
        else:
            rows.widen_rows(source + spec.input_bytes * i * strides.n, 0, strides.d, 1, size, packed_row, row, spec)
            finite = rows.all_finite(packed_row, row, spec) and finite
    if spec.in_pairs:
        rows.transposed_queries(source, strides.n, strides.d, n, size, copy, target, spec)
    else:
        rows.transpose_in(packed, row, 1, n, size, rows.round_up(n, 16), target, spec)
    return rows.row_operand(packed, n, row, pairs, spec), finite


@device_function
def row_product(one, two, step, size, spec):
    """The sum of products of two rows of arrays, in the compute dtype; the first is packed, the second has a step."""
    total, number, whole = splat(0.0, spec), spec.input_bytes, size - size % spec.lanes if step == 1 else 0
    for d in range(0, whole, spec.lanes):
        total = fma(load_input(one + number * d, spec), load_input(two + number * d, spec), total, spec)
    result = reduce_sum(total)
    for d in range(whole, size):
        result += read_input(one + number * d, spec) * read_input(two + number * d * step, spec)
    return result


@device_function
def load_lse_and_delta(call, own, b, h, r, n, spec):
    """The log-sum-exp of 64 queries in units of log 2, what it loses to rounding (0 if there is no lse_low), and their delta.

    A lane without a query and a query that sees no key get a shift of inf, hence weights 2 ** (0 - inf) = 0. Returns a word that has
    the bits of the other queries.
    """
    step, do_step, input_bytes = call.output_strides, call.d_output_strides, spec.input_bytes
    output = rows.input_row(call.output, step, b, h, r * QUERIES, spec)
    d_output = rows.input_row(call.d_output, do_step, b, h, r * QUERIES, spec)
    query0, seeing = (b * call.heads + h) * call.nq + r * QUERIES, np.uint64(0)
    for i in range(QUERIES):
        offset, number = spec.number_bytes * i, spec.number_bytes * (query0 + i)
        log2_sum, low, delta = as_number(np.inf, spec), as_number(0.0, spec), as_number(0.0, spec)
        if i < n and read(call.lse + number, spec) != -np.inf:
            seeing |= np.uint64(1) << np.uint64(i)
            log2_sum = times_log2e(read(call.lse + number, spec), spec)
            low = read(call.lse_low + number, spec) if call.lse_low else low
            row, d_row = output + input_bytes * i * step.n, d_output + input_bytes * i * do_step.n
            delta = row_product(row, d_row, do_step.d, call.dv, spec)
            if call.d_lse:
                delta -= read(call.d_lse + number, spec)
        write(own.shift + offset, log2_sum, spec)
        write(own.shift_low + offset, low, spec)
        write(own.delta + offset, delta, spec)
        if call.delta and i < n:
            write(call.delta + number, delta, spec)
    return seeing


# Passes over a tile, rows of 64 numbers with a lane for each query.


@device_function
def weight_and_ds(score, dp, scale_log2, word, lane, own, spec):
    """The weight, and dS = weight * (dP - delta), of a key and a vector of queries from ``lane`` on; both are 0 where it is hidden.

    Where none of 16 queries sees the key, its scores need not be computed.
    """
    zero, offset = splat(0.0, spec), spec.number_bytes * lane
    if (word >> np.uint64(lane & -16)) & tiles.FIRST_16 == 0:
        return zero, zero
    power = fma(load(score + offset, spec), scale_log2, sub(zero, load(own.shift + offset, spec)), spec)
    if not spec.on_tiles:  # weights that are rounded on the way to tiles do not need what the log-sum-exp loses
        power = sub(power, load(own.shift_low + offset, spec))
    # At most 1, also for scores so large that rounding would exceed it.
    weight = exp2(select_greater(power, zero, zero, power), spec)
    ds = mul(weight, sub(load(dp + offset, spec), load(own.delta + offset, spec)))
    if word != rows.ALL_QUERIES:
        return select_bits(word, np.uint64(lane), weight, zero), select_bits(word, np.uint64(lane), ds, zero)
    return weight, ds


@device_function
def weights_and_ds(own, scale_log2, mask_bits, seeing, keys, spec):
    """Scores become weights, and dP becomes dS; both are 0 at hidden pairs.

    ``scale_log2`` brings scores to units of log 2, those of the shift; ``seeing`` is a word of the queries that see any key.
    """
    factor = splat(scale_log2, spec)
    for j in range(keys):
        word = (read_word(mask_bits + 8 * j) if mask_bits else rows.ALL_QUERIES) & seeing
        for lane in range(0, QUERIES, spec.lanes):
            score, dp, offset = own.scores + spec.row_bytes * j, own.ds + spec.row_bytes * j, spec.number_bytes * lane
            weight, ds = weight_and_ds(score, dp, factor, word, lane, own, spec)
            store(score + offset, weight)
            store(dp + offset, ds)


@device_function
def weights_and_ds_in_pairs(own, scale_log2, mask_bits, seeing, keys, spec):
    """:func:`weights_and_ds` and :func:`ds_operand` in one pass."""
    factor, zero, row = splat(scale_log2, spec), splat(0.0, spec), spec.row_bytes
    for j in range(0, keys, 2):
        both = j + 1 < keys
        word = (read_word(mask_bits + 8 * j) if mask_bits else rows.ALL_QUERIES) & seeing
        next_word = (read_word(mask_bits + 8 * j + 8) if mask_bits and both else rows.ALL_QUERIES) & seeing
        for lane in range(0, QUERIES, 16):
            score, dp, odd = own.scores + row * j, own.ds + row * j, zero
            weight, even = weight_and_ds(score, dp, factor, word, lane, own, spec)
            # In place: the bf16 numbers of 16 queries end before the numbers that are still to be read.
            store_input(score + 2 * lane, weight, spec)
            store_input(dp + 2 * lane, even, spec)
            if both:
                score, dp = score + row, dp + row
                weight, odd = weight_and_ds(score, dp, factor, next_word, lane, own, spec)
                store_input(score + 2 * lane, weight, spec)
                store_input(dp + 2 * lane, odd, spec)
            store(own.d_softcap + row * (j // 2) + 4 * lane, interleave(even, odd, spec))


@device_function
def ds_operand(own, keys, spec):
    """Weights and dS (keys, 64) as operands of dV and dK, in place; returns dS as the operand of dQ.

    In pairs, bf16 numbers fill the first half of each row, and the pairs of dS are in the memory of the softcap's derivative.
    """
    if not spec.in_pairs:
        return own.ds
    rows.interleave_rows(own.ds, keys, QUERIES, own.d_softcap, spec)
    for row in range(0, spec.row_bytes * keys, spec.row_bytes):
        for lane in range(0, QUERIES, 16):
            store_input(own.scores + row + 2 * lane, load(own.scores + row + 4 * lane, spec), spec)
            store_input(own.ds + row + 2 * lane, load(own.ds + row + 4 * lane, spec), spec)
    return own.d_softcap


@device_function
def softcap_derivative(scores, d_softcap, keys, softcap, spec):
    """The derivative of the softcap at each capped score: 1 - (capped / c) ** 2."""
    one, per_c = splat(1.0, spec), splat(as_number(1.0, spec) / (softcap * as_number(LOG2E, spec)), spec)
    for offset in range(0, spec.row_bytes * keys, 64):
        tanh = mul(load(scores + offset, spec), per_c)
        store(d_softcap + offset, sub(one, mul(tanh, tanh)))


@device_function
def apply_softcap_derivative(ds, d_softcap, mask_bits, keys, spec):
    """Multiply dS by the derivative of the softcap; hidden pairs stay 0."""
    zero = splat(0.0, spec)
    for j in range(keys):
        word = read_word(mask_bits + 8 * j) if mask_bits else rows.ALL_QUERIES
        for lane in range(0, QUERIES, spec.lanes):
            offset = spec.row_bytes * j + spec.number_bytes * lane
            x = mul(load(ds + offset, spec), load(d_softcap + offset, spec))
            store(ds + offset, select_bits(word, np.uint64(lane), x, zero))


@device_function
def add_d_bias(ds, d_bias, strides, n, keys, spec):
    """Add dS to the gradient of the bias; along a broadcast axis its stride is 0, so that entries are summed."""
    for j in range(keys):
        for i in range(n):
            d_bias_ij = d_bias + spec.number_bytes * (i * strides.q + j * strides.k)
            write(d_bias_ij, read(d_bias_ij, spec) + read(ds + spec.row_bytes * j + spec.number_bytes * i, spec), spec)


@device_function
def backward_tile(call, own, part, b, h, r, dk, grad_v, spec):
    """One tile of queries: its dQ, and what it adds to d bias and to the head's dK and dV, which begin at these addresses."""
    d, dv, kv, number_bytes = call.d, call.dv, h // call.group, spec.number_bytes
    d_row, dv_row, k_step, v_step = call.dk_layout.size, call.dv_layout.size, call.k_strides, call.v_strides
    q_rows, do_rows, scores, ds = own.q_rows, own.d_output_rows, own.scores, own.ds
    n, q_step, do_step = min(QUERIES, call.nq - r * QUERIES), call.q_strides, call.d_output_strides
    scale, softcap = as_number(call.options.scale, spec), as_number(call.options.softcap, spec)
    lse = call.lse + number_bytes * ((b * call.heads + h) * call.nq + r * QUERIES)
    q = rows.input_row(call.q, q_step, b, h, r * QUERIES, spec)
    do = rows.input_row(call.d_output, do_step, b, h, r * QUERIES, spec)
    q_words, finite_q = query_rows(q, q_step, n, d, lse, q_rows, d_row, own.q_pairs, own.finite_q, own.queries, spec)
    pairs, copy = own.d_output_pairs, own.finite_d_output
    do_words, finite = query_rows(do, do_step, n, dv, lse, do_rows, dv_row, pairs, copy, own.d_output, spec)
    finite = finite and finite_q
    seeing = load_lse_and_delta(call, own, b, h, r, n, spec)
    drops = call.dropout.key_words != 0
    if drops:
        dropout.write_query_words(call, own, b, h, r, n)
    if spec.in_pairs:
        rows.fill(own.zeros, rows.round_up(d, 32), 0.0, spec)
    rows.zero_output(own.dq, n, d, spec)
    for key0, keys, mask_bits in tiles.visible_tiles(call.plan, b, h, r, call.nk, 0, tiles.ALL_TILES, spec):
        k_tile = rows.input_row(call.k, k_step, b, kv, key0, spec)
        v_tile = rows.input_row(call.v, v_step, b, kv, key0, spec)
        k, k_n, k_d = rows.head_operand(k_tile, k_step.n, k_step.d, keys, d, own.keys, spec)
        spans, groups = tiles.tile_spans(mask_bits, keys, n, spec)
        tiles.score_tile(k, k_n, k_d, own.queries, scores, spec.row_bytes, d, KEYS, spans, groups, spec)
        v, v_n, v_d = rows.head_operand(v_tile, v_step.n, v_step.d, keys, dv, own.values, spec)
        tiles.score_tile(v, v_n, v_d, own.d_output, ds, spec.row_bytes, dv, KEYS, spans, groups, spec)
        if drops:
            dropout.draw_tile(call, own, b, key0, keys, 0, n)
            dropout.drop_and_scale(ds, own.kept, call.dropout.scale, keys, spec)
        scale_log2 = scale * as_number(LOG2E, spec)
        if softcap > 0 or call.bias:  # these passes need scaled scores
            rows.multiply_by(scores, QUERIES * keys, scale_log2, spec)
            scale_log2 = as_number(1.0, spec)
        if softcap > 0:
            apply_softcap(scores, QUERIES * keys, softcap, spec)
            softcap_derivative(scores, own.d_softcap, keys, softcap, spec)
        if call.bias:
            step = call.bias_strides
            index = b * step.b + h * step.h + r * QUERIES * step.q + key0 * step.k
            add_bias(scores, spec.row_bytes, call.bias + number_bytes * index, step, n, keys, spec)
        # A row of Q, dO or K is not finite, and some pairs are hidden: it is added pair by pair where it is visible.
        non_finite = mask_bits != 0 and not (
            finite and rows.input_rows_finite(k_tile, k_step.n, k_step.d, keys, d, spec)
        )
        tile_dk = dk + number_bytes * key0 * call.dk_layout.n
        tile_dv = grad_v + number_bytes * key0 * call.dv_layout.n
        q_operand, do_operand, dq_operand = q_words, do_words, own.d_softcap
        if spec.in_pairs and not (non_finite or softcap > 0 or call.d_bias or drops):
            weights_and_ds_in_pairs(own, scale_log2, mask_bits, seeing, keys, spec)
        else:
            weights_and_ds(own, scale_log2, mask_bits, seeing, keys, spec)
            if drops:
                dropout.drop_and_scale(scores, own.kept, call.dropout.scale, keys, spec)
            if call.d_bias:
                sums = call.d_bias_strides
                index = part * sums.part + b * sums.b + h * sums.h + r * QUERIES * sums.q + key0 * sums.k
                add_d_bias(ds, call.d_bias + number_bytes * index, sums, n, keys, spec)
            if softcap > 0:
                apply_softcap_derivative(ds, own.d_softcap, mask_bits, keys, spec)
            if non_finite:
                rows.add_non_finite_queries(
                    scores, mask_bits, keys, do_rows, n, dv_row, tile_dv, call.dv_layout.n, spec
                )
                rows.add_non_finite_queries(ds, mask_bits, keys, q_rows, n, d_row, tile_dk, call.dk_layout.n, spec)
                rows.zero_non_finite_rows(q_rows, n, d_row, own.finite_q, spec)
                rows.zero_non_finite_rows(do_rows, n, dv_row, own.finite_d_output, spec)
                q_operand = rows.row_operand(own.finite_q, n, d_row, own.finite_q, spec)
                do_operand = rows.row_operand(own.finite_d_output, n, dv_row, own.finite_d_output, spec)
                rows.add_non_finite_keys(k_tile, k_step, ds, mask_bits, 0, QUERIES, keys, own.dq, d, own.keys, spec)
            dq_operand = ds_operand(own, keys, spec)
        if non_finite:
            k, k_row = rows.finite_rows_operand(own.keys, keys, d, own.values, own.zeros, own.packed_keys, spec)
        elif spec.is_widened:  # still in scratch memory from the scores
            k, k_row = own.keys, rows.padded(spec, d)
        elif spec.on_tiles:
            own_tile, copy, zeros, k_row = own.packed_keys, own.keys, own.zeros, 0
            k = rows.transposed_tile(call, call.k, k_step, d, b, kv, key0, own_tile, copy, zeros, spec)
        else:
            k, k_row = rows.key_operand(k_tile, k_step.n, k_step.d, keys, d, own.zeros, own.keys, spec)
        tiles.add_to_rows(scores, do_operand, tile_dv, call.dv_layout, keys, spans, groups, n, spec)
        tiles.add_to_rows(ds, q_operand, tile_dk, call.dk_layout, keys, spans, groups, n, spec)
        cut_bits = mask_bits if groups > 1 else 0
        tiles.pv_rows(k, k_row, dq_operand, own.dq, d, keys, 0, cut_bits, spans, n, spec)
    step = call.dq_strides
    target = call.dq + number_bytes * (b * step.b + h * step.h + r * QUERIES * step.n)
    rows.store_scaled(own.dq, n, d, scale, target, step.n, spec)


@device_function
def backward_head(call, own, part, b, kv, spec):
    """The gradients of one part of the queries of a key/value head."""
    dk_sums, dv_sums = call.dk_layout, call.dv_layout
    dk = call.dk + spec.number_bytes * (part * dk_sums.part + b * dk_sums.b + kv * dk_sums.h)
    grad_v = call.grad_v + spec.number_bytes * (part * dv_sums.part + b * dv_sums.b + kv * dv_sums.h)
    for j in range(dk_sums.rows):
        rows.fill(dk + spec.number_bytes * j * dk_sums.n, dk_sums.size, 0.0, spec)
        rows.fill(grad_v + spec.number_bytes * j * dv_sums.n, dv_sums.size, 0.0, spec)
    for h in range(kv * call.group, (kv + 1) * call.group):
        r = part
        while r < call.plan.rows:  # a range of a step that could be 0 would raise
            backward_tile(call, own, part, b, h, r, dk, grad_v, spec)
            r += call.parts
    for j in range(dk_sums.rows):
        rows.multiply_by(
            dk + spec.number_bytes * j * dk_sums.n, dk_sums.size, as_number(call.options.scale, spec), spec
        )


def backward(call):
    """The kernel: takes tasks until none is left. Sums, and the gradients that it writes, have the compute dtype."""
    own = scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread))
    configure_tiles(own.tile_configuration, call.spec)
    kv_heads = call.heads // call.group
    for task in tasks(call):
        part, head = task % call.parts, task // call.parts
        backward_head(call, own, part, head // kv_heads, head % kv_heads, call.spec)
    restore_tiles(own.tile_configuration, call.spec)
