"""Few queries against a long cache: each key and value is read once for all the query heads it serves.

Memory is the limit and not arithmetic, so nothing is turned: scores are dot products along the head, 16 keys at a time, and the output
is a sum of value rows. The cache is dealt out in parts, so that one sequence can fill the machine; the last task to finish a head
joins its parts, in their order, so that the result does not depend on which was faster.

Source: the split over keys of Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import by_spec, device_function, inlined
from lowtri.kernels.exponent import exp2
from lowtri.kernels.gemv import FOUR, dots, in_fours, pv
from lowtri.kernels.lanes import greatest_lane, sum_lanes
from lowtri.kernels.non_finite import all_finite
from lowtri.kernels.plan_walk import ALL
from lowtri.kernels.record import take
from lowtri.kernels.rows import fill, in_words, round_row, times
from lowtri.kernels.scores import LN2, LOG2E, cap, in_log2
from lowtri.kernels.simd import (
    fetch_add,
    fma,
    load,
    maximum,
    mul,
    number,
    only,
    read,
    read_byte,
    read_input,
    splat,
    store,
    write,
)
from lowtri.kernels.spec import KernelSpec

__all__ = ["KEYS", "decode", "scratch", "shared_scratch"]

KEYS = 128  # keys in a block of online softmax
PORTION = 32  # keys whose values stay in the first cache between the query heads of a group


def scratch(spec: KernelSpec, rows: int, d: int, dv: int) -> dict[str, int]:
    """Bytes of each part of the memory that one thread works in, for ``rows`` queries of a group's heads."""
    pairs = spec.rows == "pairs"
    return {
        "scores": 4 * rows * KEYS,
        "weights": 2 * rows * KEYS if pairs else 0,
        "zeros": 4 * dv if pairs else 0,
        "queries": 4 * -(-rows // FOUR) * FOUR * d // spec.per_word,
    }


def shared_scratch(groups: int, parts: int, rows: int, dv: int) -> dict[str, int]:
    """Bytes of what the threads share: a counter for each group of heads, which begins at 0, and what each part leaves behind."""
    return {"joined": 8 * groups, "results": 4 * groups * parts * (results_lead.py_func(rows) + rows * dv)}


@device_function
def results_lead(rows):
    """Numbers of shifts and sums (rows,) each before the outputs (rows, Dv) of a part."""
    return -(-2 * rows // 16) * 16


@device_function
def sees(call, b, h, i, j):
    """Whether query i of head h sees key j."""
    step = call.visible_strides
    return call.visible == 0 or read_byte(call.visible + b * step.b + h * step.h + i * call.nk + j) != 0


@device_function
def score_block(call, b, kv, key0, keys, queries, scores, spec):
    """Scores (rows, KEYS) of one block in units of log 2; -inf where hidden and past the end. Rows are (head of the group, query)."""
    group, nq, d, k_step, bias_step = call.group, call.nq, in_words(call.d, spec), call.k_strides, call.bias_strides
    rows, size, hidden = group * nq, spec.input_bytes, splat(-np.inf, spec)
    scale, softcap = number(call.options.scale, spec) * number(LOG2E, spec), number(call.options.softcap, spec)
    from_k = call.k + size * (b * k_step.b + kv * k_step.h + (call.first_key + key0) * k_step.n)
    for j in range(0, keys, 16):
        last = min(keys - j, 16) - 1
        real = ALL >> np.uint64(63 - last)
        at = from_k + size * j * k_step.n
        for row in range(0, rows, FOUR):
            to, fours_last = scores + 4 * (row * KEYS + j), min(FOUR, rows - row) - 1
            dots(at, size * k_step.n, last, queries + 4 * row * d, fours_last, d // 16, to, 4 * KEYS, spec)
        for row in range(rows):
            to = scores + 4 * (row * KEYS + j)
            store(to, only(real, np.uint64(0), mul(load(to, spec), splat(scale, spec)), hidden))
    for j in range(-(-keys // 16) * 16, KEYS, 16):
        for row in range(rows):
            store(scores + 4 * (row * KEYS + j), hidden)
    if softcap > 0:
        cap(scores, rows * KEYS, softcap, spec)
    if call.bias or call.visible or softcap > 0:
        for row in range(rows):
            h, i = kv * group + row // nq, row % nq
            for j in range(KEYS):
                place = scores + 4 * (row * KEYS + j)
                if j >= keys or not sees(call, b, h, i, key0 + j):
                    write(place, -np.inf, spec)
                elif call.bias:
                    key = call.first_key + key0 + j
                    at = b * bias_step.b + h * bias_step.h + i * bias_step.q + key * bias_step.k
                    write(place, read(place, spec) + in_log2(read(call.bias + 4 * at, spec), spec), spec)


@device_function
def weigh_block(scores, rows, m, l, output, dv, spec):
    """One block of online softmax, a row at a time: scores become weights, and the output so far the new shift."""
    zero, one = number(0.0, spec), splat(1.0, spec)
    for row in range(rows):
        line = scores + 4 * row * KEYS
        most = load(line, spec)
        for at in range(64, 4 * KEYS, 64):
            most = maximum(load(line + at, spec), most)
        old = read(m + 4 * row, spec)
        new = max(old, greatest_lane(most))
        if new > old:
            factor = zero if old == -np.inf else number(2.0, spec) ** (old - new)
            write(m + 4 * row, new, spec)
            write(l + 4 * row, read(l + 4 * row, spec) * factor, spec)
            times(output + 4 * row * dv, dv, factor, spec)
        shift, total = splat(-new if new > -np.inf else zero, spec), splat(0.0, spec)
        for at in range(0, 4 * KEYS, 64):
            weights = exp2(fma(load(line + at, spec), one, shift, spec), spec)
            store(line + at, weights)
            total = fma(weights, one, total, spec)
        write(l + 4 * row, read(l + 4 * row, spec) + sum_lanes(total), spec)


@by_spec
def weight_words(spec):
    """Weights (rows, KEYS) as words along the keys: address and bytes of a weight. Pairs are rounded into ``pairs``."""

    def numbers(weights, rows, pairs, spec):
        return weights, 4

    def rounded(weights, rows, pairs, spec):
        round_row(weights, rows * KEYS, pairs, spec)
        return pairs, 2

    return rounded if spec.rows == "pairs" else numbers


@device_function
def pv_block(weights, from_v, v_n, keys, rows, dv, output, pairs, zeros, spec):
    """Output += weights x values, in portions that stay in the first cache while all the rows use them."""
    (words, wide), size = weight_words(weights, rows, pairs, spec), spec.input_bytes
    for key in range(0, keys, PORTION):
        some, values = min(PORTION, keys - key), from_v + size * key * v_n
        pv(words + wide * key, wide * KEYS, rows, values, size * v_n, some, zeros, output, dv, spec)


@device_function
def add_visible(call, b, kv, key0, keys, from_v, weights, output, spec):
    """Output += weights x values, pair by pair: what is hidden is not touched, so a NaN there leaves no trace."""
    nq, dv, size = call.nq, call.dv, spec.input_bytes
    for row in range(call.group * nq):
        for j in range(keys):
            if sees(call, b, kv * call.group + row // nq, row % nq, key0 + j):
                weight = read(weights + 4 * (row * KEYS + j), spec)
                for d in range(dv):
                    to, x = output + 4 * (row * dv + d), read_input(from_v + size * (j * call.v_strides.n + d), spec)
                    write(to, read(to, spec) + weight * x, spec)


@inlined
def attend_part(call, memory, b, kv, part, non_finite, spec):
    """One part of the cache for all queries of a group: shifts, sums and outputs go to the part's place in the results."""
    nq, nk, dv, size, q_step, v_step = call.nq, call.nk, call.dv, spec.input_bytes, call.q_strides, call.v_strides
    rows, at = call.group * nq, call.offsets
    scores, pairs, zeros, queries = memory + at.scores, memory + at.weights, memory + at.zeros, memory + at.queries
    lead, results = results_lead(rows), (b * (call.heads // call.group) + kv) * call.parts + part
    m = call.scratch + at.results + 4 * results * (lead + rows * dv)
    l, output = m + 4 * rows, m + 4 * lead
    for row in range(rows):
        write(m + 4 * row, -np.inf, spec)
        write(l + 4 * row, 0.0, spec)
    fill(output, rows * dv, 0.0, spec)
    if spec.per_word > 1:
        fill(zeros, dv, 0.0, spec)
    for place in range(-(-rows // FOUR) * FOUR):
        row = min(place, rows - 1)  # the last one stands in for those past it
        from_q = call.q + size * (b * q_step.b + (kv * call.group + row // nq) * q_step.h + row % nq * q_step.n)
        in_fours(from_q, place, in_words(call.d, spec), queries, spec)
    blocks = -(-nk // KEYS)
    for block in range(blocks * part // call.parts, blocks * (part + 1) // call.parts):
        key0 = block * KEYS
        keys = min(KEYS, nk - key0)
        score_block(call, b, kv, key0, keys, queries, scores, spec)
        weigh_block(scores, rows, m, l, output, dv, spec)
        from_v = call.v + size * (b * v_step.b + kv * v_step.h + (call.first_key + key0) * v_step.n)
        if non_finite:
            add_visible(call, b, kv, key0, keys, from_v, scores, output, spec)
        else:
            pv_block(scores, from_v, v_step.n, keys, rows, dv, output, pairs, zeros, spec)
    return output, rows * dv


@device_function
def join(call, b, kv, spec):
    """The parts of one head, in their order, with the sink: output and log-sum-exp to memory."""
    nq, dv, rows, ninf = call.nq, call.dv, call.group * call.nq, number(-np.inf, spec)
    lead, step = results_lead(rows), 4 * (results_lead(rows) + rows * dv)
    first = call.scratch + call.offsets.results + (b * (call.heads // call.group) + kv) * call.parts * step
    for row in range(rows):
        h, i = kv * call.group + row // nq, row % nq
        sink = read(call.sinks + 4 * h, spec) * number(LOG2E, spec) if call.sinks else ninf
        most, total = sink, number(0.0, spec)
        for part in range(call.parts):
            most = max(most, read(first + part * step + 4 * row, spec))
        if call.sinks and most > -np.inf:
            total = number(2.0, spec) ** (sink - most)
        sums = first + 4 * lead + 4 * row * dv  # part 0 gathers
        for part in range(call.parts):
            shift = read(first + part * step + 4 * row, spec)
            factor = number(0.0, spec) if shift == -np.inf else number(2.0, spec) ** (shift - most)
            total += read(first + part * step + 4 * (rows + row), spec) * factor
            from_part = sums + part * step
            for d in range(0, 4 * dv, 64):
                so_far = load(sums + d, spec) if part else splat(0.0, spec)
                store(sums + d, fma(load(from_part + d, spec), splat(factor, spec), so_far, spec))
        times(sums, dv, number(1.0, spec) / total if total != 0 else number(0.0, spec), spec)
        line = (b * call.heads + h) * nq + i
        round_row(sums, dv, call.o + spec.input_bytes * line * dv, spec)
        if call.lse:
            write(call.lse + 4 * line, most * number(LN2, spec) + np.log(total) if total != 0 else ninf, spec)


def decode(call):
    """The kernel: takes tasks until none is left. Parts of one head are neighbours."""
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
            non_finite = True  # a NaN or inf among the values; what is hidden must leave no trace: again, pair by pair
        if fetch_add(call.scratch + call.offsets.joined + 8 * head, 1) == call.parts - 1:
            join(call, b, kv, call.spec)
