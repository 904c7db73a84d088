"""The weights of attention, and what each key received, from the log-sum-exp of the forward pass: one more pass over the scores.

A task is a run of key tiles of one query head, with all rows of its queries. So the sums over queries belong to one task, which adds
them in one order, whatever the number of threads and tasks; and received weights need memory for the keys alone.

    scores = K Q^T        weights = 2 ** (scores - lse)        received += the sum of the weights over 64 queries
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import rows, tiles
from lowtri.kernels.abi import KEYS
from lowtri.kernels.amx import configure_tiles, restore_tiles
from lowtri.kernels.device import device_function, scratch_at, take, tasks
from lowtri.kernels.operands import a_operand, transposed_queries
from lowtri.kernels.simd import (
    LOG2E,
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
    store_input,
    sub,
    write,
    write_input,
)
from lowtri.kernels.softmax import finish_scores, load_lse
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tile_products import score_tile
from lowtri.kernels.values import Packed, Rows


def weights(call):
    """The kernel: takes tasks until none is left."""
    own = scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread))
    configure_tiles(own.tile_configuration, call.spec)
    key_tiles = (call.nk + KEYS - 1) // KEYS
    for task in tasks(call):
        part, head = task % call.parts, task // call.parts
        first, last = part * key_tiles // call.parts, (part + 1) * key_tiles // call.parts
        for row in range(call.plan.rows):
            queries = tiles.tile_of_queries(call, head // call.heads, head % call.heads, row)
            weights_row(call, own, queries, first, last)
    restore_tiles(own.tile_configuration, call.spec)


@device_function
def weights_row(call, own, queries, first_tile, last_tile):
    """The weights of a tile of queries with these key tiles."""
    spec = call.spec
    seeing = np.uint64(0)
    has_queries = False
    written = first_tile * KEYS  # keys before this one are written
    for keys in tiles.visible_tiles(call, queries, first_tile, last_tile):
        if not has_queries:
            q = rows.rows_of(call.q, call.q_strides, queries, call.head_dim, spec)
            transposed_queries(q, own.rows, own.queries, spec)  # (D, 64)
            seeing, has_queries = load_lse(call, own, queries), True
        spans = tiles.tile_spans(keys, queries.count, spec)
        k = a_operand(rows.rows_of(call.k, call.k_strides, keys, call.head_dim, spec), own.keys, spec)  # (keys, D)
        score_tile(k, own.queries, own.scores, call.head_dim, KEYS, spans, spec)  # (keys, 64)
        scale_log2 = as_number(call.options.scale, spec) * as_number(LOG2E, spec)
        scale_log2 = finish_scores(call, Packed(own.scores, spec.row_bytes), scale_log2, queries, keys, 0)
        weights_of_scores(call, own, scale_log2, queries, keys, seeing)
        if call.weights:
            zero_weights(call, queries, written, keys.first)
            store_weights(call, own, queries, keys)
            written = keys.first + keys.count
    if call.weights:
        zero_weights(call, queries, written, min(last_tile * KEYS, call.nk))


@device_function
def weights_of_scores(call, own, scale_log2, queries, keys, seeing):
    """Scores become weights, 0 where hidden; their sums over the queries are added to what each key received, if the call has it."""
    spec, received = call.spec, 0
    if call.received:
        place = (queries.batch * call.heads + queries.head) * call.nk + keys.first
        received = call.received + spec.number_bytes * place
    factor, zero = splat(scale_log2, spec), splat(0.0, spec)
    for j in range(keys.count):
        word, total = (read_word(keys.mask_words + 8 * j) if keys.mask_words else rows.ALL_QUERIES) & seeing, zero
        for lane in range(0, QUERIES, spec.lanes):
            offset, weight = spec.number_bytes * lane, zero
            score = own.scores + spec.row_bytes * j + offset
            # Where none of 16 queries sees the key, its scores need not be computed.
            if (word >> np.uint64(lane & -16)) & tiles.FIRST_16 != 0:
                power = fma(load(score, spec), factor, sub(zero, load(own.shift + offset, spec)), spec)
                power = sub(power, load(own.shift_residual + offset, spec))
                weight = exp2(select_greater(power, zero, zero, power), spec)
                weight = select_bits(word, np.uint64(lane), weight, zero)
            store(score, weight)
            total = add(total, weight)
        if received:
            address = received + spec.number_bytes * j
            write(address, read(address, spec) + reduce_sum(total), spec)


@device_function
def store_weights(call, own, queries, keys):
    """A tile of weights (keys, 64), written to the array of weights (B, Hq, Nq, Nk)."""
    spec, n = call.spec, queries.count
    row = (queries.batch * call.heads + queries.head) * call.nq + queries.first
    target = call.weights + (spec.number_bytes if call.wide else spec.input_bytes) * (row * call.nk + keys.first)
    if spec.is_direct or call.wide:
        rows.transpose_out(own.scores, Rows(target, call.nk, 1, n, keys.count), spec)
    else:
        rows.transpose_out(own.scores, Rows(own.rows, KEYS, 1, n, keys.count), spec)
        for i in range(n):
            source = own.rows + spec.number_bytes * i * KEYS
            rows.round_row(source, keys.count, as_number(1.0, spec), target + spec.input_bytes * i * call.nk, spec)


@device_function
def zero_weights(call, queries, key0, stop):
    """Set the weights of the queries with these keys, which none of them sees, to 0."""
    spec = call.spec
    first_row, zero = (queries.batch * call.heads + queries.head) * call.nq + queries.first, as_number(0.0, spec)
    for row in range(first_row, first_row + queries.count):
        key = key0
        while key < stop:
            place, whole = row * call.nk + key, key + spec.lanes <= stop
            if call.wide:
                address = call.weights + spec.number_bytes * place
                if whole:
                    store(address, splat(0.0, spec))
                else:
                    write(address, zero, spec)
            else:
                address = call.weights + spec.input_bytes * place
                if whole:
                    store_input(address, splat(0.0, spec), spec)
                else:
                    write_input(address, zero, spec)
            key += spec.lanes if whole else 1
