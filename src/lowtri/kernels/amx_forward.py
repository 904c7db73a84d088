"""The forward pass on AMX: in steps of one half of the queries of a tile, 32, with the keys of one key tile.

A step's product with the values follows the next step's scores, since loads of tiles wait for stores that are under way; V is
transposed once for each key/value head, in one copy that all threads share. Weights are computed before the maximum of the scores is
known.
"""

from __future__ import annotations

from typing import NamedTuple

from lowtri.kernels import dropout, rows
from lowtri.kernels.amx import finite_rows_operand
from lowtri.kernels.amx_tiles import HALF_ROW, add_to_half, score_half
from lowtri.kernels.device import device_function
from lowtri.kernels.operands import key_operand, value_operand
from lowtri.kernels.simd import (
    LOG2E,
    add,
    any_greater,
    as_number,
    div,
    exp2,
    fma,
    high_numbers,
    load,
    low_numbers,
    maximum,
    mul,
    pair_weights,
    select_greater,
    splat,
    store,
    store_rounded_block,
    sub,
)
from lowtri.kernels.softmax import (
    LARGE,
    MAX_RISE,
    apply_mask,
    finish_scores,
    new_shift,
    shifts_large_scores,
)
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tiles import ALL_TILES, half_span, visible_tiles
from lowtri.kernels.values import Address, Packed, Packing, Rows, Softmax, Span, Spans, Sums, Tokens

_HALF = QUERIES // 2


class Step(NamedTuple):
    """The queries from ``query`` on, counted from the tile's first, with some keys of a key tile."""

    query: int
    keys: Span
    is_first: bool  # no key has been seen: the product with the values sets the output


class PendingProduct(NamedTuple):
    """A step's product with the values that is still to be computed."""

    values: Address
    output: Address
    keys: Span
    is_first: bool


@device_function
def attend_tile(call, own, queries, non_finite):
    """One tile of queries: see :func:`lowtri.kernels.forward.attend_tile`."""
    spec, size = call.spec, call.value_dim
    has_output = 0  # a bit for each half of the queries whose output has been set
    if non_finite:
        rows.zero_sums(Sums(own.output, queries.count, size), spec)
        has_output = 3
    per_pass = QUERIES
    if call.head_dim + size <= 192 and 2 * queries.count > QUERIES:
        # Long rows read K and V for one half of the queries after the other, so that the halves' memory stays in the first cache;
        # where heads are large, both halves share what they read.
        per_pass = _HALF
    pending = PendingProduct(0, 0, Span(0, 0), False)
    for first_query in range(0, queries.count, per_pass):
        for keys in visible_tiles(call, queries, 0, ALL_TILES):
            for query in range(first_query, min(queries.count, first_query + per_pass), _HALF):
                seen = half_span(keys, query)
                if seen.first != seen.stop:
                    step = Step(query, seen, not (has_output >> (query // _HALF)) & 1)
                    pending = attend_step(call, own, queries, keys, step, pending, non_finite)
                    has_output |= 1 << (query // _HALF)
    finish_product(own, pending, size)
    for half in range(2):  # queries that see nothing
        if not (has_output >> half) & 1:
            rows.fill_columns(own.output + HALF_ROW * half, size, _HALF, spec)


@device_function
def attend_step(call, own, queries, keys, step, pending, non_finite):
    """The scores of a step, then the pending product, then the step's weights; returns its own product, which is pending then."""
    spec, lane = call.spec, 4 * step.query
    k = key_operand(call, own, keys, 0)  # (keys, D)
    size, depths = call.value_dim, rows.round_up(rows.element_count(call.head_dim, spec), 16) // 16
    scores = Packed(own.scores, spec.step_row_bytes)  # (keys, 32)
    score_half(k, own.queries + lane * 16 * depths, scores, depths, step.keys, spec)
    finish_product(own, pending, size)
    weigh_step(call, own, queries, keys, step)
    if non_finite:
        v = finite_values(call, own, keys, step.query)
    else:
        v = value_operand(call, own, keys, 0)
    return PendingProduct(v.at, own.output + lane, step.keys, step.is_first)


@device_function
def finish_product(own, pending, size):
    """Compute a pending product with the weights."""
    spec, sums = own.spec, Sums(pending.output, _HALF, size)
    add_to_half(Packed(pending.values, 64), Packed(own.weights, HALF_ROW), sums, pending.keys, pending.is_first, spec)


@device_function
def weigh_step(call, own, queries, keys, step):
    """Scores become weights, pairs of keys (keys / 2, 32); those that are dropped 0."""
    spec, query = call.spec, step.query
    scale = as_number(call.options.scale, spec) * as_number(LOG2E, spec)
    some = Tokens(queries.batch, queries.head, queries.first + query, min(_HALF, queries.count - query))
    if scale <= 0:
        rows.multiply_by(own.scores, _HALF * keys.count, scale, spec)
        scale = as_number(1.0, spec)
    scale = finish_scores(call, Packed(own.scores, spec.step_row_bytes), scale, some, keys, 0)
    if keys.mask_words:
        first, stop = step.keys.first, step.keys.stop
        apply_mask(own.scores, keys, query, Spans((first, stop, first, stop, 0, 0, 0, 0), 1), spec)
    lane, size = 4 * query, 0 if step.is_first else call.value_dim
    softmax = Softmax(own.shift + lane, own.total + lane, Sums(own.output + lane, _HALF, size))
    softmax_bf16x2(own, scale, step.keys, softmax)
    if call.dropout.key_words:
        dropout.draw_tile(call, own, keys, query, min(queries.count, query + _HALF))
        dropout.drop_pairs(own, query, step.keys)


@device_function
def softmax_bf16x2(own, scale_log2, keys, softmax):
    """The weights of a step, as in :func:`lowtri.kernels.softmax.softmax_tile`, as pairs of keys.

    The weights are computed with the shift so far; their sum tells whether one may exceed the limit, beyond which the shift is
    raised. Only then, and while a query has seen no key, is the greatest score looked for. Pairs are written from the first key on, a
    multiple of 32, with zeros up to a multiple of 32.
    """
    spec = own.spec
    for vector in range(spec.step_row_bytes // 64 if keys.stop > keys.first else 0):
        state = rows.softmax_of_vector(softmax, vector, spec)
        factors = splat(scale_log2, spec)
        zero = splat(0.0, spec)
        column, target = Packed(own.scores + 64 * vector, spec.step_row_bytes), own.weights + 64 * vector
        old = load(state.shift, spec)
        # A maximum that rose by more than MAX_RISE has a weight of 2 ** MAX_RISE, less the error of exp2. The limit is lower, so that
        # no query's shift depends on whether another query of the vector exceeds it.
        limit = splat(2.0**MAX_RISE - 1.0, spec)
        shift = total = sub(zero, old)
        needs_maximum = any_greater(maximum(shift, old, spec), splat(LARGE, spec))
        while True:
            if needs_maximum:
                shift = new_shift(column, factors, keys, state, spec)
                if shifts_large_scores(column, factors, shift, keys, spec):
                    factors, shift = splat(1.0, spec), zero
            total = weights_bf16x2(column, factors, shift, keys, target, spec)
            if needs_maximum or not any_greater(total, limit):
                break
            needs_maximum = True
        store(state.total, add(load(state.total, spec), total))


@device_function
def weights_bf16x2(scores, factors, shift, keys, target, spec):
    """Weights 2 ** (factors * score + shift) of 16 queries as pairs of keys; returns their sum."""
    zero, step = splat(0.0, spec), spec.step_row_bytes
    a = b = c = d = zero
    j = keys.first
    while j + 4 <= keys.stop:
        row, to = scores.at + step * j, target + step * (j // 2)
        e = exp2(fma(load(row, spec), factors, shift, spec), spec)
        f = exp2(fma(load(row + step, spec), factors, shift, spec), spec)
        g = exp2(fma(load(row + 2 * step, spec), factors, shift, spec), spec)
        h = exp2(fma(load(row + 3 * step, spec), factors, shift, spec), spec)
        store(to, pair_weights(e, f, spec))
        store(to + step, pair_weights(g, h, spec))
        a, b = add(a, e), add(b, f)
        c, d = add(c, g), add(d, h)
        j += 4
    while j < keys.stop:
        e, f = exp2(fma(load(scores.at + step * j, spec), factors, shift, spec), spec), zero
        if j + 1 < keys.stop:
            f = exp2(fma(load(scores.at + step * (j + 1), spec), factors, shift, spec), spec)
        store(target + step * (j // 2), pair_weights(e, f, spec))
        a, b = add(a, e), add(b, f)
        j += 2
    while j % 32:
        store(target + step * (j // 2), zero)
        j += 2
    return add(add(a, b), add(c, d))


@device_function
def finite_values(call, own, keys, query):
    """The values with 0 in place of rows that are not finite, whose sums are added pair by pair: see forward.finite_values."""
    spec, size = call.spec, call.value_dim
    unpack_weights(own, keys.count)
    v = rows.rows_of(call.v, call.v_strides, keys, size, spec)
    sums = Sums(own.output + 4 * query, _HALF, size)
    rows.add_non_finite_keys(v, own.scores, keys, query, sums, own.values, spec)
    copy = Rows(own.values, rows.padded(spec, size), 1, keys.count, size)
    return finite_rows_operand(copy, Packing(own.kept_values, own.rows, own.zeros), spec)


@device_function
def unpack_weights(own, keys):
    """Set the scores of a step to the weights, whose pairs of keys are in ``own.weights``."""
    spec = own.spec
    for j in range(0, keys, 2):
        for lane in range(0, spec.step_row_bytes, 64):
            both = load(own.weights + spec.step_row_bytes * (j // 2) + lane, spec)
            target = own.scores + spec.step_row_bytes * j + lane
            store(target, low_numbers(both))
            if j + 1 < keys:
                store(target + spec.step_row_bytes, high_numbers(both))


@device_function
def store_output(own, o):
    """The transposed output of a tile, divided by the totals of its weights, written to these rows of the array."""
    spec, size = own.spec, o.size
    if o.count == QUERIES and size % 32 == 0:
        for lane in range(0, QUERIES, 16):
            total = load(own.total + 4 * lane, spec)
            for d in range(0, size, 32):
                block = own.output + spec.row_bytes * d + 4 * lane
                store_rounded_block(block, spec.row_bytes, total, o.at + 2 * (lane * o.row + d), 2 * o.row, spec)
    else:
        zero, one = splat(0.0, spec), splat(1.0, spec)
        for lane in range(0, 4 * rows.round_up(o.count, 16), 64):
            total = load(own.total + lane, spec)
            factor = select_greater(total, zero, div(one, total), total)  # 0 if no key was seen, NaN if the sum is NaN
            for d in range(size):
                address = own.output + spec.row_bytes * d + lane
                store(address, select_greater(total, zero, mul(load(address, spec), factor), total))
        rows.transpose_out(own.output, rows.packed_rows(own.rows, o.count, size), spec)
        for i in range(o.count):
            rows.round_row(own.rows + 4 * i * size, size, as_number(1.0, spec), o.at + 2 * i * o.row, spec)
