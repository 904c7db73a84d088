"""Documents with a window, as flash attention describes masks, from the ranges of keys in a plan.

A segment is a run of queries with the run of keys that belongs to it. Within a segment of n queries and m keys, query i sees the keys
from ``i + m - n - before`` to ``i + m - n + after``: the last query is aligned with the last key. All segments share ``before`` and
``after``; -1 means no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.ranges import key_ranges
from lowtri.ops.call import Call

__all__ = ["Segments", "segments_of"]

Ints = NDArray[np.int64]


class Segments(NamedTuple):
    """Where the segments of all batch rows begin, the last entry the end: queries and keys of the rows joined, (segments + 1,)."""

    queries: Ints
    keys: Ints
    before: int
    after: int


class _Row(NamedTuple):
    """The ranges of one mask: each query sees ``low <= key < high``; a segment begins at each of ``cuts``."""

    low: Ints
    high: Ints
    cuts: Ints  # (segments + 1,) queries
    key_cuts: Ints  # (segments + 1,) keys


@lru_cache(maxsize=16)
def segments_of(call: Call) -> Segments | str:
    """The segments of a call, or the reason why its mask is not made of segments.

    Kept, since a call is asked for its reasons before it is prepared.
    """
    plan = call.plan()
    if plan.mask_index.shape[1] > 1:
        return "the mask differs by head"
    ranges = key_ranges(plan, 1)
    if ranges is None:
        return "a query sees more than one range of keys"
    rows = []
    for low, high in zip(*ranges[0].astype(np.int64), strict=True):
        row = _row(low, high, plan.nk)
        if isinstance(row, str):
            return row
        rows.append(row)
    before = _reach(rows, lambda row, centre: centre - row.low, lambda row: row.low > _starts(row))
    after = _reach(rows, lambda row, centre: row.high - 1 - centre, lambda row: row.high < _stops(row))
    if not all(_is_described(row, before, after) for row in rows):
        return "the ranges of keys are not those of documents with one window"
    batch, nq, nk = call.q.shape[0], plan.nq, plan.nk
    which = [int(plan.mask_index[b % len(plan.mask_index), 0]) for b in range(batch)]
    queries = np.concatenate([[0], *(rows[m].cuts[1:] + b * nq for b, m in enumerate(which))])
    keys = np.concatenate([[0], *(rows[m].key_cuts[1:] + b * nk for b, m in enumerate(which))])
    return Segments(queries, keys, before, after)


def _row(low: Ints, high: Ints, nk: int) -> _Row | str:
    """The ranges of one mask, cut where the range of a query does not meet the one before."""
    if np.any(high <= low):
        return "a query sees no key"
    begins = np.concatenate([[True], low[1:] >= high[:-1]])
    cuts = np.append(np.flatnonzero(begins), len(low))
    key_cuts = np.append(np.minimum.reduceat(low, cuts[:-1]), nk)
    stops = np.maximum.reduceat(high, cuts[:-1])
    if key_cuts[0] != 0 or not np.array_equal(stops, key_cuts[1:]):
        return "a key is seen by no query, or by two documents"
    return _Row(low, high, cuts, key_cuts)


def _starts(row: _Row) -> Ints:
    return np.repeat(row.key_cuts[:-1], np.diff(row.cuts))


def _stops(row: _Row) -> Ints:
    return np.repeat(row.key_cuts[1:], np.diff(row.cuts))


def _centre(row: _Row) -> Ints:
    """The key that each query is aligned with."""
    queries_after = np.repeat(row.cuts[1:], np.diff(row.cuts)) - np.arange(len(row.low))
    return _stops(row) - queries_after


def _reach(
    rows: list[_Row], distance: Callable[[_Row, Ints], Ints], is_limited: Callable[[_Row], NDArray[np.bool_]]
) -> int:
    """The limit of the window on one side: the distance where a segment does not end first, else none."""
    for row in rows:
        limited = is_limited(row)
        if limited.any():
            return int(distance(row, _centre(row))[limited][0])
    return -1


def _is_described(row: _Row, before: int, after: int) -> bool:
    """Whether the segments with this window give exactly the row's ranges."""
    if before < -1 or after < -1:
        return False
    centre, starts, stops = _centre(row), _starts(row), _stops(row)
    low = starts if before < 0 else np.maximum(starts, centre - before)
    high = stops if after < 0 else np.minimum(stops, centre + after + 1)
    return bool(np.array_equal(low, row.low) and np.array_equal(high, row.high))
