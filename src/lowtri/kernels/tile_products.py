"""The products of one tile, each for the keys that a part of its queries sees.

On vectors a part is a group of 16 queries, with the keys from the first to the last that it sees. On tile registers it is one half of
the 64 queries, with blocks of 32 keys, since 2 x 2 registers cover 32 keys and 32 queries; mask bits hide the other pairs of a block.
``spans`` are the first key and one past the last for each 16 queries.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.plan_walk import ALL_QUERIES, key_spans, visible_range
from lowtri.kernels.product import product, product_add
from lowtri.kernels.rows import fill, padded, product_rows, round_up, word_count
from lowtri.kernels.scratch import KEYS
from lowtri.kernels.simd import element
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tiles import held_product, held_product_add, tile_product, tile_product_add

__all__ = [
    "add_to_rows",
    "finish_pv",
    "passes_over_keys",
    "product_keys",
    "pv_rows",
    "pv_unit",
    "score_tile",
    "tile_spans",
    "unit_spans",
]

LOW_HALF = np.uint64(0x00000000FFFFFFFF)  # of the 64 queries
_BLOCK = 24  # keys; a multiple of the rows of every register tile
_FEWEST = 8  # keys of a product of scores
_HALF_ROW = 128  # bytes of a row of 32 pairs


@by_spec
def passes_over_keys(spec):
    """In how many passes the forward pass computes n queries.

    On tiles, long rows read K and V for one half of the queries after the other, so that the halves' memory stays in the first cache;
    where heads are large, both halves share what they read.
    """

    def one(n, d, dv, spec):
        return 1

    def halves(n, d, dv, spec):
        return 1 if d + dv > 192 or 2 * n <= QUERIES else 2

    return halves if spec.on_tiles else one


@by_spec
def product_keys(spec):
    """The visible keys of a tile, extended to what products compute: first key, keys, address of the mask bits."""

    def visible(key0, keys, mask_bits, nk, spec):
        return key0, keys, mask_bits

    def whole_blocks(key0, keys, mask_bits, nk, spec):
        tile = key0 // KEYS
        start = key0 - tile * KEYS
        stop = min(round_up(start + keys, 32), min(KEYS, nk - tile * KEYS))
        before = start % 32
        if mask_bits:
            mask_bits -= 8 * before
        return key0 - before, stop - start + before, mask_bits

    return whole_blocks if spec.on_tiles else visible


@device_function
def block_span(mask_bits, keys, first_query):
    """The blocks of 32 keys that any of 32 queries sees."""
    if mask_bits == 0:
        return 0, keys
    start, stop = visible_range(mask_bits, keys, LOW_HALF << np.uint64(first_query))
    if start >= stop:
        return 0, 0
    return start & -32, min(round_up(stop, 32), keys)


@by_spec
def tile_spans(spec):
    """The spans of a tile of n queries, and into how many parts its products are divided."""

    def groups(mask_bits, keys, n, spec):
        return key_spans(mask_bits, keys, n)

    def halves(mask_bits, keys, n, spec):
        (a, b), (c, d) = block_span(mask_bits, keys, 0), (0, 0)
        if 2 * n > QUERIES:
            c, d = block_span(mask_bits, keys, 32)
        return (a, b, a, b, c, d, c, d), 2

    return halves if spec.on_tiles else groups


@by_spec
def unit_spans(spec):
    """The spans of a unit of the forward pass, whose first query is ``query``, and into how many parts its products are divided."""

    def groups(mask_bits, keys, n, query, spec):
        return key_spans(mask_bits, keys, n)

    def half(mask_bits, keys, n, query, spec):
        a, b = block_span(mask_bits, keys, query)
        return (a, b, a, b, 0, 0, 0, 0), 1

    return half if spec.on_tiles else groups


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
def next_keys(spans, groups, j, end):
    """Where the keys from j on end that the same groups of queries see, the first of these queries, and one past the last.

    A product has a few keys at least, some of which not all of its queries see.
    """
    stop, first, last = end, QUERIES, 0
    for group in range(groups):
        for n in range(2 * group, 2 * group + 2):
            edge = element(spans, n)
            if edge > j:
                stop = min(stop, max(edge, j + _FEWEST))
    for group in range(groups):
        if element(spans, 2 * group) < stop and element(spans, 2 * group + 1) > j:
            first, last = min(first, QUERIES // groups * group), QUERIES // groups * (group + 1)
    return stop, first, last


@by_spec
def score_tile(spec):
    """Scores of a tile or a unit, rows of ``scores`` being ``row`` bytes apart; at least those in the span of each part.

    ``keys``, ``k_n``, ``k_d`` and ``queries`` are operands (:mod:`lowtri.kernels.operands`); ``d`` is the depth in words. The keys that
    are ``ahead`` rows further are prefetched.
    """

    def on_vectors(keys, k_n, k_d, queries, scores, row, d, ahead, spans, groups, spec):
        number_bytes, j, end = spec.number_bytes, 0, 0
        for group in range(groups):
            end = max(end, element(spans, 2 * group + 1))
        while j < end:
            stop, first, last = next_keys(spans, groups, j, end)
            if first < last:
                lane, fetched = number_bytes * first, number_bytes * k_n * ahead
                a, b, c = keys + number_bytes * j * k_n, queries + lane, scores + row * j + lane
                product(a, k_n, k_d, b, QUERIES, c, QUERIES, stop - j, d, fetched, last - first, spec)
            j = stop

    def on_tiles(keys, k_n, k_d, queries, scores, row, d, ahead, spans, groups, spec):
        depths = round_up(d, 16) // 16
        score_half(keys, k_n, queries, scores, row, depths, spans[0], spans[1], spec)
        second = queries + _HALF_ROW * 16 * depths
        score_half(keys, k_n, second, scores + _HALF_ROW, row, depths, spans[4], spans[5], spec)

    return on_tiles if spec.on_tiles else on_vectors


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
def keys_of_queries(mask_bits, keys, spans, first, count):
    """The span of a few of the 16 queries of a group, within that of the group."""
    start, stop = element(spans, 2 * (first // 16)), element(spans, 2 * (first // 16) + 1)
    if start >= stop:
        return 0, 0
    queries = (ALL_QUERIES >> np.uint64(64 - count)) << np.uint64(first)
    a, b = visible_range(mask_bits + 8 * start, stop - start, queries)
    return start + (a & -2), min(start + ((b + 1) & -2), stop)


@by_spec
def pv_rows(spec):
    """Output += weights^T values, of all n queries or, by mask bits that are not 0, of each few with their own keys.

    Operands as in :func:`lowtri.kernels.operands.key_operand`; the output as in :mod:`lowtri.kernels.tile_output`. The values that are
    ``ahead`` words further are prefetched.
    """

    def on_vectors(values, v_row, weights, output, size, keys, ahead, mask_bits, spans, n, spec):
        columns, number_bytes, fetched = padded(spec, size), spec.number_bytes, spec.number_bytes * v_row * ahead
        queries = spec.edge_queries if mask_bits else n
        for first in range(0, n, max(queries, 1)):
            count, start, stop, width = min(queries, n - first), 0, keys, columns
            if mask_bits:
                start, stop = keys_of_queries(mask_bits, keys, spans, first, count)
                width = spec.edge_columns
            word, depth = word_count(start, spec), word_count(stop, spec) - word_count(start, spec)
            a, b = weights + spec.row_bytes * word + number_bytes * first, values + number_bytes * word * v_row
            c, column = output + number_bytes * columns * first, 0
            while depth > 0 and column < columns:
                offset, most = number_bytes * column, min(width, columns - column)
                product_add(a, 1, QUERIES, b + offset, v_row, c + offset, columns, count, depth, fetched, most, spec)
                column += width

    def on_tiles(values, v_row, weights, output, size, keys, ahead, mask_bits, spans, n, spec):
        row, first = spec.row_bytes, (keys + 1) // 2
        fill(weights + row * first, QUERIES * (round_up(keys, 32) // 2 - first), 0.0, spec)
        pv_half(values, weights, row, output, size, spans[0], spans[1], False, spec)
        pv_half(values, weights + _HALF_ROW, row, output + _HALF_ROW, size, spans[4], spans[5], False, spec)

    return on_tiles if spec.on_tiles else on_vectors


@by_spec
def pv_unit(spec):
    """Output += values^T weights of a unit, now or, on tiles, after the next unit's scores: returns what is left to do.

    Tile loads wait for stores that are under way, so the product is separated from the weights that it reads. ``is_first``: the output
    has not been written yet, which is so on tiles only.
    """

    def now(values, v_row, weights, output, size, keys, ahead, mask_bits, spans, n, is_first, spec):
        pv_rows(values, v_row, weights, output, size, keys, ahead, mask_bits, spans, n, spec)
        return 0, 0, 0, 0, False

    def later(values, v_row, weights, output, size, keys, ahead, mask_bits, spans, n, is_first, spec):
        return values, output, spans[0], spans[1], is_first

    return later if spec.on_tiles else now


@by_spec
def finish_pv(spec):
    """The product that :func:`pv_unit` left to do."""

    def nothing(left, weights, size, spec):
        pass

    def product_of_half(left, weights, size, spec):
        values, output, start, stop, is_first = left
        pv_half(values, weights, _HALF_ROW, output, size, start, stop, is_first, spec)

    return product_of_half if spec.on_tiles else nothing


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


@by_spec
def add_to_rows(spec):
    """Target += weights operand, of weights or dS (keys, 64) and rows of n queries: what a tile adds to rows of dV or dK.

    On vectors, where spans differ, each block of keys is multiplied by the queries that see any.
    """

    def on_vectors(weights, operand, target, sums, keys, spans, groups, n, spec):
        block, j = _BLOCK if groups > 1 else keys, 0
        while j < keys:  # a range of a step that could be 0 would raise
            rows, first, last = min(block, keys - j), QUERIES, 0
            for group in range(4):
                if element(spans, 2 * group) < j + rows and element(spans, 2 * group + 1) > j:
                    first, last = min(first, 16 * group), 16 * group + 16
            count, start = min(last, n) - first, word_count(first, spec)
            if count > 0:
                a, b = (
                    weights + spec.row_bytes * j + spec.number_bytes * start,
                    operand + spec.number_bytes * start * sums.size,
                )
                c, depth = target + spec.number_bytes * j * sums.n, word_count(count, spec)
                product_add(a, QUERIES, 1, b, sums.size, c, sums.n, rows, depth, 0, sums.size, spec)
            j += block

    def on_tiles(weights, operand, target, sums, keys, spans, groups, n, spec):
        columns, c_row, (a, b, c, d) = sums.size, 4 * sums.n, (spans[0], spans[1], spans[4], spans[5])
        for j in range(keys, round_up(keys, 16)):  # rows of bf16
            fill(weights + spec.row_bytes * j, QUERIES // 2, 0.0, spec)
        if a == c and b == d:
            add_half_to_rows(weights, operand, target, c_row, columns, a, b, 2, spec)
        else:
            add_half_to_rows(weights, operand, target, c_row, columns, a, b, 1, spec)
            add_half_to_rows(weights + 64, operand + 64 * columns, target, c_row, columns, c, d, 1, spec)

    return on_tiles if spec.on_tiles else on_vectors
