"""The weights of attention, and what each key received, from the log-sum-exp of the forward pass: one more pass over the scores.

A task is a run of key tiles of one query head, with all rows of its queries. So the sums over queries belong to one task, which adds
them in one order, whatever the number of threads and tasks; and received weights need memory for the keys alone.

    scores = K Q^T        weights = 2 ** (scores - lse)        received += the sum of the weights over 64 queries
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import rows, tiles
from lowtri.kernels.abi import KEYS
from lowtri.kernels.device import device_function, scratch_at, take, tasks
from lowtri.kernels.product import configure_tiles, restore_tiles
from lowtri.kernels.simd import (
    add,
    as_number,
    exp2,
    fma,
    load,
    read,
    read_word,
    reduce_sum,
    select_bits,
    select_greater,
    splat,
    store,
    sub,
    write,
)
from lowtri.kernels.spec import QUERIES


@device_function
def load_lse(call, own, b, h, r, n, spec):
    """The log-sum-exp of 64 queries in units of log 2, and what it loses to rounding; inf without a query or a visible key.

    Returns a word that has the bits of the other queries.
    """
    query0, seeing = (b * call.heads + h) * call.nq + r * QUERIES, np.uint64(0)
    for i in range(QUERIES):
        offset, number = spec.number_bytes * i, spec.number_bytes * (query0 + i)
        log2_sum, low = as_number(np.inf, spec), as_number(0.0, spec)
        if i < n and read(call.lse + number, spec) != -np.inf:
            seeing |= np.uint64(1) << np.uint64(i)
            log2_sum, low = tiles.times_log2e(read(call.lse + number, spec), spec), read(call.lse_low + number, spec)
        write(own.shift + offset, log2_sum, spec)
        write(own.shift_low + offset, low, spec)
    return seeing


@device_function
def weights_of_scores(own, scale_log2, mask_bits, seeing, keys, received, spec):
    """Scores become weights, 0 where hidden; their sums over the queries are added to ``received``, if it has an address."""
    factor, zero = splat(scale_log2, spec), splat(0.0, spec)
    for j in range(keys):
        word, total = (read_word(mask_bits + 8 * j) if mask_bits else rows.ALL_QUERIES) & seeing, zero
        for lane in range(0, QUERIES, spec.lanes):
            offset, weight = spec.number_bytes * lane, zero
            score = own.scores + spec.row_bytes * j + offset
            # Where none of 16 queries sees the key, its scores need not be computed.
            if (word >> np.uint64(lane & -16)) & tiles.FIRST_16 != 0:
                power = fma(load(score, spec), factor, sub(zero, load(own.shift + offset, spec)), spec)
                power = sub(power, load(own.shift_low + offset, spec))
                weight = exp2(select_greater(power, zero, zero, power), spec)
                weight = select_bits(word, np.uint64(lane), weight, zero)
            store(score, weight)
            total = add(total, weight)
        if received:
            address = received + spec.number_bytes * j
            write(address, read(address, spec) + reduce_sum(total), spec)


@device_function
def store_weights(call, own, b, h, r, n, key0, keys, spec):
    """A tile of weights (keys, 64), written to the array of weights (B, Hq, Nq, Nk)."""
    row = (b * call.heads + h) * call.nq + r * QUERIES
    target = call.weights + spec.input_bytes * (row * call.nk + key0)
    if spec.is_direct:
        rows.transpose_out(own.scores, n, keys, target, call.nk, spec)
    else:
        rows.transpose_out(own.scores, n, keys, own.rows, KEYS, spec)
        for i in range(n):
            source = own.rows + spec.number_bytes * i * KEYS
            rows.round_row(source, keys, as_number(1.0, spec), target + spec.input_bytes * i * call.nk, spec)


@device_function
def weights_row(call, own, b, h, r, first_tile, last_tile, spec):
    """The weights of a tile of queries with these key tiles."""
    d, kv, number_bytes, softcap = call.d, h // call.group, spec.number_bytes, as_number(call.options.softcap, spec)
    n, q_step, k_step = min(QUERIES, call.nq - r * QUERIES), call.q_strides, call.k_strides
    seeing, has_queries = np.uint64(0), False
    for key0, keys, mask_bits in tiles.visible_tiles(call.plan, b, h, r, call.nk, first_tile, last_tile, spec):
        if not has_queries:
            q = rows.input_row(call.q, q_step, b, h, r * QUERIES, spec)
            rows.transposed_queries(q, q_step.n, q_step.d, n, d, own.rows, own.queries, spec)
            seeing, has_queries = load_lse(call, own, b, h, r, n, spec), True
        k_tile = rows.input_row(call.k, k_step, b, kv, key0, spec)
        k, k_n, k_d = rows.head_operand(k_tile, k_step.n, k_step.d, keys, d, own.keys, spec)
        spans, groups = tiles.tile_spans(mask_bits, keys, n, spec)
        tiles.score_tile(k, k_n, k_d, own.queries, own.scores, spec.row_bytes, d, KEYS, spans, groups, spec)
        scale_log2 = as_number(call.options.scale, spec) * as_number(tiles.LOG2E, spec)
        if softcap > 0 or call.bias:  # these passes need scaled scores
            rows.multiply_by(own.scores, QUERIES * keys, scale_log2, spec)
            scale_log2 = as_number(1.0, spec)
        if softcap > 0:
            tiles.apply_softcap(own.scores, QUERIES * keys, softcap, spec)
        if call.bias:
            step = call.bias_strides
            index = b * step.b + h * step.h + r * QUERIES * step.q + key0 * step.k
            tiles.add_bias(own.scores, spec.row_bytes, call.bias + number_bytes * index, step, n, keys, spec)
        received = 0
        if call.received:
            received = call.received + number_bytes * ((b * call.heads + h) * call.nk + key0)
        weights_of_scores(own, scale_log2, mask_bits, seeing, keys, received, spec)
        if call.weights:
            store_weights(call, own, b, h, r, n, key0, keys, spec)


def weights(call):
    """The kernel: takes tasks until none is left."""
    own = scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread))
    configure_tiles(own.tile_configuration, call.spec)
    key_tiles = (call.nk + KEYS - 1) // KEYS
    for task in tasks(call):
        part, head = task % call.parts, task // call.parts
        first, last = part * key_tiles // call.parts, (part + 1) * key_tiles // call.parts
        for r in range(call.plan.rows):
            weights_row(call, own, head // call.heads, head % call.heads, r, first, last, call.spec)
    restore_tiles(own.tile_configuration, call.spec)
