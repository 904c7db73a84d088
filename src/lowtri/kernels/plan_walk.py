"""The walk along a row of the plan: which tiles of keys a tile of queries sees, and of these which keys.

EMPTY tiles are in no run, so they are never met; FULL ones come without bits; PARTIAL ones are cut down to the keys that some query
sees.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.simd import read_int32, read_int64, read_word

__all__ = ["ALL", "SIXTEEN", "spans_of", "tiles"]

FULL = 2  # of a plan's three kinds of tiles, the one without hidden pairs
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)  # every query sees the key
SIXTEEN = np.uint64(0xFFFF)  # the first 16 of them


@device_function
def seen_range(words, keys, lanes):
    """The first key and one past the last that any of the queries in ``lanes`` (a word) sees."""
    start, stop = 0, keys
    while start < stop and read_word(words + 8 * start) & lanes == 0:
        start += 1
    while stop > start and read_word(words + 8 * (stop - 1)) & lanes == 0:
        stop -= 1
    return start, stop


@device_function
def span(words, keys, lanes):
    """The range of keys that the queries in ``lanes`` (a word) see: whole pairs, as far as there are keys."""
    begin, end = seen_range(words, keys, lanes)
    return begin & -2, min((end + 1) & -2, keys)


@device_function
def spans_of(words, keys):
    """For each 16 of a tile's queries the range of keys that they go through, and in how many parts to go: 4 or 1.

    They go apart where that saves a tenth of the pairs or more.
    """
    if words:
        (a, b), (c, d) = span(words, keys, SIXTEEN), span(words, keys, SIXTEEN << np.uint64(16))
        (e, f), (g, h) = span(words, keys, SIXTEEN << np.uint64(32)), span(words, keys, SIXTEEN << np.uint64(48))
        if 10 * (b - a + d - c + f - e + h - g) <= 36 * keys:
            return (a, b, c, d, e, f, g, h), 4
    return (0, keys, 0, keys, 0, keys, 0, keys), 1


@device_function
def visible_keys(kind, bits, tile_bits, index, size, most):
    """Of a tile's ``most`` keys the first that any query sees, one past the last, and the words from that first one on.

    There is a word for each of ``size`` keys; 0 stands for them where every query sees every key (a FULL tile).
    """
    if kind == FULL:
        return 0, most, 0
    words = bits + 8 * size * read_int32(tile_bits + 4 * index)
    begin, end = seen_range(words, most, ALL)
    return begin, end, words + 8 * begin


@device_function
def tiles(plan, b, h, r, size, nk):
    """The tiles of row r of the plan of a head, as (first key, keys, words): see :func:`visible_keys`.

    A run is four int32: its first tile, one past the last, their kind, and the place of the first one's bits.
    """
    mask_index = read_int32(plan.mask_index + 4 * (b * plan.mask_index_b + h * plan.mask_index_h))
    row = plan.row_start + 8 * (mask_index * plan.rows + r)
    runs, tile_bits, bits = plan.runs, plan.tile_bits, plan.bits
    for run in range(read_int64(row), read_int64(row + 8)):
        at = runs + 16 * run
        first, last, kind, place = read_int32(at), read_int32(at + 4), read_int32(at + 8), read_int32(at + 12)
        for tile in range(first, last):
            most = min(size, nk - tile * size)
            begin, end, words = visible_keys(kind, bits, tile_bits, place + tile - first, size, most)
            yield tile * size + begin, end - begin, words
