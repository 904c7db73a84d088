"""The key tiles that a tile of queries sees, read from the plan, and which keys of a tile each few queries see.

EMPTY tiles are in no run of the plan. FULL ones have no mask words. PARTIAL ones are cut to the keys that some query sees, from a whole
pair on, with a mask word for each of these keys.

A product has parts. On vectors a part is a group of 16 queries, with the keys from the first to the last that it sees. On tile
registers it is one half of the 64 queries, with blocks of 32 keys, since 2 x 2 registers cover 32 keys and 32 queries; mask words hide
the other pairs of a block.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.abi import KEYS
from lowtri.kernels.device import device_function
from lowtri.kernels.rows import ALL_QUERIES, round_up
from lowtri.kernels.simd import read_int32, read_int64, read_word, tuple_item
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.values import KeyTile, Span, Spans, Tokens

FULL = 2  # lowtri.masks.tile.FULL
FIRST_16 = np.uint64(0xFFFF)  # of the 64 queries
LOW_HALF = np.uint64(0x00000000FFFFFFFF)
ALL_TILES = 2**31  # more than there are
_FEWEST_KEYS = 8  # of a product of scores


@device_function
def tile_of_queries(call, batch, head, row):
    """The queries of a row of tiles of the plan."""
    return Tokens(batch, head, row * QUERIES, min(QUERIES, call.nq - row * QUERIES))


@device_function
def tile_count(call, queries):
    """How many key tiles a tile of queries sees."""
    row = first_run(call.plan, queries)
    runs = call.plan.runs
    count = 0
    for run in range(read_int64(row), read_int64(row + 8)):
        count += read_int32(runs + 16 * run + 4) - read_int32(runs + 16 * run)
    return count


@device_function
def visible_tiles(call, queries, first_tile, last_tile):
    """The key tiles ``first_tile`` .. ``last_tile`` that a tile of queries sees: those of their keys that any query sees.

    They begin at a whole pair; on tile registers they are whole blocks of 32. A run of the plan is four int32: first tile, one past the
    last, kind, and the index of its first tile in ``tile_bits``. The patterns in ``bits`` have a word for each of a tile's keys.
    """
    spec = call.spec
    plan = call.plan
    kv_head = queries.head // call.group
    row = first_run(plan, queries)
    for run in range(read_int64(row), read_int64(row + 8)):
        fields = plan.runs + 16 * run
        first, last = read_int32(fields), read_int32(fields + 4)
        kind, index = read_int32(fields + 8), read_int32(fields + 12)
        for tile in range(max(first, first_tile), min(last, last_tile)):
            start = 0
            stop = min(KEYS, call.nk - tile * KEYS)
            mask_words = 0
            if kind != FULL:
                mask_words = plan.bits + 8 * KEYS * read_int32(plan.tile_bits + 4 * (index + tile - first))
                whole = KeyTile(queries.batch, kv_head, tile * KEYS, stop, mask_words)
                seen = visible_range(whole, ALL_QUERIES)
                if spec.uses_amx:
                    start, stop = seen.first & -32, min(round_up(seen.stop, 32), stop)
                else:
                    start, stop = seen.first & -2, seen.stop
                mask_words += 8 * start
            yield KeyTile(queries.batch, kv_head, tile * KEYS + start, stop - start, mask_words)


@device_function
def phase_of(tile, phases):
    """The phase of a key tile (:mod:`lowtri.backends.cpu.parts`): tiles are dealt there and back."""
    place = tile % (2 * phases)
    return min(place, 2 * phases - 1 - place)


@device_function
def first_run(plan, queries):
    """The address of the index of the first run of a tile of queries; that of one past its last run follows."""
    place = queries.batch * plan.mask_index_b + queries.head * plan.mask_index_h
    mask_index = read_int32(plan.mask_index + 4 * place)
    return plan.row_start + 8 * (mask_index * plan.rows + queries.first // QUERIES)


@device_function
def visible_range(keys, queries):
    """The keys from the first to the last that any of these queries (a word of bits) sees."""
    start, stop = 0, keys.count
    while start < stop and read_word(keys.mask_words + 8 * start) & queries == 0:
        start += 1
    while stop > start and read_word(keys.mask_words + 8 * (stop - 1)) & queries == 0:
        stop -= 1
    return Span(start, stop)


@device_function
def span(keys, queries, size):
    """The keys that any of these queries (a word of bits) sees, extended to whole blocks of ``size`` keys as far as there are keys."""
    if keys.mask_words == 0:
        return Span(0, keys.count)
    seen = visible_range(keys, queries)
    if seen.first >= seen.stop:
        return Span(0, 0)
    return Span(seen.first & -size, min(round_up(seen.stop, size), keys.count))


@device_function
def tile_spans(keys, n, spec):
    """The keys that each 16 of a tile's n queries see, and into how many parts products are divided.

    On vectors four groups of queries pay if they save a tenth of the pairs or more; so one group has at least 49 queries.
    """
    if spec.uses_amx:
        low, high = half_span(keys, 0), Span(0, 0)
        if 2 * n > QUERIES:
            high = half_span(keys, QUERIES // 2)
        return Spans((low.first, low.stop, low.first, low.stop, high.first, high.stop, high.first, high.stop), 2)
    a, b = group_span(keys, 0, n), group_span(keys, 1, n)
    c, d = group_span(keys, 2, n), group_span(keys, 3, n)
    pairs = b.stop - b.first + a.stop - a.first + c.stop - c.first + d.stop - d.first
    if 10 * pairs <= 36 * keys.count:
        return Spans((a.first, a.stop, b.first, b.stop, c.first, c.stop, d.first, d.stop), 4)
    count = keys.count
    return Spans((0, count, 0, count, 0, count, 0, count), 1)


@device_function
def half_span(keys, first_query):
    """The blocks of 32 keys that 32 of a tile's queries see."""
    return span(keys, LOW_HALF << np.uint64(first_query), 32)


@device_function
def group_span(keys, group, n):
    """The pairs of keys that 16 of a tile's n queries see; none for queries past n."""
    if 16 * group >= n:
        return Span(0, 0)
    return span(keys, FIRST_16 << np.uint64(16 * group), 2)


@device_function
def edges_of(spans, group):
    """The keys that a group of 16 queries sees."""
    return Span(tuple_item(spans.edges, 2 * group), tuple_item(spans.edges, 2 * group + 1))


@device_function
def next_keys(spans, j, end):
    """Where the keys from j on end that the same groups of queries see, the first of these queries, and one past the last.

    A product has a few keys at least, some of which not all of its queries see.
    """
    stop = end
    first = QUERIES
    last = 0
    for n in range(2 * spans.groups):
        edge = tuple_item(spans.edges, n)
        if edge > j:
            stop = min(stop, max(edge, j + _FEWEST_KEYS))
    for group in range(spans.groups):
        seen = edges_of(spans, group)
        if seen.first < stop and seen.stop > j:
            first, last = min(first, QUERIES // spans.groups * group), QUERIES // spans.groups * (group + 1)
    return stop, first, last
