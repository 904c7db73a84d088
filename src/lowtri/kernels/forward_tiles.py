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

from lowtri.kernels.device_function import device_function, inline_device_function
from lowtri.kernels.forward import KEYS, store_tile
from lowtri.kernels.non_finite import add_non_finite_keys, all_finite
from lowtri.kernels.plan_walk import visible_range, visible_tiles
from lowtri.kernels.record import take
from lowtri.kernels.rows import fill, multiply_by
from lowtri.kernels.scores import LOG2E, add_bias, apply_mask, apply_softcap
from lowtri.kernels.shared_pack import claim, is_packed, publish
from lowtri.kernels.simd import as_number, read
from lowtri.kernels.spec import QUERIES, KernelSpec
from lowtri.kernels.tile_operands import (
    copy_finite_rows,
    pack_transposed,
    queries_in_pairs,
    rows_for_a,
    whole,
    whole_16,
)
from lowtri.kernels.tile_softmax import softmax_pairs, unpack_pairs
from lowtri.kernels.tiles import configure_tiles, restore_tiles, tile_product, tile_product_add

__all__ = ["KEYS", "block_spans", "extended", "forward_tiles", "scratch", "shared_scratch"]

LOW_HALF, HIGH_HALF = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)  # of the 64 queries


def scratch(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    """Bytes of each part of the memory that one thread works in."""
    row, d_whole, dv_whole = spec.row_bytes, whole.py_func(d), whole.py_func(dv)
    return {
        "queries": row * d_whole // 2,
        "scores": row * KEYS,
        "pairs": row * KEYS // 2,
        "output": row * dv_whole,
        "shift": row,
        "total": row,
        "rows": max(row * dv, 2 * QUERIES * d_whole),  # the output's rows; before that, the queries' copy
        "keys": 2 * KEYS * d_whole,
        "values": 2 * KEYS * dv_whole,  # a copy of their rows
        "value_pairs": 4 * 16 * dv_whole,
        "packed_values": 2 * KEYS * dv_whole,
        "finite_values": 4 * KEYS * dv,
        "zeros": 4 * dv_whole,
        "tile_configuration": 128,
    }


def shared_scratch(heads: int, nk: int, dv: int) -> dict[str, int]:
    """Bytes that the threads share, for all key/value heads: the transposed values, and the states of their tiles."""
    tiles = heads * -(-nk // KEYS)
    return {"packed": 2 * tiles * KEYS * whole_16.py_func(dv), "packed_states": 8 * tiles}


@device_function
def extended(key0, keys, mask_bits, nk):
    """The visible keys of a tile, extended to whole blocks of 32 as far as there are keys: first key, keys, mask bits."""
    tile = key0 // KEYS
    start = key0 - tile * KEYS
    stop = min(whole(start + keys), min(KEYS, nk - tile * KEYS))
    before = start % 32
    if mask_bits:
        mask_bits -= 8 * before
    return key0 - before, stop - start + before, mask_bits


@device_function
def block_span(mask_bits, keys, queries):
    """The blocks of 32 keys that any of these queries sees."""
    start, stop = visible_range(mask_bits, keys, queries)
    if start >= stop:
        return 0, 0
    return start & -32, min(whole(stop), keys)


@device_function
def block_spans(mask_bits, keys):
    """The first key and one past the last that each 16 of the queries are computed for; both quarters of a half have the same."""
    if mask_bits:
        (a, b), (c, d) = block_span(mask_bits, keys, LOW_HALF), block_span(mask_bits, keys, HIGH_HALF)
        return a, b, a, b, c, d, c, d
    return 0, keys, 0, keys, 0, keys, 0, keys


@device_function
def score_halves(keys_a, a_row, queries, scores, keys, steps, spans, spec):
    """Scores of one tile, for each half of the queries in its span; at least 16 keys, so that a product has whole tiles."""
    if spans[0] == spans[4] and spans[1] == spans[5]:
        halves, columns = 1, QUERIES
    else:
        halves, columns = 2, QUERIES // 2
    for half in range(halves):
        start, stop, lane = spans[4 * half], spans[4 * half + 1], 128 * half
        if stop > start:
            start = max(0, min(start, stop - 16))
            target, rows = scores + spec.row_bytes * start + lane, max(16, stop - start)
            tile_product(
                keys_a + start * a_row, a_row, 64, queries + lane, target, spec.row_bytes, rows, steps, columns, spec
            )


@device_function
def pv_halves(values, pairs, output, columns, spans, spec):
    """Output += values^T weights, for each half of the queries in its span."""
    if spans[0] == spans[4] and spans[1] == spans[5]:
        halves, queries = 1, QUERIES
    else:
        halves, queries = 2, QUERIES // 2
    for half in range(halves):
        start, stop, lane = spans[4 * half], spans[4 * half + 1], 128 * half
        a, steps = values + 2 * start * columns, whole(stop - start) // 32
        if steps:
            b = pairs + spec.row_bytes * (start // 2) + lane
            tile_product_add(a, 64, 64 * columns, b, output + lane, spec.row_bytes, columns, steps, queries, spec)


@inline_device_function
def transposed_values(call, memory, b, kv, key0, keys, mask_bits, non_finite, spec):
    """The transposed values from key0 on: shared, or this thread's own copy while another thread packs the shared one.

    In the non-finite path it is the thread's own, and rows that are not finite are added to the output pair by pair.
    """
    offsets, step, dv, nk = call.offsets, call.v_strides, call.dv, call.nk
    columns, tile = whole_16(dv), key0 // KEYS
    index = (b * (call.heads // call.group) + kv) * ((nk + KEYS - 1) // KEYS) + tile
    state = call.scratch + offsets.packed_states + 8 * index
    first, n, packed = (
        tile * KEYS,
        min(KEYS, nk - tile * KEYS),
        call.scratch + offsets.packed + 2 * KEYS * columns * index,
    )
    packs, claimed, own = non_finite or not is_packed(state), False, memory + offsets.packed_values
    if non_finite:
        first, n, packed = key0, keys, own
    v = call.v + 2 * (b * step.b + kv * step.h + first * step.n)
    copy, row, number, size = memory + offsets.values, step.n, step.d, dv
    if non_finite:
        weights, output, rows = memory + offsets.scores, memory + offsets.output, memory + offsets.finite_values
        unpack_pairs(memory + offsets.pairs, keys, weights, spec)
        add_non_finite_keys(v, row, number, weights, mask_bits, keys, output, dv, rows, spec)
        copy_finite_rows(v, row, number, keys, dv, copy, spec)
        v, row, number, size = copy, whole(dv), 1, columns
    elif packs:
        claimed = claim(state)
        packed = packed if claimed else own
    if packs:
        pack_transposed(
            v, row, number, n, size, copy, memory + offsets.value_pairs, memory + offsets.zeros, packed, spec
        )
        if claimed:
            publish(state)
    return packed + 2 * (key0 - first) * columns


@device_function
def attend_tile(call, memory, b, h, r, non_finite, spec):
    """One tile of queries of one head: output (Dv, 64) before the division, shift m and sum l, in the thread's scratch memory."""
    d, dv, nk, kv = call.d, call.dv, call.nk, h // call.group
    offsets, bias_step, q_step, k_step = (
        call.offsets,
        call.bias_strides,
        call.q_strides,
        call.k_strides,
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
    for visible_key, visible_keys, visible_bits in visible_tiles(call.plan, b, h, r, KEYS, nk):
        key0, keys, mask_bits = extended(visible_key, visible_keys, visible_bits, nk)
        k = call.k + 2 * (b * k_step.b + kv * k_step.h + key0 * k_step.n)
        spans = block_spans(mask_bits, keys)
        k_rows, k_row = rows_for_a(k, k_step.n, k_step.d, keys, d, memory + offsets.keys, spec)
        score_halves(k_rows, k_row, queries, scores, keys, whole(d) // 32, spans, spec)
        unit = scale
        if softcap > 0 or call.bias or scale <= 0:  # these passes need scaled scores
            multiply_by(scores, QUERIES * keys, scale, spec)
            unit = as_number(1.0, spec)
        if softcap > 0:
            apply_softcap(scores, QUERIES * keys, softcap, spec)
        if call.bias:
            index = b * bias_step.b + h * bias_step.h + r * QUERIES * bias_step.q + key0 * bias_step.k
            add_bias(scores, call.bias + 4 * index, bias_step.q, bias_step.k, n, keys, spec)
        if mask_bits:
            apply_mask(scores, mask_bits, spans, spec)
        softmax_pairs(scores, unit, spans, m, l, output, dv, pairs, spec)
        values = transposed_values(call, memory, b, kv, key0, keys, mask_bits, non_finite, spec)
        pv_halves(values, pairs, output, columns, spans, spec)
    return n


@inline_device_function
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
