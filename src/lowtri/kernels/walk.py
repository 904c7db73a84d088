"""The walk along a row of the plan: which tiles of keys a tile of queries sees, and of these which keys.

EMPTY tiles are in no run, so they are never met; FULL ones come without bits; PARTIAL ones are cut down to the keys that somebody sees.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.inner import inner
from lowtri.kernels.simd import read_int32, read_int64, read_word

__all__ = ["ALL", "sides", "tiles"]

FULL = 2  # of a plan's three kinds of tiles, the one without hidden pairs
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)  # every query sees the key
FIRST = np.uint64(0xFFFFFFFF)  # the first 32 of them


@inner
def seen_range(words, keys, lanes):
    """The first key and one past the last that any of the queries in ``lanes`` (a word) sees."""
    start, stop = 0, keys
    while start < stop and read_word(words + 8 * start) & lanes == 0:
        start += 1
    while stop > start and read_word(words + 8 * (stop - 1)) & lanes == 0:
        stop -= 1
    return start, stop


@inner
def sides(words, keys):
    """The ranges of keys that the first 32 queries and the last 32 see, where going through each alone saves a tenth or more.

    Otherwise the second range is empty and the first one is all keys, for all 64. Ranges begin at even keys, so that pairs stay pairs.
    """
    if words == 0:
        return 0, keys, 0, 0
    a, b = seen_range(words, keys, FIRST)
    c, d = seen_range(words, keys, ALL ^ FIRST)
    a, c = a & -2, c & -2
    if 10 * (b - a + d - c) > 18 * keys:
        return 0, keys, 0, 0
    return a, b, c, d


@inner
def shown(kind, bits, tile_bits, index, size, most):
    """Of a tile's ``most`` keys the first that anyone sees, one past the last, and the words from that first one on.

    There is a word for each of ``size`` keys; 0 stands for them where everybody sees everything (a FULL tile).
    """
    if kind == FULL:
        return 0, most, 0
    words = bits + 8 * size * read_int32(tile_bits + 4 * index)
    begin, end = seen_range(words, most, ALL)
    return begin, end, words + 8 * begin


@inner
def tiles(row, runs, tile_bits, bits, size, nk):
    """The tiles of one row of the plan, as (first key, keys, words): see :func:`shown`. ``row``: where its runs begin and end.

    A run is four int32: its first tile, one past the last, their kind, and the place of the first one's bits.
    """
    for run in range(read_int64(row), read_int64(row + 8)):
        at = runs + 16 * run
        first, last, kind, place = read_int32(at), read_int32(at + 4), read_int32(at + 8), read_int32(at + 12)
        for tile in range(first, last):
            begin, end, words = shown(kind, bits, tile_bits, place + tile - first, size, min(size, nk - tile * size))
            yield tile * size + begin, end - begin, words
