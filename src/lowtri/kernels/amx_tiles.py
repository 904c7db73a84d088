"""The products of a tile of queries on AMX's tile registers, for one half of the 64 queries and their span of keys after the other.

Rows of weights, of scores and of their operands are in bytes, as in :mod:`lowtri.kernels.amx`.
"""

from __future__ import annotations

from lowtri.kernels.amx import stationary_b_product, stationary_b_product_add, tile_product, tile_product_add
from lowtri.kernels.device import device_function
from lowtri.kernels.rows import element_count, fill, product_rows, round_up
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.values import Matrix, Packed, Span, Sums

HALF_ROW = 128  # bytes of a row of 32 pairs, or numbers


@device_function
def score_tile(keys, queries, scores, size, spans, spec):
    """Scores of both halves: see :func:`lowtri.kernels.tile_products.score_tile`."""
    edges, depths = spans.edges, round_up(element_count(size, spec), 16) // 16
    score_half(keys, queries, Packed(scores, spec.row_bytes), depths, Span(edges[0], edges[1]), spec)
    second, second_scores = queries + HALF_ROW * 16 * depths, Packed(scores + HALF_ROW, spec.row_bytes)
    score_half(keys, second, second_scores, depths, Span(edges[4], edges[5]), spec)


@device_function
def score_half(keys, queries, scores, depths, seen, spec):
    """Scores of one half of the queries with the keys that it sees; at least 16 keys, so that a product has whole registers."""
    if seen.first < seen.stop:
        start = max(0, min(seen.first, seen.stop - 16))
        rows = max(16, seen.stop - start)
        a = Matrix(keys.at + start * keys.row, keys.row, keys.element)
        b, c = Packed(queries, HALF_ROW), Packed(scores.at + scores.row * start, scores.row)
        if depths == 2:
            stationary_b_product(a, b, c, rows, spec)
        else:
            tile_product(a, b, c, rows, depths, QUERIES // 2, spec)


@device_function
def add_weighted_rows(rows, weights, sums, keys, spans, spec):
    """Sums += rows^T weights of both halves: see :func:`lowtri.kernels.tile_products.add_weighted_rows`."""
    edges = spans.edges
    row = spec.row_bytes
    first = (keys + 1) // 2
    fill(weights + row * first, QUERIES * (round_up(keys, 32) // 2 - first), 0.0, spec)
    add_to_half(rows, Packed(weights, row), sums, Span(edges[0], edges[1]), False, spec)
    second = Sums(sums.at + HALF_ROW, sums.count, sums.size)
    add_to_half(rows, Packed(weights + HALF_ROW, row), second, Span(edges[4], edges[5]), False, spec)


@device_function
def add_to_half(rows, weights, sums, keys, is_first, spec):
    """Sums += rows^T weights, for one half of the queries and these keys; of weights, pairs of keys are in rows.

    If ``is_first``, the sums are set, and may have been anything before.
    """
    if keys.first < keys.stop:
        columns, depths = product_rows(sums.size, spec), round_up(keys.stop - keys.first, 32) // 32
        a = Matrix(rows.at + 2 * keys.first * columns, rows.row, 64 * columns)
        b, c = Packed(weights.at + weights.row * (keys.first // 2), weights.row), Packed(sums.at, spec.row_bytes)
        if is_first:
            tile_product(a, b, c, columns, depths, QUERIES // 2, spec)
        else:
            tile_product_add(a, b, c, columns, depths, QUERIES // 2, spec)


@device_function
def add_to_rows(weights, operand, target, spans, spec):
    """What both halves add to rows of dV or dK: see :func:`lowtri.kernels.tile_products.add_to_rows`."""
    for j in range(target.count, round_up(target.count, 16)):  # rows of bf16
        fill(weights + spec.row_bytes * j, QUERIES // 2, 0.0, spec)
    low, high = Span(spans.edges[0], spans.edges[1]), Span(spans.edges[4], spans.edges[5])
    if low.first == high.first and low.stop == high.stop:
        add_half_to_rows(weights, operand, target, low, 2, spec)
    else:
        add_half_to_rows(weights, operand, target, low, 1, spec)
        add_half_to_rows(weights + 64, operand + 64 * target.size, target, high, 1, spec)


@device_function
def add_half_to_rows(weights, operand, target, keys, depths, spec):
    """What 32 or 64 queries (``depths``) add to the rows of these keys."""
    b_row = 4 * target.size
    c_row = 4 * target.row
    rows = round_up(keys.stop - keys.first, 16)
    a, c = Matrix(weights + spec.row_bytes * keys.first, spec.row_bytes, 64), target.at + c_row * keys.first
    if keys.first < keys.stop and depths == 2:
        for column in range(0, b_row, 128):
            stationary_b_product_add(a, Packed(operand + column, b_row), Packed(c + column, c_row), rows, spec)
    elif keys.first < keys.stop:
        tile_product_add(a, Packed(operand, b_row), Packed(c, c_row), rows, depths, target.size, spec)
