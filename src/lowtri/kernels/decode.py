"""Few queries against a long cache: each key and value is read once for all query heads of its group.

Memory bandwidth is the limit, so nothing is transposed: scores are dot products along the head dimension, 16 keys at a time, and the
output is a weighted sum of value rows. The cache is split into parts, so that all threads work on one sequence; the last task of a head
to finish merges the head's parts, in a fixed order, so the result does not depend on the order in which threads finish.

Source: the split over keys of Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import scratch
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.exponent import exp2
from lowtri.kernels.gemv import dot_products, lay_out_query, pv
from lowtri.kernels.plan_walk import ALL_QUERIES
from lowtri.kernels.record import take
from lowtri.kernels.rows import fill, multiply_by, prefetch_rows, round_row, round_up, word_count
from lowtri.kernels.scores import LN2, LOG2E, apply_softcap, to_log2
from lowtri.kernels.scratch import CACHE_BLOCK, CACHE_KEYS, CACHE_SCORES
from lowtri.kernels.scratch import CACHE_ROWS as ROWS
from lowtri.kernels.simd import (
    add,
    any_greater,
    as_number,
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
    write,
)
from lowtri.kernels.tile_output import all_finite

__all__ = ["decode"]

# Bytes of the next rows, where keys and values change places: the CPU's own prefetcher begins anew there.
PREFETCHED = 2**13

header_size, place_of_row = device_function(scratch.header_size), device_function(scratch.place_of_row)


@device_function
def is_visible(call, b, h, i, j):
    """Whether query i of head h sees key j."""
    step = call.visible_strides
    return call.visible == 0 or read_byte(call.visible + b * step.b + h * step.h + i * call.nk + j) != 0


@device_function
def score_block(call, b, kv, key0, keys, queries, scores, spec):
    """Scores (rows, CACHE_SCORES) of one block in units of log 2. Rows are (head of the group, query).

    Scores are -inf where hidden, and past the last key up to a multiple of 16; later ones are not set.
    """
    group, nq, k_step, bias_step = call.group, call.nq, call.k_strides, call.bias_strides
    rows, d, hidden, row_bytes = group * nq, word_count(call.d, spec), splat(-np.inf, spec), spec.input_bytes * k_step.n
    scale, softcap = as_number(call.options.scale, spec) * as_number(LOG2E, spec), as_number(call.options.softcap, spec)
    k = call.k + spec.input_bytes * (b * k_step.b + kv * k_step.h + (call.first_key + key0) * k_step.n)
    for j in range(0, keys, 16):
        keys_16, last_key = k + row_bytes * j, min(keys - j, 16) - 1
        exists = ALL_QUERIES >> np.uint64(63 - last_key)
        last_row = call.nk - key0 - j - 1
        if spec.in_order and k_step.n != call.d:  # rows lie apart, and the CPU's own prefetcher does not follow
            prefetch_rows(keys_16, k_step.n, 32, 48, call.d, spec)
        target, target_step = scores + 4 * j, 4 * CACHE_SCORES
        dot_products(keys_16, row_bytes, last_key, last_row, queries, rows, d // 16, target, target_step, spec)
        for row in range(rows):
            score = scores + 4 * (row * CACHE_SCORES + j)
            store(score, select_bits(exists, np.uint64(0), mul(load(score, spec), splat(scale, spec)), hidden))
    whole = round_up(keys, 16)
    if call.bias or call.visible or softcap > 0:
        for row in range(rows):
            h, i = kv * group + row // nq, row % nq
            if softcap > 0:
                apply_softcap(scores + 4 * row * CACHE_SCORES, whole, softcap, spec)
            for j in range(whole):
                score = scores + 4 * (row * CACHE_SCORES + j)
                if j >= keys or not is_visible(call, b, h, i, key0 + j):
                    write(score, -np.inf, spec)
                elif call.bias:
                    key = call.first_key + key0 + j
                    index = b * bias_step.b + h * bias_step.h + i * bias_step.q + key * bias_step.k
                    write(score, read(score, spec) + to_log2(read(call.bias + 4 * index, spec), spec), spec)


@device_function
def softmax_block(scores, keys, rows, m, l, output, dv, partial, spec):
    """One block of online softmax, eight rows at once: scores become weights, and the output so far is rescaled to the new shift.

    Args:
        scores: address of (rows, CACHE_SCORES), of which ``keys`` (whole vectors) are set.
        m, l: addresses of the shifts and sums, a vector for every eight rows; lanes 8 .. 15 are those of 0 .. 7.
        output: address of (rows, dv).  partial: scratch for nine vectors.
    """
    hidden, zero, one = splat(-np.inf, spec), splat(0.0, spec), splat(1.0, spec)
    for row in range(0, rows, ROWS):
        block, count = scores + 4 * CACHE_SCORES * row, min(ROWS, rows - row)
        of_rows, block_m, block_l = partial + 64, m + 64 * (row // ROWS), l + 64 * (row // ROWS)
        for i in range(count):
            greatest = hidden
            for address in range(block + 4 * CACHE_SCORES * i, block + 4 * (CACHE_SCORES * i + keys), 64):
                greatest = maximum(load(address, spec), greatest, spec)
            store(of_rows + 64 * i, greatest)
        old = load(block_m, spec)
        new = maximum(reduce_rows_max(of_rows, spec), old, spec)
        shift = sub(zero, select_greater(new, hidden, new, zero))
        if any_greater(new, old):
            rescale = exp2(add(old, shift), spec)
            store(block_m, new)
            store(block_l, mul(load(block_l, spec), rescale))
            store(partial, rescale)
            for i in range(count):
                multiply_by(output + 4 * dv * (row + i), dv, read(partial + 4 * i, spec), spec)
        store(partial, shift)
        for i in range(count):
            row_shift, total = splat(read(partial + 4 * i, spec), spec), zero
            for address in range(block + 4 * CACHE_SCORES * i, block + 4 * (CACHE_SCORES * i + keys), 64):
                weights = exp2(fma(load(address, spec), one, row_shift, spec), spec)
                store(address, weights)
                total = add(total, weights)
            store(of_rows + 64 * i, total)
        store(block_l, add(load(block_l, spec), reduce_rows_sum(of_rows, spec)))


@by_spec
def weight_operand(spec):
    """Weights (rows, CACHE_SCORES) as an operand with words along the keys: its address, and the bytes of a weight.

    ``pairs`` is scratch.
    """

    def numbers(weights, keys, rows, pairs, spec):
        return weights, 4

    def rounded(weights, keys, rows, pairs, spec):
        for row in range(rows):
            first = CACHE_SCORES * row
            round_row(weights + 4 * first, keys, as_number(1.0, spec), pairs + 2 * first, spec)
        return pairs, 2

    return rounded if spec.operand == "pairs" else numbers


@device_function
def add_visible_pairs(call, b, kv, key0, keys, v, weights, output, spec):
    """Output += weights x values, pair by pair: hidden values are not read, so a NaN among them has no effect."""
    nq, dv, input_bytes = call.nq, call.dv, spec.input_bytes
    for row in range(call.group * nq):
        for j in range(keys):
            if is_visible(call, b, kv * call.group + row // nq, row % nq, key0 + j):
                weight = read(weights + 4 * (row * CACHE_SCORES + j), spec)
                for d in range(dv):
                    x = read_input(v + input_bytes * (j * call.v_strides.n + d), spec)
                    address = output + 4 * (row * dv + d)
                    write(address, read(address, spec) + weight * x, spec)


@device_function
def attend_part(call, memory, b, kv, part, non_finite, spec):
    """One part of the cache for all queries of a group: shifts m, sums l and outputs, in the results of this part."""
    nq, nk, dv, input_bytes = call.nq, call.nk, call.dv, spec.input_bytes
    q_step, k_step, v_step = call.q_strides, call.k_strides, call.v_strides
    offsets, rows = call.offsets, call.group * call.nq
    scores, pairs = memory + offsets.scores, memory + offsets.weights
    zeros, queries = memory + offsets.zeros, memory + offsets.queries
    header, index = header_size(rows), (b * (call.heads // call.group) + kv) * call.parts + part
    m = call.scratch + offsets.results + 4 * index * (header + rows * dv)
    l, output, partial = m + 2 * header, m + 4 * header, memory + offsets.partial
    fill(m, header // 2, as_number(-np.inf, spec), spec)
    fill(l, header // 2 + rows * dv, 0.0, spec)  # the output follows
    fill(partial, 16 * (ROWS + 1), 0.0, spec)
    if spec.per_word > 1:
        fill(zeros, dv, 0.0, spec)
    for row in range(rows):
        q = call.q + input_bytes * (b * q_step.b + (kv * call.group + row // nq) * q_step.h + row % nq * q_step.n)
        lay_out_query(q, row, rows, word_count(call.d, spec), queries, spec)
    blocks = -(-nk // CACHE_KEYS)
    key0, end = blocks * part // call.parts * CACHE_KEYS, min(nk, blocks * (part + 1) // call.parts * CACHE_KEYS)
    # Every change from keys to values costs the time of some reads: blocks are as long as their scores stay in the first caches.
    most = max(CACHE_BLOCK * ROWS // max(rows, ROWS) // CACHE_KEYS, 1) * CACHE_KEYS
    while key0 < end:
        keys = min(most, end - key0)
        score_block(call, b, kv, key0, keys, queries, scores, spec)
        v = call.v + input_bytes * (b * v_step.b + kv * v_step.h + (call.first_key + key0) * v_step.n)
        prefetch_rows(v, v_step.n, 0, PREFETCHED // (input_bytes * dv), dv, spec)
        softmax_block(scores, round_up(keys, 16), rows, m, l, output, dv, partial, spec)
        k = call.k + input_bytes * (b * k_step.b + kv * k_step.h + (call.first_key + key0 + keys) * k_step.n)
        prefetch_rows(k, k_step.n, 0, PREFETCHED // (input_bytes * call.d), call.d, spec)
        if non_finite:
            add_visible_pairs(call, b, kv, key0, keys, v, scores, output, spec)
        else:
            weights, weight_bytes = weight_operand(scores, round_up(keys, 16), rows, pairs, spec)
            pv(weights, weight_bytes * CACHE_SCORES, rows, v, input_bytes * v_step.n, keys, zeros, output, dv, spec)
        key0 += keys
    return output, rows * dv


@device_function
def merge_parts(call, b, kv, spec):
    """Merge the parts of one head, in their order, and its sink: output and log-sum-exp, written to the arrays."""
    nq, dv, rows, ninf = call.nq, call.dv, call.group * call.nq, as_number(-np.inf, spec)
    header, step = header_size(rows), 4 * (header_size(rows) + rows * dv)
    first = call.scratch + call.offsets.results + (b * (call.heads // call.group) + kv) * call.parts * step
    for row in range(rows):
        h, i, place = kv * call.group + row // nq, row % nq, first + 4 * place_of_row(row)
        sink = read(call.sinks + 4 * h, spec) * as_number(LOG2E, spec) if call.sinks else ninf
        greatest, total = sink, as_number(0.0, spec)
        for part in range(call.parts):
            greatest = max(greatest, read(place + part * step, spec))
        if call.sinks and greatest > -np.inf:
            total = as_number(2.0, spec) ** (sink - greatest)
        sums = first + 4 * header + 4 * row * dv  # the outputs of part 0
        for part in range(call.parts):
            shift = read(place + part * step, spec)
            factor = as_number(0.0, spec) if shift == -np.inf else as_number(2.0, spec) ** (shift - greatest)
            total += read(place + part * step + 2 * header, spec) * factor
            for d in range(0, 4 * dv, 64):
                sum_before = load(sums + d, spec) if part else splat(0.0, spec)
                store(sums + d, fma(load(sums + part * step + d, spec), splat(factor, spec), sum_before, spec))
        factor = as_number(1.0, spec) / total if total != 0 else as_number(0.0, spec)
        query = (b * call.heads + h) * nq + i
        round_row(sums, dv, factor, call.o + spec.input_bytes * query * dv, spec)
        if call.lse:
            write(call.lse + 4 * query, greatest * as_number(LN2, spec) + np.log(total) if total != 0 else ninf, spec)


def decode(call):
    """The kernel: takes tasks until none is left. The parts of one head follow one another."""
    memory = call.scratch + call.thread_bytes * take(call.next_thread)
    kv_heads = call.heads // call.group
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            return
        part, head = task % call.parts, task // call.parts
        b, kv = head // kv_heads, head % kv_heads
        non_finite = False
        while True:
            output, count = attend_part(call, memory, b, kv, part, non_finite, call.spec)
            if non_finite or all_finite(output, count, call.spec):
                break
            non_finite = True  # Some value is NaN or inf, and it may be hidden: compute the part again, pair by pair.
        if fetch_add(call.scratch + call.offsets.parts_done + 8 * head, 1) == call.parts - 1:
            merge_parts(call, b, kv, call.spec)
