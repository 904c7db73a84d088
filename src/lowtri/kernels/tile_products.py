"""The products of a tile of queries: scores of its keys, the weighted sums of values, and what it adds to the rows of dK and dV."""

from __future__ import annotations

import numpy as np

from lowtri.kernels import amx_tiles
from lowtri.kernels.device import device_function
from lowtri.kernels.product import product, product_add
from lowtri.kernels.rows import ALL_QUERIES, element_count, padded
from lowtri.kernels.simd import tuple_item
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.tiles import edges_of, next_keys, span
from lowtri.kernels.values import KeyTile, Matrix, Packed, Span

_BLOCK_KEYS = 24  # a multiple of the rows of every register block


@device_function
def score_tile(keys, queries, scores, size, ahead, spans, spec):
    """Scores of a tile of queries, (keys, 64); at least those in the span of each part.

    ``keys`` and ``queries`` are operands (:mod:`lowtri.kernels.operands`) of heads of ``size`` numbers. The keys that are ``ahead``
    rows further are prefetched.
    """
    if spec.uses_amx:
        amx_tiles.score_tile(keys, queries, scores, size, spans, spec)
    else:
        number_bytes, elements = spec.number_bytes, element_count(size, spec)
        j = end = 0
        for group in range(spans.groups):
            end = max(end, tuple_item(spans.edges, 2 * group + 1))
        while j < end:
            stop, first, last = next_keys(spans, j, end)
            if first < last:
                lane = number_bytes * first
                a = Matrix(keys.at + number_bytes * j * keys.row, keys.row, keys.element)
                b, c = Packed(queries + lane, QUERIES), Packed(scores + spec.row_bytes * j + lane, QUERIES)
                product(a, b, c, stop - j, elements, number_bytes * keys.row * ahead, last - first, spec)
            j = stop


@device_function
def add_weighted_rows(rows, weights, sums, keys, ahead, spans, spec):
    """Sums += weights^T rows, of values for the output or of keys for dQ: of all queries, or of each few with their own keys.

    ``rows`` and ``weights`` (keys, 64) are operands; the rows that are ``ahead`` keys further are prefetched.
    """
    if spec.uses_amx:
        amx_tiles.add_weighted_rows(rows, weights, sums, keys.count, spans, spec)
    else:
        columns, number_bytes = padded(spec, sums.size), spec.number_bytes
        cuts = keys.mask_words != 0 and spans.groups > 1
        queries, width = sums.count, columns
        if cuts:
            queries, width = spec.cut_granularity, spec.cut_columns
        for first in range(0, sums.count, max(queries, 1)):
            count, seen = min(queries, sums.count - first), Span(0, keys.count)
            if cuts:
                seen = _seen_by(keys, edges_of(spans, first // 16), first, count)
            element = element_count(seen.first, spec)
            depth = element_count(seen.stop, spec) - element
            a = Matrix(weights + spec.row_bytes * element + number_bytes * first, 1, QUERIES)
            b_row = rows.at + number_bytes * element * rows.row
            c_row = sums.at + number_bytes * columns * first
            column = 0
            while depth > 0 and column < columns:
                offset, most = number_bytes * column, min(width, columns - column)
                b, c = Packed(b_row + offset, rows.row), Packed(c_row + offset, columns)
                product_add(a, b, c, count, depth, number_bytes * rows.row * ahead, most, spec)
                column += width


@device_function
def _seen_by(keys, group, first, count):
    """The pairs of keys that ``count`` queries from ``first`` on see, of those that their group sees."""
    queries = (ALL_QUERIES >> np.uint64(64 - count)) << np.uint64(first)
    place, words = keys.first + group.first, keys.mask_words + 8 * group.first
    seen = span(KeyTile(keys.batch, keys.head, place, group.stop - group.first, words), queries, 2)
    return Span(group.first + seen.first, group.first + seen.stop)


@device_function
def add_to_rows(weights, operand, target, n, spans, spec):
    """Target += weights operand, of weights or dS (keys, 64) and rows of n queries: what a tile adds to rows of dV or dK.

    On vectors, where spans differ, each block of keys is multiplied by the queries that see any.
    """
    if spec.uses_amx:
        amx_tiles.add_to_rows(weights, operand, target, spans, spec)
    else:
        block = _BLOCK_KEYS if spans.groups > 1 else target.count
        j = 0
        number_bytes = spec.number_bytes
        while j < target.count:  # a range of a step that could be 0 would raise
            rows = min(block, target.count - j)
            first = QUERIES
            last = 0
            for group in range(4):
                seen = edges_of(spans, group)
                if seen.first < j + rows and seen.stop > j:
                    first, last = min(first, 16 * group), 16 * group + 16
            count, start = min(last, n) - first, element_count(first, spec)
            if count > 0:
                a = Matrix(weights + spec.row_bytes * j + number_bytes * start, QUERIES, 1)
                b = Packed(operand + number_bytes * start * target.size, target.size)
                c = Packed(target.at + number_bytes * j * target.row, target.row)
                product_add(a, b, c, rows, element_count(count, spec), 0, target.size, spec)
            j += block
