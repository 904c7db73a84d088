"""The products of one tile on tile registers, for each half of its 64 queries: in blocks of 32 keys, those that the half sees.

A block of 2 x 2 tile registers covers 32 keys and 32 queries, so this is how finely a PARTIAL tile can be cut. Its visible keys are
extended to whole blocks; there, mask bits hide the pairs.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.forward import KEYS
from lowtri.kernels.plan_walk import visible_range
from lowtri.kernels.spec import HALF, HALF_ROW, QUERIES
from lowtri.kernels.tile_operands import whole, whole_16
from lowtri.kernels.tiles import held_product, tile_product, tile_product_add

__all__ = [
    "block_spans",
    "extended",
    "gradient_halves",
    "half_span",
    "pv_half",
    "pv_halves",
    "score_half",
    "score_halves",
]

LOW_HALF, HIGH_HALF = np.uint64(0x00000000FFFFFFFF), np.uint64(0xFFFFFFFF00000000)  # of the 64 queries


@device_function
def extended(key0, keys, mask_bits, nk):
    """The visible keys of a tile, extended to whole blocks of 32 as far as there are keys: first key, keys, mask bits."""
    tile = key0 // KEYS
    start = key0 - tile * KEYS
    stop = min(whole(start + keys), min(KEYS, nk - tile * KEYS))
    before = start % 32
    if mask_bits:
        mask_bits -= 8 * before
    return key0 - before, stop - start + before, mask_bits


@device_function
def block_span(mask_bits, keys, queries):
    """The blocks of 32 keys that any of these queries sees."""
    start, stop = visible_range(mask_bits, keys, queries)
    if start >= stop:
        return 0, 0
    return start & -32, min(whole(stop), keys)


@device_function
def half_span(mask_bits, keys, half):
    """The first key and one past the last that one half of the queries is computed for."""
    if mask_bits:
        if half:
            return block_span(mask_bits, keys, HIGH_HALF)
        return block_span(mask_bits, keys, LOW_HALF)
    return 0, keys


@device_function
def block_spans(mask_bits, keys, n):
    """The first key and one past the last that each 16 of n queries are computed for; both quarters of a half have the same."""
    (a, b), (c, d) = (0, keys), (0, keys)
    if mask_bits:
        (a, b), (c, d) = block_span(mask_bits, keys, LOW_HALF), block_span(mask_bits, keys, HIGH_HALF)
    if 2 * n <= QUERIES:
        c, d = 0, 0
    return a, b, a, b, c, d, c, d


@device_function
def score_halves(keys_a, a_row, queries, scores, keys, steps, spans, spec):
    """Scores of one tile, for each half of the queries in its span; at least 16 keys, so that a product has whole tiles."""
    if spans[0] == spans[4] and spans[1] == spans[5] and steps != 2:
        halves, columns = 1, QUERIES
    else:
        halves, columns = 2, QUERIES // 2
    for half in range(halves):
        start, stop, lane = spans[4 * half], spans[4 * half + 1], 128 * half
        if stop > start:
            start = max(0, min(start, stop - 16))
            target, rows = scores + spec.row_bytes * start + lane, max(16, stop - start)
            a = keys_a + start * a_row
            if steps == 2:
                held_product(a, a_row, 64, queries + lane, target, spec.row_bytes, rows, spec)
            else:
                tile_product(
                    a, a_row, 64, queries + lane, target, spec.row_bytes, spec.row_bytes, rows, steps, columns, spec
                )


@device_function
def score_half(keys_a, a_row, queries, scores, steps, start, stop, spec):
    """Scores (keys, 32) of one half of the queries in its span; at least 16 keys."""
    start = max(0, min(start, stop - 16))
    a, target, rows = keys_a + start * a_row, scores + HALF_ROW * start, max(16, stop - start)
    if steps == 2:
        held_product(a, a_row, 64, queries, target, HALF_ROW, rows, spec)
    else:
        tile_product(a, a_row, 64, queries, target, HALF_ROW, HALF_ROW, rows, steps, HALF, spec)


@device_function
def pv_half(values, pairs, output, columns, start, stop, spec):
    """Output += values^T weights, for one half of the queries and these keys."""
    steps = whole(stop - start) // 32
    if steps:
        a, b = values + 2 * start * columns, pairs + HALF_ROW * (start // 2)
        tile_product_add(a, 64, 64 * columns, b, output, HALF_ROW, spec.row_bytes, columns, steps, HALF, spec)


@device_function
def pv_halves(values, pairs, output, columns, spans, spec):
    """Output += values^T weights, for each half of the queries in its span."""
    if spans[0] == spans[4] and spans[1] == spans[5]:
        halves, queries = 1, QUERIES
    else:
        halves, queries = 2, QUERIES // 2
    for half in range(halves):
        start, stop, lane = spans[4 * half], spans[4 * half + 1], 128 * half
        a, steps = values + 2 * start * columns, whole(stop - start) // 32
        if steps:
            b = pairs + spec.row_bytes * (start // 2) + lane
            row = spec.row_bytes // 4
            tile_product_add(
                a, row, row * columns, b, output + lane, spec.row_bytes, spec.row_bytes, columns, steps, queries, spec
            )


@device_function
def gradient_halves(rows, b, target, steps, columns, spans, spec):
    """Target (keys, columns) += rows (keys, 64) b, a sum over the queries: over each half for the keys in its span.

    ``rows`` are bf16 numbers, a tile's row apart; ``b`` are pairs of queries; ``steps`` is the number of halves that have queries.
    Rows past the last key, up to a multiple of 16, must be 0.
    """
    row = 4 * columns
    halves = 1 if spans[0] == spans[4] and spans[1] == spans[5] else steps
    for half in range(halves):
        start, stop, first = spans[4 * half], spans[4 * half + 1], rows + 64 * half
        if stop > start:
            a, c, count = first + spec.row_bytes * start, target + row * start, whole_16(stop - start)
            depth = steps if halves == 1 else 1
            tile_product_add(a, spec.row_bytes, 64, b + 16 * row * half, c, row, row, count, depth, columns, spec)
