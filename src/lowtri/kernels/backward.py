"""The gradients of attention, tile by tile of the same plan.

A task is one key/value head or, where there are more threads than heads, a part of its rows of query tiles. In one run it takes the key
tiles of one phase, and no other task adds to their dK and dV meanwhile (:mod:`lowtri.backends.cpu.parts`), so the result does not
depend on the order in which threads finish. There are five products per tile, all with queries in lanes; ``weights`` and ``ds`` (dS^T,
the gradient of the scores) are the left operands of the next products without being transposed:

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

from typing import NamedTuple

import numpy as np

from lowtri.kernels import dropout, rows, tiles
from lowtri.kernels.abi import KEYS, PART
from lowtri.kernels.amx import configure_tiles, restore_tiles, transposed_tile
from lowtri.kernels.device import device_function, scratch_at, take, tasks
from lowtri.kernels.operands import (
    a_operand,
    b_operand,
    finite_rows_operand,
    summed_rows_operand,
    transposed_queries,
    whole_tile,
)
from lowtri.kernels.simd import (
    LOG2E,
    add_transposed,
    as_number,
    exp2,
    fma,
    interleave,
    load,
    load_input,
    mul,
    read,
    read_input,
    read_int32,
    read_int64,
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
from lowtri.kernels.softmax import finish_scores, load_lse, query_number
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_products import add_to_rows, add_weighted_rows, score_tile
from lowtri.kernels.values import Packed, Packing, Rows, Span, Sums

_PART_FIELDS = len(PART.names)


class Part(NamedTuple):
    """A part of the queries: its number, the phase of the key tiles that it takes in this round, and the fields of PART."""

    number: int
    phase: int
    first: int
    last: int
    first_tile: int
    last_tile: int
    copy: int
    dk: int
    dv: int


class QueryRows(NamedTuple):
    """What the rows of Q and dO of a tile are used as: see :func:`query_rows`."""

    q: Rows
    d_output: Rows
    q_operand: int
    d_output_operand: int
    is_finite: bool


def backward(call):
    """The kernel: takes tasks until none is left. Sums, and the gradients that it writes, have the compute dtype."""
    own = scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread))
    configure_tiles(own.tile_configuration, call.spec)
    for task in tasks(call):
        backward_part(call, own, part_of(call, task % call.parts), task // call.parts)
    restore_tiles(own.tile_configuration, call.spec)


@device_function
def part_of(call, number):
    """A part of the queries."""
    part = call.ranges + 8 * _PART_FIELDS * number
    return Part(
        number,
        (number + call.round) % call.rounds,
        read_int64(part),
        read_int64(part + 8),
        read_int64(part + 16),
        read_int64(part + 24),
        read_int64(part + 32),
        read_int64(part + 40),
        read_int64(part + 48),
    )


@device_function
def backward_part(call, own, part, kv_head):
    """The gradients of one part of the queries of a key/value head, of those of all rows of the batch, from the keys of one phase."""
    spec = call.spec
    kv_heads = call.heads // call.group
    batch, kv = kv_head // kv_heads, kv_head % kv_heads
    dk = key_sums(call, call.dk, call.dk_layout, part, part.dk, kv_head)
    dv = key_sums(call, call.dv, call.dv_layout, part, part.dv, kv_head)
    if call.round == 0:
        for keys in tiles_of_phase(call, part, dk.count):
            for j in range(keys.first, keys.stop):
                rows.fill(dk.at + spec.number_bytes * j * dk.row, dk.size, 0.0, spec)
                rows.fill(dv.at + spec.number_bytes * j * dv.row, dv.size, 0.0, spec)
    for place in range(part.first, part.last):
        row = read_int32(call.order + 4 * place)
        head = kv * call.group + row // call.plan.rows
        queries = tiles.tile_of_queries(call, batch, head, row % call.plan.rows)
        backward_tile(call, own, part, queries, dk, dv)
    if call.round == call.rounds - 1:
        for keys in tiles_of_phase(call, part, dk.count):
            for j in range(keys.first, keys.stop):
                scale = as_number(call.options.scale, spec)
                rows.multiply_by(dk.at + spec.number_bytes * j * dk.row, dk.size, scale, spec)


@device_function
def key_sums(call, array, layout, part, place, kv_head):
    """The rows of dK or dV that a part adds to, from key 0 on, in the compute dtype; a copy has those of its key tiles only."""
    number_bytes, row = call.spec.number_bytes, layout.size
    if part.copy:
        first = KEYS * part.first_tile
        rows_of_copy = min(KEYS * part.last_tile, layout.rows) - first
        at = call.copies + number_bytes * (place + (kv_head * rows_of_copy - first) * row)
    else:
        kv_heads = call.heads // call.group
        at = array + number_bytes * (kv_head // kv_heads * layout.b + kv_head % kv_heads * layout.h)
        row = layout.n
    return Rows(at, row, 1, layout.rows, layout.size)


@device_function
def tiles_of_phase(call, part, rows_of_keys):
    """The keys of the key tiles that a part takes in this round, of those of its copy, with the rows that pad them."""
    for tile in range(part.first_tile, part.last_tile):
        if tiles.phase_of(tile, call.rounds) == part.phase:
            yield Span(KEYS * tile, min(KEYS * (tile + 1), rows_of_keys))


@device_function
def rows_of_tile(sums, keys, spec):
    """The rows of dK or dV of these keys."""
    return Rows(sums.at + spec.number_bytes * keys.first * sums.row, sums.row, 1, keys.count, sums.size)


@device_function
def backward_tile(call, own, part, queries, dk_sums, dv_sums):
    """One tile of queries and the keys of one phase: what they add to dQ, d bias, dK and dV."""
    spec = call.spec
    own_rows = query_rows(call, own, queries)
    seeing = load_lse(call, own, queries)
    load_delta(call, own, queries, seeing)
    if call.dropout.key_words:
        dropout.write_query_words(call, own, queries)
    if spec.packs_bf16:
        rows.fill(own.zeros, rows.round_up(call.head_dim, 32), 0.0, spec)
    dq = Sums(own.dq, queries.count, call.head_dim)
    place = queries.batch * call.dq_strides.b + queries.head * call.dq_strides.h + queries.first * call.dq_strides.n
    target = call.dq + spec.number_bytes * place
    if call.round:
        rows.load_sums(dq, target, call.dq_strides.n, spec)
    else:
        rows.zero_sums(dq, spec)
    for keys in tiles.visible_tiles(call, queries, part.first_tile, part.last_tile):
        if tiles.phase_of(keys.first // KEYS, call.rounds) != part.phase:
            continue
        spans = tiles.tile_spans(keys, queries.count, spec)
        k = rows.rows_of(call.k, call.k_strides, keys, call.head_dim, spec)
        v = rows.rows_of(call.v, call.v_strides, keys, call.value_dim, spec)
        k_operand = a_operand(k, own.keys, spec)  # (keys, D)
        score_tile(k_operand, own.queries, own.scores, k.size, KEYS, spans, spec)  # (keys, 64)
        v_operand = a_operand(v, own.values, spec)  # (keys, Dv)
        score_tile(v_operand, own.d_output, own.ds, v.size, KEYS, spans, spec)  # (keys, 64)
        # A row of Q, dO or K is not finite, and some pairs are hidden: it is added pair by pair where it is visible.
        non_finite = keys.mask_words != 0 and not (own_rows.is_finite and rows.input_rows_finite(k, spec))
        dk = rows_of_tile(dk_sums, keys, spec)
        dv = rows_of_tile(dv_sums, keys, spec)
        scale_log2 = finish_products(call, own, queries, keys)
        q_operand, d_output_operand = own_rows.q_operand, own_rows.d_output_operand
        if spec.packs_bf16 and not (non_finite or changes_ds(call)):
            weights_and_ds_bf16x2(own, scale_log2, keys, seeing)
        else:
            weights_and_ds(own, scale_log2, keys, seeing)
            finish_ds(call, own, part.number, queries, keys)
            if non_finite:
                add_non_finite_rows(own, own_rows, k, keys, dk, dv)
                q_operand = finite_operand(own_rows.q, own.finite_q, spec)
                d_output_operand = finite_operand(own_rows.d_output, own.finite_d_output, spec)
            round_weights_and_ds(own, keys)
        keys_operand = dq_operand(call, own, k, keys, non_finite)  # (keys, D)
        add_to_rows(own.scores, d_output_operand, dv, queries.count, spans, spec)
        add_to_rows(own.ds, q_operand, dk, queries.count, spans, spec)
        ds = own.d_softcap if spec.packs_bf16 else own.ds
        add_weighted_rows(keys_operand, ds, dq, keys, 0, spans, spec)
    scale = call.options.scale if call.round == call.rounds - 1 else 1.0
    rows.store_sums(dq, as_number(scale, spec), target, call.dq_strides.n, spec)


# The operands of a tile of queries.


@device_function
def query_rows(call, own, queries):
    """The rows of Q and dO, in lanes in ``own.queries`` and ``own.d_output``, and packed as operands of dK and dV."""
    spec, n = call.spec, queries.count
    lse = query_number(call, call.lse, queries)
    q = rows.rows_of(call.q, call.q_strides, queries, call.head_dim, spec)
    d_output = rows.rows_of(call.d_output, call.d_output_strides, queries, call.value_dim, spec)
    q_rows = rows.packed_rows(own.q_rows, n, call.dk_layout.size)
    d_output_rows = rows.packed_rows(own.d_output_rows, n, call.dv_layout.size)
    q_operand, q_finite = operands_of(q, lse, q_rows, own.q_pairs, own.finite_q, own.queries, spec)
    d_output_operand, d_output_finite = operands_of(
        d_output, lse, d_output_rows, own.d_output_pairs, own.finite_d_output, own.d_output, spec
    )
    return QueryRows(q_rows, d_output_rows, q_operand, d_output_operand, d_output_finite and q_finite)


@device_function
def operands_of(source, lse, packed, pairs, copy, target, spec):
    """Rows of Q or dO as operands: ``target`` with queries in lanes, and ``packed`` rows of the compute dtype, padded with 0.

    In ``packed`` a query that sees no key is a row of 0. ``pairs`` and ``copy`` are scratch. Returns the address of the latter operand,
    and whether all of its numbers are finite.
    """
    finite, row = True, packed.size
    for i in range(source.count):
        packed_row = packed.at + spec.number_bytes * i * row
        if read(lse + spec.number_bytes * i, spec) == -np.inf:
            rows.fill(packed_row, row, 0.0, spec)
        else:
            one = Rows(source.at + spec.input_bytes * i * source.row, 0, source.number, 1, source.size)
            rows.widen_rows(one, packed_row, row, spec)
            finite = rows.all_finite(packed_row, row, spec) and finite
    if spec.packs_bf16:
        transposed_queries(source, copy, target, spec)
    else:
        numbers = Rows(packed.at, row, 1, source.count, source.size)
        rows.transpose_in(numbers, rows.round_up(source.count, 16), target, spec)
    return summed_rows_operand(packed, pairs, spec), finite


@device_function
def load_delta(call, own, queries, seeing):
    """delta of 64 queries, the sum of dO * O less d_lse; 0 without a visible key."""
    spec = call.spec
    output = rows.rows_of(call.output, call.output_strides, queries, call.value_dim, spec)
    d_output = rows.rows_of(call.d_output, call.d_output_strides, queries, call.value_dim, spec)
    for i in range(QUERIES):
        number, delta = spec.number_bytes * i, as_number(0.0, spec)
        if (seeing >> np.uint64(i)) & np.uint64(1):
            row, d_row = (
                output.at + spec.input_bytes * i * output.row,
                d_output.at + spec.input_bytes * i * d_output.row,
            )
            delta = row_product(row, d_row, d_output.number, call.value_dim, spec)
            if call.d_lse:
                delta -= read(query_number(call, call.d_lse, queries) + number, spec)
        write(own.delta + number, delta, spec)
        if call.delta and i < queries.count:
            write(query_number(call, call.delta, queries) + number, delta, spec)


@device_function
def row_product(one, two, step, size, spec):
    """The sum of products of two rows of arrays, in the compute dtype; the first is packed, the second has a step."""
    total = splat(0.0, spec)
    number = spec.input_bytes
    whole = size - size % spec.lanes if step == 1 else 0
    for d in range(0, whole, spec.lanes):
        total = fma(load_input(one + number * d, spec), load_input(two + number * d, spec), total, spec)
    result = reduce_sum(total)
    for d in range(whole, size):
        result += read_input(one + number * d, spec) * read_input(two + number * d * step, spec)
    return result


# Passes over a tile, rows of 64 numbers with a lane for each query.


@device_function
def finish_products(call, own, queries, keys):
    """dP without what was dropped, and the scores with softcap and bias; returns what is left to multiply the scores by."""
    spec = call.spec
    if call.dropout.key_words:
        dropout.draw_tile(call, own, keys, 0, queries.count)
        dropout.drop_and_scale(call, own, own.ds, keys)
    scale_log2 = as_number(call.options.scale, spec) * as_number(LOG2E, spec)
    return finish_scores(call, Packed(own.scores, spec.row_bytes), scale_log2, queries, keys, own.d_softcap)


@device_function
def changes_ds(call):
    """Whether weights and dS are changed, or dS is added up, before they are rounded."""
    return call.options.softcap > 0 or call.d_bias != 0 or call.dropout.key_words != 0


@device_function
def weights_and_ds(own, scale_log2, keys, seeing):
    """Scores become weights, and dP becomes dS; both are 0 at hidden pairs.

    ``scale_log2`` brings scores to units of log 2, those of the shift; ``seeing`` is a word of the queries that see any key.
    """
    spec = own.spec
    factor = splat(scale_log2, spec)
    for j in range(keys.count):
        word = (read_word(keys.mask_words + 8 * j) if keys.mask_words else rows.ALL_QUERIES) & seeing
        for lane in range(0, QUERIES, spec.lanes):
            offset = spec.row_bytes * j + spec.number_bytes * lane
            weight, ds = weight_and_ds(own, spec.row_bytes * j, lane, word, factor)
            store(own.scores + offset, weight)
            store(own.ds + offset, ds)


@device_function
def weight_and_ds(own, row, lane, word, factor):
    """The weight, and dS = weight * (dP - delta), of a key and a vector of queries from ``lane`` on; both are 0 where it is hidden.

    Where none of 16 queries sees the key, its scores need not be computed. ``row`` leads to the key's rows of scores and of dP.
    """
    spec, offset = own.spec, own.spec.number_bytes * lane
    zero = splat(0.0, spec)
    if (word >> np.uint64(lane & -16)) & tiles.FIRST_16 == 0:
        return zero, zero
    power = fma(load(own.scores + row + offset, spec), factor, sub(zero, load(own.shift + offset, spec)), spec)
    if not spec.uses_amx:  # weights that are rounded on the way to tiles do not need what the log-sum-exp loses
        power = sub(power, load(own.shift_residual + offset, spec))
    # At most 1, also for scores so large that rounding would exceed it.
    weight = exp2(select_greater(power, zero, zero, power), spec)
    ds = mul(weight, sub(load(own.ds + row + offset, spec), load(own.delta + offset, spec)))
    if word != rows.ALL_QUERIES:
        return select_bits(word, np.uint64(lane), weight, zero), select_bits(word, np.uint64(lane), ds, zero)
    return weight, ds


@device_function
def weights_and_ds_bf16x2(own, scale_log2, keys, seeing):
    """:func:`weights_and_ds` and :func:`round_weights_and_ds` in one pass."""
    spec = own.spec
    factor, zero = splat(scale_log2, spec), splat(0.0, spec)
    for j in range(0, keys.count, 2):
        both, row = j + 1 < keys.count, spec.row_bytes * j
        word = (read_word(keys.mask_words + 8 * j) if keys.mask_words else rows.ALL_QUERIES) & seeing
        next_word = (read_word(keys.mask_words + 8 * j + 8) if keys.mask_words and both else rows.ALL_QUERIES) & seeing
        for lane in range(0, QUERIES, 16):
            offset, odd = row + 2 * lane, zero
            weight, even = weight_and_ds(own, row, lane, word, factor)
            # In place: the bf16 numbers of 16 queries end before the numbers that are still to be read.
            store_input(own.scores + offset, weight, spec)
            store_input(own.ds + offset, even, spec)
            if both:
                weight, odd = weight_and_ds(own, row + spec.row_bytes, lane, next_word, factor)
                store_input(own.scores + spec.row_bytes + offset, weight, spec)
                store_input(own.ds + spec.row_bytes + offset, odd, spec)
            store(own.d_softcap + spec.row_bytes * (j // 2) + 4 * lane, interleave(even, odd, spec))


@device_function
def finish_ds(call, own, part, queries, keys):
    """Weights without what was dropped; dS added to the gradient of the bias, then times the derivative of the softcap."""
    if call.dropout.key_words:
        dropout.drop_and_scale(call, own, own.scores, keys)
    if call.d_bias:
        add_d_bias(call, own, part, queries, keys)
    if call.options.softcap > 0:
        apply_softcap_derivative(own, keys)


@device_function
def add_d_bias(call, own, part, queries, keys):
    """Add dS to the gradient of the bias; along a broadcast axis its stride is 0, so that entries are summed."""
    spec, step = call.spec, call.d_bias_strides
    place = part * step.part + queries.batch * step.b + queries.head * step.h
    place += queries.first * step.q + keys.first * step.k
    d_bias = call.d_bias + spec.number_bytes * place
    # Whole blocks of entries of their own that are neighbours first, then the pairs that are left.
    whole_queries = queries.count - queries.count % spec.lanes
    whole_keys = keys.count - keys.count % spec.lanes if step.k == 1 and step.q != 0 else 0
    for i in range(0, whole_queries, spec.lanes):
        for j in range(0, whole_keys, spec.lanes):
            block = own.ds + spec.row_bytes * j + spec.number_bytes * i
            place = d_bias + spec.number_bytes * (i * step.q + j)
            add_transposed(block, spec.row_bytes, place, spec.number_bytes * step.q, spec)
    for j in range(keys.count):
        for i in range(whole_queries if j < whole_keys else 0, queries.count):
            d_bias_ij = d_bias + spec.number_bytes * (i * step.q + j * step.k)
            ds = read(own.ds + spec.row_bytes * j + spec.number_bytes * i, spec)
            write(d_bias_ij, read(d_bias_ij, spec) + ds, spec)


@device_function
def apply_softcap_derivative(own, keys):
    """Multiply dS by the derivative of the softcap; hidden pairs stay 0."""
    spec = own.spec
    zero = splat(0.0, spec)
    for j in range(keys.count):
        word = read_word(keys.mask_words + 8 * j) if keys.mask_words else rows.ALL_QUERIES
        for lane in range(0, QUERIES, spec.lanes):
            offset = spec.row_bytes * j + spec.number_bytes * lane
            x = mul(load(own.ds + offset, spec), load(own.d_softcap + offset, spec))
            store(own.ds + offset, select_bits(word, np.uint64(lane), x, zero))


@device_function
def add_non_finite_rows(own, own_rows, k, keys, dk, dv):
    """What the rows of Q, dO and K that are not finite add to dV, dK and dQ; copies have 0 in their place."""
    spec = own.spec
    q = own_rows.q
    d_output = own_rows.d_output
    rows.add_non_finite_queries(own.scores, keys, d_output, dv.at, dv.row, spec)
    rows.add_non_finite_queries(own.ds, keys, q, dk.at, dk.row, spec)
    rows.zero_non_finite_rows(q, own.finite_q, spec)
    rows.zero_non_finite_rows(d_output, own.finite_d_output, spec)
    rows.add_non_finite_keys(k, own.ds, keys, 0, Sums(own.dq, QUERIES, k.size), own.keys, spec)


@device_function
def finite_operand(packed, copy, spec):
    """The copy of packed rows, in place, as an operand of dK or dV."""
    return summed_rows_operand(Rows(copy, packed.row, 1, packed.count, packed.size), copy, spec)


@device_function
def round_weights_and_ds(own, keys):
    """Weights and dS (keys, 64) as operands of dV and dK, in place, and dS as the operand of dQ.

    Of bf16, numbers fill the first half of each row, and the pairs of dS are in the memory of the softcap's derivative.
    """
    spec = own.spec
    if spec.packs_bf16:
        rows.interleave_rows(rows.packed_rows(own.ds, keys.count, QUERIES), own.d_softcap, spec)
        for row in range(0, spec.row_bytes * keys.count, spec.row_bytes):
            for lane in range(0, QUERIES, 16):
                store_input(own.scores + row + 2 * lane, load(own.scores + row + 4 * lane, spec), spec)
                store_input(own.ds + row + 2 * lane, load(own.ds + row + 4 * lane, spec), spec)


@device_function
def dq_operand(call, own, k, keys, non_finite):
    """The keys as an operand of dQ."""
    spec, columns = call.spec, rows.padded(call.spec, k.size)
    if non_finite:
        memory = Packing(own.packed_keys, own.values, own.zeros)
        return finite_rows_operand(Rows(own.keys, columns, 1, keys.count, k.size), memory, spec)
    if spec.is_widened:  # still in scratch memory from the scores
        return Packed(own.keys, columns)
    if spec.uses_amx:
        tile = rows.rows_of(call.k, call.k_strides, whole_tile(call, keys), k.size, spec)
        return transposed_tile(call, tile, keys, Packing(own.packed_keys, own.keys, own.zeros))
    return b_operand(k, own.zeros, own.keys, spec)
