"""The key tiles that a query tile sees, read from the plan.

EMPTY tiles are in no run of the plan. FULL ones have no mask bits. PARTIAL ones are cut to the keys that some query sees, from a whole
pair on, with a word of mask bits for each of these keys.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.simd import read_int32, read_int64, read_word

__all__ = ["ALL_QUERIES", "FIRST_16", "key_spans", "tile_count", "visible_range", "visible_tiles"]

FULL = 2  # masks.tile.FULL
ALL_QUERIES = np.uint64(0xFFFFFFFFFFFFFFFF)  # the mask bits of a key that every query sees
FIRST_16 = np.uint64(0xFFFF)  # of the 64 queries


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
def visible_span(mask_bits, keys, queries):
    """The visible range, extended to whole pairs of keys as far as there are keys."""
    start, stop = visible_range(mask_bits, keys, queries)
    return start & -2, min((stop + 1) & -2, keys)


@device_function
def group_span(mask_bits, keys, group, n):
    """The keys that 16 of a tile's n queries see; none for queries past n."""
    if 16 * group >= n:
        return 0, 0
    if mask_bits == 0:
        return 0, keys
    return visible_span(mask_bits, keys, FIRST_16 << np.uint64(16 * group))


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
def visible_keys(kind, bits, tile_bits, index, size, keys):
    """Of a tile's keys the first pair that any query sees, one past the last key, and the address of the mask bits from there on.

    The patterns in ``bits`` have a word for each of ``size`` keys. A FULL tile has no mask bits: their address is 0.
    """
    if kind == FULL:
        return 0, keys, 0
    mask_bits = bits + 8 * size * read_int32(tile_bits + 4 * index)
    start, stop = visible_range(mask_bits, keys, ALL_QUERIES)
    start &= -2
    return start, stop, mask_bits + 8 * start


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
def visible_tiles(plan, b, h, r, size, nk):
    """The key tiles of row r of a head's plan, as (first key, keys, mask bits): see :func:`visible_keys`.

    A run of the plan is four int32: first tile, one past the last, kind, and the index of its first tile in ``tile_bits``.
    """
    row = first_run(plan, b, h, r)
    runs, tile_bits, bits = plan.runs, plan.tile_bits, plan.bits
    for run in range(read_int64(row), read_int64(row + 8)):
        fields = runs + 16 * run
        first, last, kind = read_int32(fields), read_int32(fields + 4), read_int32(fields + 8)
        index = read_int32(fields + 12)
        for tile in range(first, last):
            keys = min(size, nk - tile * size)
            start, stop, mask_bits = visible_keys(kind, bits, tile_bits, index + tile - first, size, keys)
            yield tile * size + start, stop - start, mask_bits
