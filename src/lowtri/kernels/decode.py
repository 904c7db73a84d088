"""Few queries against a long cache: each key and value is read once for all query heads of its group.

Memory bandwidth is the limit, so nothing is transposed: each row of the cache is read once for a block of queries, in the order of
memory, and prefetched (:mod:`lowtri.kernels.decode_products`).

The cache is split into parts, so that all threads work on one sequence; the last task of a head to finish merges the head's parts, in a
fixed order, so the result does not depend on the order in which threads finish. Rows are those of a group: (query head, query).

Source: the split over keys of Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import abi
from lowtri.kernels.abi import CACHE_BLOCK, CACHE_KEYS, CACHE_ROWS, CACHE_SCORES
from lowtri.kernels.decode_products import KeyRows, ValueRows, add_weighted_values, dot_products, lay_out_query
from lowtri.kernels.device import device_function, scratch_at, take, tasks
from lowtri.kernels.rows import (
    ALL_QUERIES,
    all_finite,
    fill,
    multiply_by,
    prefetch_rows,
    round_row,
    round_up,
    rows_of,
)
from lowtri.kernels.simd import (
    LOG2E,
    add,
    any_greater,
    as_number,
    exp2,
    fetch_add,
    fma,
    load,
    maximum,
    mul,
    read,
    read_byte,
    read_input,
    reduce_rows_max,
    reduce_rows_sum,
    select_bits,
    select_greater,
    splat,
    store,
    sub,
    to_log2,
    write,
)
from lowtri.kernels.softmax import LN2, apply_softcap, times_log2e
from lowtri.kernels.values import Packed, Softmax, Sums, Tokens

# Bytes of the next rows, where keys and values change places: the CPU's own prefetcher begins anew there.
PREFETCHED = 2**13

header_size = device_function(abi.header_size)
place_of_row = device_function(abi.place_of_row)


def decode(call):
    """The kernel: takes tasks until none is left. The parts of one head follow one another."""
    own = scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread))
    for task in tasks(call):
        head, non_finite = task // call.parts, False
        while True:
            output = attend_part(call, own, task, non_finite)
            if non_finite or all_finite(output.at, output.count * output.size, call.spec):
                break
            non_finite = True  # Some value is NaN or inf, and it may be hidden: compute the part again, pair by pair.
        if fetch_add(scratch_at(call, call.scratch).parts_done + 8 * head, 1) == call.parts - 1:
            merge_parts(call, head)


@device_function
def attend_part(call, own, task, non_finite):
    """One part of the cache for all queries of a group: shifts, totals and outputs (rows, Dv), in the results of this part."""
    spec = call.spec
    size = call.value_dim
    rows = call.group * call.nq
    softmax = begin_part(call, own, task)
    lay_out_queries(call, own, task)
    part = keys_of_part(call, task)
    # Every change from keys to values costs the time of some reads: blocks are as long as their scores stay in the first caches.
    most = max(CACHE_BLOCK * CACHE_ROWS // max(rows, CACHE_ROWS) // CACHE_KEYS, 1) * CACHE_KEYS
    key0, end = part.first, part.first + part.count
    while key0 < end:
        keys = Tokens(part.batch, part.head, key0, min(most, end - key0))
        score_block(call, own, keys)  # (rows, keys)
        v = rows_of(call.v, call.v_strides, in_cache(call, keys), size, spec)
        prefetch_rows(v, 0, PREFETCHED // (spec.input_bytes * size), spec)
        softmax_block(own, round_up(keys.count, 16), softmax, spec)
        following = Tokens(part.batch, part.head, key0 + keys.count, 0)
        k = rows_of(call.k, call.k_strides, in_cache(call, following), call.head_dim, spec)
        prefetch_rows(k, 0, PREFETCHED // (spec.input_bytes * call.head_dim), spec)
        if non_finite:
            add_visible_pairs(call, own, keys, v, softmax.output)
        else:
            weights = Packed(own.scores, 4 * CACHE_SCORES)
            if spec.packs_bf16:
                weights = Packed(own.weights, 2 * CACHE_SCORES)
                for first in range(0, rows * CACHE_SCORES, CACHE_SCORES):
                    source, target = own.scores + 4 * first, own.weights + 2 * first
                    round_row(source, round_up(keys.count, 16), as_number(1.0, spec), target, spec)
            values = ValueRows(v.at, spec.input_bytes * v.row, keys.count, own.zeros)
            add_weighted_values(weights, rows, values, softmax.output.at, size, spec)
        key0 += keys.count
    return softmax.output


@device_function
def begin_part(call, own, task):
    """The state before the first key: vectors of shifts and of totals for every eight rows, then the outputs."""
    spec, rows = call.spec, call.group * call.nq
    header = header_size(rows)
    shift = scratch_at(call, call.scratch).results + 4 * task * (header + rows * call.value_dim)
    fill(shift, header // 2, as_number(-np.inf, spec), spec)
    fill(shift + 2 * header, header // 2 + rows * call.value_dim, 0.0, spec)  # the output follows
    fill(own.partial, 16 * (CACHE_ROWS + 1), 0.0, spec)
    if spec.packs_bf16:
        fill(own.zeros, call.value_dim, 0.0, spec)
    return Softmax(shift, shift + 2 * header, Sums(shift + 4 * header, rows, call.value_dim))


@device_function
def lay_out_queries(call, own, task):
    """The queries of a group as the dot products read them."""
    spec = call.spec
    nq = call.nq
    part = keys_of_part(call, task)
    rows = call.group * nq
    for row in range(rows):
        query = Tokens(part.batch, part.head * call.group + row // nq, row % nq, 1)
        q = rows_of(call.q, call.q_strides, query, call.head_dim, spec)
        lay_out_query(q, row, rows, own.queries, spec)


@device_function
def keys_of_part(call, task):
    """The keys of a task, counted from the first visible one."""
    kv_heads = call.heads // call.group
    part = task % call.parts
    head = task // call.parts
    blocks = -(-call.nk // CACHE_KEYS)
    first = blocks * part // call.parts * CACHE_KEYS
    end = min(call.nk, blocks * (part + 1) // call.parts * CACHE_KEYS)
    return Tokens(head // kv_heads, head % kv_heads, first, end - first)


@device_function
def in_cache(call, keys):
    """Where keys that are counted from the first visible one lie."""
    return Tokens(keys.batch, keys.head, call.first_key + keys.first, keys.count)


@device_function
def score_block(call, own, keys):
    """Scores (rows, CACHE_SCORES) of one block in units of log 2.

    Scores are -inf where hidden, and past the last key up to a multiple of 16; later ones are not set.
    """
    spec = call.spec
    nq = call.nq
    rows = call.group * call.nq
    hidden, row_bytes = splat(-np.inf, spec), spec.input_bytes * call.k_strides.n
    scale = as_number(call.options.scale, spec) * as_number(LOG2E, spec)
    softcap = as_number(call.options.softcap, spec)
    chunks = call.head_dim // spec.per_element // 16
    for j in range(0, keys.count, 16):
        some = Tokens(keys.batch, keys.head, keys.first + j, min(keys.count - j, 16))
        k = rows_of(call.k, call.k_strides, in_cache(call, some), call.head_dim, spec)
        exists = ALL_QUERIES >> np.uint64(64 - k.count)
        if spec.in_order and k.row != k.size:  # rows lie apart, and the CPU's own prefetcher does not follow
            prefetch_rows(k, 32, 48, spec)
        key_rows = KeyRows(k.at, row_bytes, k.count - 1, call.nk - some.first - 1)
        dot_products(key_rows, own.queries, rows, chunks, Packed(own.scores + 4 * j, 4 * CACHE_SCORES), spec)
        for row in range(rows):
            score = own.scores + 4 * (row * CACHE_SCORES + j)
            store(score, select_bits(exists, np.uint64(0), mul(load(score, spec), splat(scale, spec)), hidden))
    if call.bias or call.visible or softcap > 0:
        for row in range(rows):
            query = Tokens(keys.batch, keys.head * call.group + row // nq, row % nq, 1)
            finish_row(call, own.scores + 4 * row * CACHE_SCORES, query, keys)


@device_function
def finish_row(call, scores, query, keys):
    """Softcap and bias of the scores of one query; those of hidden keys, and past the last key, become -inf."""
    spec = call.spec
    step = call.bias_strides
    softcap = as_number(call.options.softcap, call.spec)
    whole = round_up(keys.count, 16)
    if softcap > 0:
        apply_softcap(scores, whole, softcap, spec)
    for j in range(whole):
        score = scores + 4 * j
        if j >= keys.count or not is_visible(call, query, keys.first + j):
            write(score, -np.inf, spec)
        elif call.bias:
            key = call.first_key + keys.first + j
            place = query.batch * step.b + query.head * step.h + query.first * step.q + key * step.k
            write(score, read(score, spec) + to_log2(read(call.bias + 4 * place, spec), spec), spec)


@device_function
def is_visible(call, query, key):
    """Whether a query sees a key, counted from the first visible one."""
    step = call.visible_strides
    place = query.batch * step.b + query.head * step.h + query.first * call.nk + key
    return call.visible == 0 or read_byte(call.visible + place) != 0


@device_function
def softmax_block(own, keys, softmax, spec):
    """One block of online softmax, eight rows at once: scores become weights, and the output so far is rescaled to the new shift.

    ``keys`` scores (whole vectors) of each row are set. There is a vector of shifts, and one of totals, for every eight rows; lanes
    8 .. 15 are those of 0 .. 7.
    """
    hidden = splat(-np.inf, spec)
    zero = splat(0.0, spec)
    one = splat(1.0, spec)
    row_maxima = own.partial + 64
    rows, size = softmax.output.count, softmax.output.size
    for row in range(0, rows, CACHE_ROWS):
        block, count = own.scores + 4 * CACHE_SCORES * row, min(CACHE_ROWS, rows - row)
        block_shift, block_total = softmax.shift + 64 * (row // CACHE_ROWS), softmax.total + 64 * (row // CACHE_ROWS)
        for i in range(count):
            greatest = hidden
            for address in range(block + 4 * CACHE_SCORES * i, block + 4 * (CACHE_SCORES * i + keys), 64):
                greatest = maximum(load(address, spec), greatest, spec)
            store(row_maxima + 64 * i, greatest)
        old = load(block_shift, spec)
        new = maximum(reduce_rows_max(row_maxima, spec), old, spec)
        shift = sub(zero, select_greater(new, hidden, new, zero))
        if any_greater(new, old):
            rescale = exp2(add(old, shift), spec)
            store(block_shift, new)
            store(block_total, mul(load(block_total, spec), rescale))
            store(own.partial, rescale)
            for i in range(count):
                factor = read(own.partial + 4 * i, spec)
                multiply_by(softmax.output.at + 4 * size * (row + i), size, factor, spec)
        store(own.partial, shift)
        for i in range(count):
            row_shift, total = splat(read(own.partial + 4 * i, spec), spec), zero
            for address in range(block + 4 * CACHE_SCORES * i, block + 4 * (CACHE_SCORES * i + keys), 64):
                weights = exp2(fma(load(address, spec), one, row_shift, spec), spec)
                store(address, weights)
                total = add(total, weights)
            store(row_maxima + 64 * i, total)
        store(block_total, add(load(block_total, spec), reduce_rows_sum(row_maxima, spec)))


@device_function
def add_visible_pairs(call, own, keys, v, output):
    """Output += weights x values, pair by pair: hidden values are not read, so a NaN among them has no effect."""
    spec, nq = call.spec, call.nq
    for row in range(output.count):
        query = Tokens(keys.batch, keys.head * call.group + row // nq, row % nq, 1)
        for j in range(keys.count):
            if is_visible(call, query, keys.first + j):
                weight = read(own.scores + 4 * (row * CACHE_SCORES + j), spec)
                for d in range(output.size):
                    x = read_input(v.at + spec.input_bytes * (j * v.row + d), spec)
                    address = output.at + 4 * (row * output.size + d)
                    write(address, read(address, spec) + weight * x, spec)


@device_function
def merge_parts(call, head):
    """Merge the parts of one key/value head, in their order, and its sinks: output and log-sum-exp, written to the arrays."""
    spec = call.spec
    nq = call.nq
    size = call.value_dim
    ninf = as_number(-np.inf, spec)
    kv_heads, rows = call.heads // call.group, call.group * call.nq
    batch, kv = head // kv_heads, head % kv_heads
    header, step = header_size(rows), 4 * (header_size(rows) + rows * size)
    first = scratch_at(call, call.scratch).results + head * call.parts * step
    for row in range(rows):
        h = kv * call.group + row // nq
        i = row % nq
        place = first + 4 * place_of_row(row)
        sink = read(call.sinks + 4 * h, spec) * as_number(LOG2E, spec) if call.sinks else ninf
        greatest, total = sink, as_number(0.0, spec)
        for part in range(call.parts):
            greatest = max(greatest, read(place + part * step, spec))
        if call.sinks and greatest > -np.inf:
            total = as_number(2.0, spec) ** (sink - greatest)
        sums = first + 4 * header + 4 * row * size  # the outputs of part 0
        for part in range(call.parts):
            shift = read(place + part * step, spec)
            factor = as_number(0.0, spec) if shift == -np.inf else as_number(2.0, spec) ** (shift - greatest)
            total += read(place + part * step + 2 * header, spec) * factor
            for d in range(0, 4 * size, 64):
                sum_before = load(sums + d, spec) if part else splat(0.0, spec)
                store(sums + d, fma(load(sums + part * step + d, spec), splat(factor, spec), sum_before, spec))
        factor = as_number(1.0, spec) / total if total != 0 else as_number(0.0, spec)
        query = (batch * call.heads + h) * nq + i
        round_row(sums, size, factor, call.o + spec.input_bytes * query * size, spec)
        if call.lse:
            lse = greatest * as_number(LN2, spec) + np.log(total) if total != 0 else ninf
            write(call.lse + 4 * query, lse, spec)
            if call.lse_residual:
                residual = greatest - times_log2e(lse, spec) + np.log2(total) if total != 0 else as_number(0.0, spec)
                write(call.lse_residual + 4 * query, residual, spec)
