"""The steps of one tile of queries: its key tiles, read from the plan; scores, softcap, bias, mask and online softmax; the products.

EMPTY tiles are in no run of the plan. FULL ones have no mask bits. PARTIAL ones are cut to the keys that some query sees, from a whole
pair on, with a word of mask bits for each of these keys.

A product has parts. On vectors a part is a group of 16 queries, with the keys from the first to the last that it sees. On tile
registers it is one half of the 64 queries, with blocks of 32 keys, since 2 x 2 registers cover 32 keys and 32 queries; mask bits hide
the other pairs of a block. ``spans`` are the first key and one past the last for each 16 queries.

A tile of scores is (keys, 64): a row for each key, a lane for each query. ``scale_log2`` brings scores to units of log 2, so that exp
is 2 ** x. Per query there is a running shift ``m`` and a running sum ``l`` of 2 ** (scale_log2 * score - m); nothing is added up
across lanes. Source: Milakov and Gimelshein 2018; the lazy rescaling of FlashAttention-4's description (2025), here with a limit of
2 ** 8.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.abi import KEYS
from lowtri.kernels.device import device_function
from lowtri.kernels.product import held_product, held_product_add, product, product_add, tile_product, tile_product_add
from lowtri.kernels.rows import ALL_QUERIES, fill, padded, product_rows, rescale_output, round_up, word_count
from lowtri.kernels.simd import (
    add,
    any_greater,
    as_number,
    div,
    element,
    exp2,
    exp2m1,
    fma,
    high_numbers,
    load,
    low_numbers,
    maximum,
    mul,
    pair_weights,
    read,
    read_int32,
    read_int64,
    read_word,
    select_bits,
    select_greater,
    splat,
    store,
    sub,
    write,
)
from lowtri.kernels.spec import QUERIES

FULL = 2  # masks.tile.FULL
FIRST_16 = np.uint64(0xFFFF)  # of the 64 queries
LOW_HALF = np.uint64(0x00000000FFFFFFFF)
_BLOCK = 24  # keys; a multiple of the rows of every register tile
_FEWEST = 8  # keys of a product of scores
_HALF_ROW = 128  # bytes of a row of 32 pairs
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
ALL_TILES = 2**31  # more than there are
LARGE = 2.0**20  # units of log 2: above it a float32's last digit is an eighth or more
MAX_RISE = 8.0  # rescale only if the maximum rose by more: weights stay below 2 ** 8


@device_function
def first_run(plan, b, h, r):
    """The address of the index of the first run of row r of a head's plan; that of one past its last run follows."""
    mask_index = read_int32(plan.mask_index + 4 * (b * plan.mask_index_b + h * plan.mask_index_h))
    return plan.row_start + 8 * (mask_index * plan.rows + r)


@device_function
def tile_count(plan, b, h, r):
    """How many key tiles row r of a head's plan sees."""
    row, count = first_run(plan, b, h, r), 0
    for run in range(read_int64(row), read_int64(row + 8)):
        count += read_int32(plan.runs + 16 * run + 4) - read_int32(plan.runs + 16 * run)
    return count


@device_function
def visible_range(mask_bits, keys, queries):
    """The first key that any of these queries (a word of bits) sees, and one past the last."""
    start, stop = 0, keys
    while start < stop and read_word(mask_bits + 8 * start) & queries == 0:
        start += 1
    while stop > start and read_word(mask_bits + 8 * (stop - 1)) & queries == 0:
        stop -= 1
    return start, stop


@device_function
def visible_tiles(plan, b, h, r, nk, first_tile, last_tile, spec):
    """The key tiles ``first_tile`` .. ``last_tile`` in row r of a head's plan, as (first key, keys, mask bits).

    They have the keys that any query sees: from a whole pair on, on tile registers in whole blocks of 32. A run of the plan is four
    int32: first tile, one past the last, kind, and the index of its first tile in ``tile_bits``. The patterns in ``bits`` have a word
    for each of a tile's keys. A FULL tile has no mask bits: their address is 0.
    """
    row = first_run(plan, b, h, r)
    runs, tile_bits, bits = plan.runs, plan.tile_bits, plan.bits
    for run in range(read_int64(row), read_int64(row + 8)):
        fields = runs + 16 * run
        first, last, kind = read_int32(fields), read_int32(fields + 4), read_int32(fields + 8)
        index = read_int32(fields + 12)
        for tile in range(max(first, first_tile), min(last, last_tile)):
            keys, start, mask_bits = min(KEYS, nk - tile * KEYS), 0, 0
            stop = keys
            if kind != FULL:
                mask_bits = bits + 8 * KEYS * read_int32(tile_bits + 4 * (index + tile - first))
                start, stop = visible_range(mask_bits, keys, ALL_QUERIES)
                if spec.on_tiles:
                    start, stop = start & -32, min(round_up(stop, 32), keys)
                else:
                    start &= -2
                mask_bits += 8 * start
            yield tile * KEYS + start, stop - start, mask_bits


@device_function
def span(mask_bits, keys, queries, size):
    """The keys that any of these queries (a word of bits) sees, extended to whole blocks of ``size`` keys as far as there are keys."""
    if mask_bits == 0:
        return 0, keys
    start, stop = visible_range(mask_bits, keys, queries)
    if start >= stop:
        return 0, 0
    return start & -size, min(round_up(stop, size), keys)


@device_function
def group_span(mask_bits, keys, group, n):
    """The pairs of keys that 16 of a tile's n queries see; none for queries past n."""
    if 16 * group >= n:
        return 0, 0
    return span(mask_bits, keys, FIRST_16 << np.uint64(16 * group), 2)


@device_function
def key_spans(mask_bits, keys, n):
    """The visible spans of each 16 of a tile's n queries; and the number of groups to compute separately: 4, or 1 of all 64 queries.

    Four groups pay if they save a tenth of the pairs or more; so one group has at least 49 queries.
    """
    (a, b), (c, d) = group_span(mask_bits, keys, 0, n), group_span(mask_bits, keys, 1, n)
    (e, f), (g, h) = group_span(mask_bits, keys, 2, n), group_span(mask_bits, keys, 3, n)
    if 10 * (b - a + d - c + f - e + h - g) <= 36 * keys:
        return (a, b, c, d, e, f, g, h), 4
    return (0, keys, 0, keys, 0, keys, 0, keys), 1


@device_function
def tile_spans(mask_bits, keys, n, spec):
    """The spans of a tile of n queries, and into how many parts its products are divided."""
    if not spec.on_tiles:
        return key_spans(mask_bits, keys, n)
    (a, b), (c, d) = span(mask_bits, keys, LOW_HALF, 32), (0, 0)
    if 2 * n > QUERIES:
        c, d = span(mask_bits, keys, LOW_HALF << np.uint64(32), 32)
    return (a, b, a, b, c, d, c, d), 2


@device_function
def unit_spans(mask_bits, keys, n, query, spec):
    """The spans of a unit of the forward pass, whose first query is ``query``, and into how many parts its products are divided."""
    if not spec.on_tiles:
        return key_spans(mask_bits, keys, n)
    a, b = span(mask_bits, keys, LOW_HALF << np.uint64(query), 32)
    return (a, b, a, b, 0, 0, 0, 0), 1


@device_function
def next_keys(spans, groups, j, end):
    """Where the keys from j on end that the same groups of queries see, the first of these queries, and one past the last.

    A product has a few keys at least, some of which not all of its queries see.
    """
    stop, first, last = end, QUERIES, 0
    for n in range(2 * groups):
        edge = element(spans, n)
        if edge > j:
            stop = min(stop, max(edge, j + _FEWEST))
    for group in range(groups):
        if element(spans, 2 * group) < stop and element(spans, 2 * group + 1) > j:
            first, last = min(first, QUERIES // groups * group), QUERIES // groups * (group + 1)
    return stop, first, last


@device_function
def score_half(keys, row, queries, scores, scores_row, depths, start, stop, spec):
    """Scores of one half of the queries with the keys of its span; at least 16 keys, so that a product has whole registers."""
    if start < stop:
        start = max(0, min(start, stop - 16))
        a, c, rows = keys + start * row, scores + scores_row * start, max(16, stop - start)
        if depths == 2:
            held_product(a, row, queries, c, _HALF_ROW, scores_row, rows, spec)
        else:
            tile_product(a, row, 64, queries, c, _HALF_ROW, scores_row, rows, depths, QUERIES // 2, spec)


@device_function
def score_tile(keys, k_n, k_d, queries, scores, row, d, ahead, spans, groups, spec):
    """Scores of a tile or a unit, rows of ``scores`` being ``row`` bytes apart; at least those in the span of each part.

    ``keys``, ``k_n``, ``k_d`` and ``queries`` are operands (:mod:`lowtri.kernels.rows`) of heads of ``d`` numbers. The keys that
    are ``ahead`` rows further are prefetched.
    """
    words = word_count(d, spec)
    if spec.on_tiles:
        depths = round_up(words, 16) // 16
        score_half(keys, k_n, queries, scores, row, depths, spans[0], spans[1], spec)
        second = queries + _HALF_ROW * 16 * depths
        score_half(keys, k_n, second, scores + _HALF_ROW, row, depths, spans[4], spans[5], spec)
    else:
        number_bytes, j, end = spec.number_bytes, 0, 0
        for group in range(groups):
            end = max(end, element(spans, 2 * group + 1))
        while j < end:
            stop, first, last = next_keys(spans, groups, j, end)
            if first < last:
                lane, fetched = number_bytes * first, number_bytes * k_n * ahead
                a, b, c = keys + number_bytes * j * k_n, queries + lane, scores + row * j + lane
                product(a, k_n, k_d, b, QUERIES, c, QUERIES, stop - j, words, fetched, last - first, spec)
            j = stop


# Passes over scores.


@device_function
def times_log2e(x, spec):
    """x * log2(e)."""
    return as_number(x, spec) * as_number(LOG2E, spec)


@device_function
def apply_softcap(scores, count, softcap, spec):
    """c * tanh(s / c) on ``count`` scores (whole vectors), by tanh(x) = (e^(2x) - 1) / (e^(2x) + 1)."""
    c = times_log2e(softcap, spec)
    to_exponent = splat(times_log2e(2.0, spec) / c, spec)
    two, upper, lower = splat(2.0, spec), splat(60.0, spec), splat(-60.0, spec)
    for offset in range(0, spec.number_bytes * count, 64):
        x = mul(load(scores + offset, spec), to_exponent)
        x = select_greater(x, upper, upper, select_greater(lower, x, lower, x))
        y = exp2m1(x, spec)
        store(scores + offset, mul(div(y, add(y, two)), splat(c, spec)))


@device_function
def to_log2(x, spec):
    """x * log2(e), finite for finite x: biases often hide with ``finfo.min``, and a row of it gives the mean of all values."""
    y, limit = times_log2e(x, spec), as_number(spec.greatest, spec)
    if y > limit and x <= limit:
        return limit
    if y < -limit and x >= -limit:
        return -limit
    return y


@device_function
def add_bias(scores, row, bias, strides, n, keys, spec):
    """Add bias[i, j] * log2(e) to the scores; the bias has strides of 0 where it broadcasts."""
    number_bytes = spec.number_bytes
    for j in range(keys):
        for i in range(n):
            x = to_log2(read(bias + number_bytes * (i * strides.q + j * strides.k), spec), spec)
            address = scores + row * j + number_bytes * i
            write(address, read(address, spec) + x, spec)


@device_function
def apply_mask(scores, mask_bits, query, spans, spec):
    """Set the scores of hidden pairs of a unit, whose first query is ``query``, to -inf.

    The mask bits are a word for each key, a bit for each of 64 queries.
    """
    hidden, number_bytes = splat(-np.inf, spec), spec.number_bytes
    for part in range(spec.unit_queries // 16):
        first = query + 16 * part
        for j in range(element(spans, 2 * part), element(spans, 2 * part + 1)):
            word = read_word(mask_bits + 8 * j)
            if (word >> np.uint64(first)) & FIRST_16 != FIRST_16:
                for lane in range(0, 16, spec.lanes):
                    address = scores + spec.unit_row * j + number_bytes * (16 * part + lane)
                    store(address, select_bits(word, np.uint64(first + lane), load(address, spec), hidden))


@device_function
def new_shift(scores, step, factors, first, last, m, l, output, vector, size, spec):
    """Minus the shift of a vector of queries after these scores, ``step`` bytes apart.

    m, l and the output of these queries, the vector of that number, are rescaled if the maximum rose.
    """
    hidden, zero = splat(-np.inf, spec), splat(0.0, spec)
    a = b = c = d = hidden  # four independent chains of maxima, for instruction-level parallelism
    j = first
    while j + 4 <= last:
        row = scores + step * j
        a, b = maximum(load(row, spec), a, spec), maximum(load(row + step, spec), b, spec)
        c, d = maximum(load(row + 2 * step, spec), c, spec), maximum(load(row + 3 * step, spec), d, spec)
        j += 4
    while j < last:
        a = maximum(load(scores + step * j, spec), a, spec)
        j += 1
    greatest = mul(maximum(maximum(a, b, spec), maximum(c, d, spec), spec), factors)
    old = load(m, spec)
    limit = add(old, splat(MAX_RISE, spec))
    if any_greater(greatest, limit):
        # Lane by lane: the keys of one query do not change a bit of another query's result.
        new = select_greater(greatest, limit, maximum(greatest, old, spec), old)
        rescale = exp2(sub(old, select_greater(new, hidden, new, zero)), spec)
        store(m, new)
        store(l, mul(load(l, spec), rescale))
        rescale_output(output, vector, size, rescale, spec)
        old = new
    # A query that has not seen a key yet has no maximum: with shift 0 its weights are 2 ** -inf = 0.
    return sub(zero, select_greater(old, hidden, old, zero))


@device_function
def shifts_large_scores(scores, step, factors, shift, first, last, spec):
    """Whether a shift is large: then the scores become factors * score + shift.

    fma rounds the shift but not the product; for scores this large the difference exceeds 1. So both are rounded.
    """
    amount, large = maximum(shift, sub(splat(0.0, spec), shift), spec), splat(LARGE, spec)
    if not any_greater(amount, large):
        return False
    for address in range(scores + step * first, scores + step * last, step):
        x = load(address, spec)
        rounded = add(mul(x, factors), shift)
        store(address, select_greater(amount, large, rounded, fma(x, factors, shift, spec)))
    return True


@device_function
def softmax_tile(scores, scale_log2, spans, m, l, output, size, spec):
    """Scores become weights 2 ** (scale_log2 * score - m); m, l and the output so far are rescaled to the new shift.

    Args:
        scores: address of (keys, 64).  scale_log2: factor > 0, rounded together with the shift.
        spans: the first key and one past the last for each 16 queries; other scores are not touched.
        m, l: addresses of 64 numbers.  output, size: see :mod:`lowtri.kernels.rows`.
    """
    step = spec.row_bytes
    for vector in range(spec.row_bytes // 64):
        lane, part = 64 * vector, (spec.lanes * vector) >> 4
        first, last, factors = element(spans, 2 * part), element(spans, 2 * part + 1), splat(scale_log2, spec)
        column = scores + lane
        shift = new_shift(column, step, factors, first, last, m + lane, l + lane, output, vector, size, spec)
        if shifts_large_scores(column, step, factors, shift, first, last, spec):
            factors, shift = splat(1.0, spec), splat(0.0, spec)
        a = b = splat(0.0, spec)
        j = first
        while j + 2 <= last:
            row = column + step * j
            e = exp2(fma(load(row, spec), factors, shift, spec), spec)
            f = exp2(fma(load(row + step, spec), factors, shift, spec), spec)
            store(row, e)
            store(row + step, f)
            a, b = add(a, e), add(b, f)
            j += 2
        if j < last:
            row = column + step * j
            e = exp2(fma(load(row, spec), factors, shift, spec), spec)
            store(row, e)
            a = add(a, e)
        store(l + lane, add(load(l + lane, spec), add(a, b)))


@device_function
def weights_in_pairs(column, factors, shift, first, last, target, spec):
    """Weights 2 ** (factors * score + shift) of 16 queries as pairs of keys; returns their sum."""
    zero, step = splat(0.0, spec), spec.unit_row
    a = b = c = d = zero
    j = first
    while j + 4 <= last:
        row, to = column + step * j, target + step * (j // 2)
        e = exp2(fma(load(row, spec), factors, shift, spec), spec)
        f = exp2(fma(load(row + step, spec), factors, shift, spec), spec)
        g = exp2(fma(load(row + 2 * step, spec), factors, shift, spec), spec)
        h = exp2(fma(load(row + 3 * step, spec), factors, shift, spec), spec)
        store(to, pair_weights(e, f, spec))
        store(to + step, pair_weights(g, h, spec))
        a, b, c, d = add(a, e), add(b, f), add(c, g), add(d, h)
        j += 4
    while j < last:
        e, f = exp2(fma(load(column + step * j, spec), factors, shift, spec), spec), zero
        if j + 1 < last:
            f = exp2(fma(load(column + step * (j + 1), spec), factors, shift, spec), spec)
        store(target + step * (j // 2), pair_weights(e, f, spec))
        a, b = add(a, e), add(b, f)
        j += 2
    while j % 32:
        store(target + step * (j // 2), zero)
        j += 2
    return add(add(a, b), add(c, d))


@device_function
def softmax_in_pairs(scores, scale_log2, first, last, m, l, output, size, pairs, spec):
    """The weights of a unit on tiles, as in :func:`softmax_tile`, as pairs of keys (keys / 2, 32); m, l and the output are rescaled.

    The weights are computed with the shift so far; their sum tells whether one may exceed the limit, beyond which the shift is
    raised. Only then, and while a query has seen no key, is the greatest score looked for.

    Args:
        scores: address of (keys, 32).  scale_log2: factor > 0, rounded together with the shift.
        first, last: the first key, a multiple of 32, and one past the last. Pairs are written from the first key on, with zeros
            up to a multiple of 32.
        m, l: addresses of 32 numbers.  output: address of (size, 64).
    """
    for lane in range(0, spec.unit_row if last > first else 0, 64):
        column, factors, zero = scores + lane, splat(scale_log2, spec), splat(0.0, spec)
        old = load(m + lane, spec)
        # A maximum that rose by more than MAX_RISE has a weight of 2 ** MAX_RISE, less the error of exp2. The limit is lower, so that
        # no query's shift depends on whether another query of the vector exceeds it.
        limit = splat(2.0**MAX_RISE - 1.0, spec)
        shift = total = sub(zero, old)
        needs_maximum = any_greater(maximum(shift, old, spec), splat(LARGE, spec))
        while True:
            if needs_maximum:
                step, out = spec.unit_row, output + lane
                shift = new_shift(column, step, factors, first, last, m + lane, l + lane, out, 0, size, spec)
                if shifts_large_scores(column, step, factors, shift, first, last, spec):
                    factors, shift = splat(1.0, spec), zero
            total = weights_in_pairs(column, factors, shift, first, last, pairs + lane, spec)
            if needs_maximum or not any_greater(total, limit):
                break
            needs_maximum = True
        store(l + lane, add(load(l + lane, spec), total))


@device_function
def unpack_weights(scores, pairs, keys, spec):
    """Set the scores of a unit on tiles to the weights, of which ``pairs`` has the pairs of keys."""
    for j in range(0, keys, 2):
        for lane in range(0, spec.unit_row, 64):
            both, target = load(pairs + spec.unit_row * (j // 2) + lane, spec), scores + spec.unit_row * j + lane
            store(target, low_numbers(both))
            if j + 1 < keys:
                store(target + spec.unit_row, high_numbers(both))


# Products with the values, and what a tile adds to dQ, dK and dV.


@device_function
def pv_half(values, pairs, row, output, size, start, stop, is_first, spec):
    """Output += values^T weights, for one half of the queries and these keys; pairs are ``row`` bytes apart.

    If ``is_first``, the output is set, and may have been anything before.
    """
    if start < stop:
        columns, depths = product_rows(size, spec), round_up(stop - start, 32) // 32
        a, b = values + 2 * start * columns, pairs + row * (start // 2)
        if is_first:
            tile_product(a, 64, 64 * columns, b, output, row, spec.row_bytes, columns, depths, QUERIES // 2, spec)
        else:
            tile_product_add(a, 64, 64 * columns, b, output, row, spec.row_bytes, columns, depths, QUERIES // 2, spec)


@device_function
def pv_rows(values, v_row, weights, output, size, keys, ahead, mask_bits, spans, n, spec):
    """Output += weights^T values, of all n queries or, by mask bits that are not 0, of each few with their own keys.

    Operands as in :func:`lowtri.kernels.rows.key_operand`; the output as in :mod:`lowtri.kernels.rows`. The values that are
    ``ahead`` words further are prefetched.
    """
    row = spec.row_bytes
    if spec.on_tiles:
        first = (keys + 1) // 2
        fill(weights + row * first, QUERIES * (round_up(keys, 32) // 2 - first), 0.0, spec)
        pv_half(values, weights, row, output, size, spans[0], spans[1], False, spec)
        pv_half(values, weights + _HALF_ROW, row, output + _HALF_ROW, size, spans[4], spans[5], False, spec)
    else:
        columns, number_bytes, fetched = padded(spec, size), spec.number_bytes, spec.number_bytes * v_row * ahead
        queries = spec.edge_queries if mask_bits else n
        for first in range(0, n, max(queries, 1)):
            count, start, stop, width = min(queries, n - first), 0, keys, columns
            if mask_bits:
                group = element(spans, 2 * (first // 16))
                sees = (ALL_QUERIES >> np.uint64(64 - count)) << np.uint64(first)
                start, stop = span(mask_bits + 8 * group, element(spans, 2 * (first // 16) + 1) - group, sees, 2)
                start, stop = group + start, group + stop
                width = spec.edge_columns
            word, depth = word_count(start, spec), word_count(stop, spec) - word_count(start, spec)
            a, b = weights + row * word + number_bytes * first, values + number_bytes * word * v_row
            c, column = output + number_bytes * columns * first, 0
            while depth > 0 and column < columns:
                offset, most = number_bytes * column, min(width, columns - column)
                product_add(a, 1, QUERIES, b + offset, v_row, c + offset, columns, count, depth, fetched, most, spec)
                column += width


@device_function
def finish_pv(left, weights, size, spec):
    """The product that the forward pass left to do on tiles: (values, output, first key, one past the last, is it the first one)."""
    if spec.on_tiles:
        values, output, start, stop, is_first = left
        pv_half(values, weights, _HALF_ROW, output, size, start, stop, is_first, spec)


@device_function
def add_half_to_rows(weights, operand, target, c_row, columns, start, stop, depths, spec):
    """What 32 or 64 queries (``depths``) add to the rows of keys in their span."""
    row = 4 * columns
    a, c, rows = weights + spec.row_bytes * start, target + c_row * start, round_up(stop - start, 16)
    if start < stop and depths == 2:
        for column in range(0, row, 128):
            held_product_add(a, spec.row_bytes, operand + column, c + column, row, c_row, rows, spec)
    elif start < stop:
        tile_product_add(a, spec.row_bytes, 64, operand, c, row, c_row, rows, depths, columns, spec)


@device_function
def add_to_rows(weights, operand, target, sums, keys, spans, groups, n, spec):
    """Target += weights operand, of weights or dS (keys, 64) and rows of n queries: what a tile adds to rows of dV or dK.

    On vectors, where spans differ, each block of keys is multiplied by the queries that see any.
    """
    if spec.on_tiles:
        columns, c_row, (a, b, c, d) = sums.size, 4 * sums.n, (spans[0], spans[1], spans[4], spans[5])
        for j in range(keys, round_up(keys, 16)):  # rows of bf16
            fill(weights + spec.row_bytes * j, QUERIES // 2, 0.0, spec)
        if a == c and b == d:
            add_half_to_rows(weights, operand, target, c_row, columns, a, b, 2, spec)
        else:
            add_half_to_rows(weights, operand, target, c_row, columns, a, b, 1, spec)
            add_half_to_rows(weights + 64, operand + 64 * columns, target, c_row, columns, c, d, 1, spec)
    else:
        block, j, number_bytes = _BLOCK if groups > 1 else keys, 0, spec.number_bytes
        while j < keys:  # a range of a step that could be 0 would raise
            rows, first, last = min(block, keys - j), QUERIES, 0
            for group in range(4):
                if element(spans, 2 * group) < j + rows and element(spans, 2 * group + 1) > j:
                    first, last = min(first, 16 * group), 16 * group + 16
            count, start = min(last, n) - first, word_count(first, spec)
            if count > 0:
                a = weights + spec.row_bytes * j + number_bytes * start
                b, c = operand + number_bytes * start * sums.size, target + number_bytes * j * sums.n
                depth = word_count(count, spec)
                product_add(a, QUERIES, 1, b, sums.size, c, sums.n, rows, depth, 0, sums.size, spec)
            j += block
