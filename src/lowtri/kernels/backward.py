"""The gradients of attention, tile by tile of the same plan.

A task is one key/value head (or, where there are more threads than heads, every n-th row of its queries). It owns its share of dK
and dV, so nothing is added up by two threads at once and the result does not depend on which was faster. Five products a tile, all
with queries in lanes; ``weights`` and ``ds`` (dS^T) come out as the A of the next ones, so nothing is turned:

    scores  = K Q^T                      weights = 2 ** (scores - lse)
    dP^T    = V dO^T                     dS      = weights * (dP - delta),   delta = sum of dO * O
    dV     += weights dO                 dK     += dS Q                      dQ^T += K^T dS

dP and delta round apart, so their difference is off by a few roundings of |dO| |V|, also where it should be 0 (one key has all
the weight) and the plain formula, which takes both from the same numbers, gives 0: the floor of the gradients' precision.

Source: FlashAttention (Dao et al. 2022), appendix B.4; delta as in FlashAttention-2 (2023).
"""

from __future__ import annotations

from lowtri.kernels.device_function import by_spec, inlined
from lowtri.kernels.ds import add_d_bias, query_rows, shifts, slopes_of, times_slopes, weights_and_ds
from lowtri.kernels.forward import KEYS
from lowtri.kernels.non_finite import add_key_rows, add_query_rows, clean_rows, input_rows_finite
from lowtri.kernels.plan_walk import tiles
from lowtri.kernels.product import product, product_add
from lowtri.kernels.record import take
from lowtri.kernels.rows import (
    fill,
    head_words,
    in_words,
    key_words,
    rows_in_place,
    sum_words,
    times,
    turn_in,
    turn_out,
)
from lowtri.kernels.scores import LOG2E, add_bias, cap
from lowtri.kernels.simd import number
from lowtri.kernels.spec import QUERIES, KernelSpec

__all__ = ["backward", "padded", "scratch"]


def padded(spec: KernelSpec, size: int) -> int:
    """A head size rounded up to whole vectors: what a packed row of Q, dO, dK or dV takes."""
    return -(-size // spec.lanes) * spec.lanes


def scratch(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    """Bytes of each part of the memory that one thread works in."""
    row, wide, pairs = spec.row_bytes, spec.number_bytes, spec.rows == "pairs"
    d_rows, dv_rows = wide * QUERIES * padded(spec, d), wide * QUERIES * padded(spec, dv)
    return {
        "queries": row * d,
        "d_output": row * dv,
        "dq": row * d,
        "scores": row * KEYS,
        "ds": row * KEYS,
        "slopes": row * KEYS,  # in pairs also dS for dQ
        "shift": row,
        "delta": row,
        "q_rows": d_rows,
        "d_output_rows": dv_rows,
        "finite_q": d_rows,
        "finite_d_output": dv_rows,
        "keys": wide * KEYS * padded(spec, d),
        "values": wide * KEYS * dv if spec.rows == "widened" else 0,
        "q_pairs": d_rows // 2 if pairs else 0,
        "d_output_pairs": dv_rows // 2 if pairs else 0,
        "zeros": wide * padded(spec, d) if pairs else 0,
    }


@by_spec
def turned_rows(spec):
    """n query rows as words with queries in lanes: from the array where it holds pairs, else from its packed copy."""

    def from_copy(source, row_step, step, n, size, rows, row, target, spec):
        turn_in(rows, row, 1, n, size, target, spec)

    def from_array(source, row_step, step, n, size, rows, row, target, spec):
        turn_in(source, row_step // 2, step, n, size // 2, target, spec)

    return from_array if spec.rows == "pairs" else from_copy


@by_spec
def keys_for_dq(spec):
    """K as words along the keys; where rows are widened, ``widened`` holds them since the scores."""

    def as_they_are(source, row_step, step, n, size, zeros, target, spec):
        return key_words(source, row_step, step, n, size, zeros, target, spec)

    def widened(source, row_step, step, n, size, zeros, target, spec):
        return target, size, 1

    return widened if spec.rows == "widened" else as_they_are


@inlined
def backward_tile(call, memory, part, b, h, r, spec):
    """One tile of queries: its dQ, and what it adds to dK, dV and d bias."""
    d, dv, nk, kv, wide = call.d, call.dv, call.nk, h // call.group, spec.number_bytes
    d_row, dv_row = -(-d // spec.lanes) * spec.lanes, -(-dv // spec.lanes) * spec.lanes
    at, q_step, k_step = call.offsets, call.q_strides, call.k_strides
    v_step, do_step = call.v_strides, call.d_output_strides
    queries, d_output, dq = memory + at.queries, memory + at.d_output, memory + at.dq
    scores, ds, slopes = memory + at.scores, memory + at.ds, memory + at.slopes
    shift, delta, zeros = memory + at.shift, memory + at.delta, memory + at.zeros
    q_rows, do_rows = memory + at.q_rows, memory + at.d_output_rows
    k_rows, v_rows = memory + at.keys, memory + at.values
    n = min(QUERIES, call.nq - r * QUERIES)
    scale, softcap = number(call.options.scale, spec), number(call.options.softcap, spec)
    line = (b * call.heads + h) * call.nq + r * QUERIES
    lse = call.lse + wide * line
    from_q = call.q + spec.input_bytes * (b * q_step.b + h * q_step.h + r * QUERIES * q_step.n)
    from_do = call.d_output + spec.input_bytes * (b * do_step.b + h * do_step.h + r * QUERIES * do_step.n)
    finite = query_rows(from_q, q_step.n, q_step.d, n, d, lse, q_rows, d_row, spec)
    finite = query_rows(from_do, do_step.n, do_step.d, n, dv, lse, do_rows, dv_row, spec) and finite
    turned_rows(from_q, q_step.n, q_step.d, n, d, q_rows, d_row, queries, spec)
    turned_rows(from_do, do_step.n, do_step.d, n, dv, do_rows, dv_row, d_output, spec)
    q_words = sum_words(q_rows, n, d_row, memory + at.q_pairs, spec)
    do_words = sum_words(do_rows, n, dv_row, memory + at.d_output_pairs, spec)
    shifts(lse, call.delta + wide * line, n, shift, delta, spec)
    if spec.per_word > 1:
        fill(zeros, d, 0.0, spec)
    fill(dq, QUERIES * d, 0.0, spec)
    head_row = ((part * call.batch + b) * (call.heads // call.group) + kv) * nk
    for key0, keys, words in tiles(call.plan, b, h, r, KEYS, nk):
        from_k = call.k + spec.input_bytes * (b * k_step.b + kv * k_step.h + key0 * k_step.n)
        from_v = call.v + spec.input_bytes * (b * v_step.b + kv * v_step.h + key0 * v_step.n)
        k, k_n, k_d = head_words(from_k, k_step.n, k_step.d, keys, d, k_rows, spec)
        product(k, k_n, k_d, queries, QUERIES, scores, QUERIES, keys, in_words(d, spec), QUERIES, spec)
        v, v_n, v_d = head_words(from_v, v_step.n, v_step.d, keys, dv, v_rows, spec)
        product(v, v_n, v_d, d_output, QUERIES, ds, QUERIES, keys, in_words(dv, spec), QUERIES, spec)
        unit = scale * number(LOG2E, spec)
        if softcap > 0 or call.bias:  # these work on scaled scores
            times(scores, QUERIES * keys, unit, spec)
            unit = number(1.0, spec)
        if softcap > 0:
            cap(scores, QUERIES * keys, softcap, spec)
            slopes_of(scores, slopes, keys, softcap, spec)
        if call.bias:
            step = call.bias_strides
            start = b * step.b + h * step.h + r * QUERIES * step.q + key0 * step.k
            add_bias(scores, call.bias + wide * start, step.q, step.k, n, keys, spec)
        weights_and_ds(scores, ds, unit, words, keys, shift, delta, spec)
        if call.d_bias:
            to = call.d_bias_strides
            start = part * to.part + b * to.b + h * to.h + r * QUERIES * to.q + key0 * to.k
            add_d_bias(ds, call.d_bias + wide * start, to.q, to.k, n, keys, spec)
        if softcap > 0:
            times_slopes(ds, slopes, words, keys, spec)
        to_dk, to_dv = call.dk + wide * (head_row + key0) * d_row, call.dv_sums + wide * (head_row + key0) * dv_row
        some_q, some_do = q_words, do_words
        if words != 0 and not (finite and input_rows_finite(from_k, k_step.n, k_step.d, keys, d, spec)):
            # A row of Q, dO or K is not finite, and some pairs are hidden: it reaches those that see it, row by row.
            add_query_rows(scores, words, keys, do_rows, n, dv_row, to_dv, spec)
            add_query_rows(ds, words, keys, q_rows, n, d_row, to_dk, spec)
            some_q, some_do = memory + at.finite_q, memory + at.finite_d_output
            clean_rows(q_rows, n, d_row, some_q, spec)
            clean_rows(do_rows, n, dv_row, some_do, spec)
            some_q, some_do = sum_words(some_q, n, d_row, some_q, spec), sum_words(some_do, n, dv_row, some_do, spec)
            add_key_rows(from_k, k_step.n, k_step.d, ds, words, keys, dq, d, k_rows, spec)
            k, k_n, k_d = sum_words(k_rows, keys, d, k_rows, spec), d, 1
        else:
            k, k_n, k_d = keys_for_dq(from_k, k_step.n, k_step.d, keys, d, zeros, k_rows, spec)
        key_ds = sum_words(ds, keys, QUERIES, slopes, spec)
        rows_in_place(scores, keys, spec)
        rows_in_place(ds, keys, spec)
        n_words = in_words(n, spec)
        product_add(scores, QUERIES, 1, some_do, dv_row, to_dv, dv_row, keys, n_words, dv_row, spec)
        product_add(ds, QUERIES, 1, some_q, d_row, to_dk, d_row, keys, n_words, d_row, spec)
        product_add(k, k_d, k_n, key_ds, QUERIES, dq, QUERIES, d, in_words(keys, spec), QUERIES, spec)
    times(dq, QUERIES * d, scale, spec)
    turn_out(dq, n, d, call.dq + wide * line * d, d, spec)


def backward(call):
    """The kernel: takes tasks until none is left. Sums, and the gradients that it writes, have the compute dtype."""
    memory = call.scratch + call.thread_bytes * take(call.next_thread)
    kv_heads = call.heads // call.group
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            return
        part, head = task % call.parts, task // call.parts
        b, kv = head // kv_heads, head % kv_heads
        for h in range(kv * call.group, (kv + 1) * call.group):
            for r in range(part, call.plan.rows, call.parts):
                backward_tile(call, memory, part, b, h, r, call.spec)
