"""The ranges of keys that each query sees, from the plan: causal masks, windows and documents have one, sinks and prefixes two."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.plan import TILE_Q, Plan
from lowtri.masks.tile import PARTIAL

__all__ = ["key_ranges", "keys_seen", "queries_that_see", "row_of_runs", "tile_patterns"]

Ints = NDArray[np.int64]


def key_ranges(plan: Plan, most: int) -> NDArray[np.int32] | None:
    """Where the ranges of visible keys begin and end, for each query; None if a query sees more than ``most`` ranges.

    >>> from lowtri import causal, first, window
    >>> from lowtri.masks.plan import plan
    >>> p = plan(causal() & (window(2) | first(1)), np.arange(4), np.arange(4))
    >>> key_ranges(p, 2)[:, :, 0].tolist()  # [begins, ends] of the first ranges, then of the second ones
    [[[0, 0, 0, 0], [1, 2, 3, 1]], [[0, 0, 0, 2], [0, 0, 0, 4]]]

    Args:
        plan: any plan; ranges are of the indices of its keys.
        most: at most so many ranges for each query.

    Returns:
        int32 (most, 2, masks, Nq); absent ranges are 0 .. 0. The cost grows with the runs of the plan, not with its pairs.
    """
    row, tile, pattern, first, last = _parts(plan)
    opened = _ranges_of_patterns(plan, most)
    if opened is None:
        return None
    of, query, begin, end = opened
    count = np.bincount(of, minlength=len(plan.bits))
    starts = np.cumsum(count) - count
    # The ranges of partial tiles, then those of full runs, for each of their 64 queries.
    many = count[pattern]
    index = np.repeat(starts[pattern], many) + _count_up(many)
    shift = np.repeat(tile, many) * plan.tile_k
    is_full = plan.runs[:, 2] != PARTIAL
    full_row = row_of_runs(plan)[is_full]
    rows = [np.repeat(row, many) * TILE_Q + query[index], (full_row[:, None] * TILE_Q + np.arange(TILE_Q)).ravel()]
    lows = [shift + begin[index], np.repeat(first, TILE_Q)]
    highs = [shift + end[index], np.repeat(last, TILE_Q)]
    return _merged(plan, most, np.concatenate(rows), np.concatenate(lows), np.concatenate(highs))


def queries_that_see(plan: Plan) -> NDArray[np.bool_]:
    """(masks, Nq): whether a query sees any key."""
    sees = np.zeros((len(plan.mask_pairs) * plan.rows, TILE_Q), bool)
    row, _, pattern = tile_patterns(plan)
    words = np.bitwise_or.reduce(plan.bits, axis=1)  # of each pattern: the queries that see a key of it
    of_pattern = np.unpackbits(words[:, None].view(np.uint8), axis=1, bitorder="little").astype(bool)
    np.logical_or.at(sees, row, of_pattern[pattern])
    sees[row_of_runs(plan)[plan.runs[:, 2] != PARTIAL]] = True
    return sees.reshape(len(plan.mask_pairs), plan.rows * TILE_Q)[:, : plan.nq]


def keys_seen(plan: Plan) -> NDArray[np.bool_]:
    """(masks, Nk): whether any query sees a key."""
    masks, columns = len(plan.mask_pairs), -(-plan.nk // plan.tile_k)
    row, column, pattern = tile_patterns(plan)
    seen = np.zeros((masks * columns, plan.tile_k), bool)
    np.logical_or.at(seen, row // max(plan.rows, 1) * columns + column, (plan.bits != 0)[pattern])
    full = plan.runs[:, 2] != PARTIAL
    edges, of = np.zeros((masks, columns + 1), np.int64), row_of_runs(plan)[full] // max(plan.rows, 1)
    np.add.at(edges, (of, plan.runs[full, 0]), 1)
    np.add.at(edges, (of, plan.runs[full, 1]), -1)
    seen[np.flatnonzero(np.cumsum(edges[:, :-1], axis=1))] = True
    return seen.reshape(masks, columns * plan.tile_k)[:, : plan.nk]


def row_of_runs(plan: Plan) -> Ints:
    """The row of each run, counted through all masks."""
    return np.repeat(np.arange(len(plan.row_start) - 1), np.diff(plan.row_start))


def tile_patterns(plan: Plan) -> tuple[Ints, Ints, Ints]:
    """For each partial tile its row (counted through all masks), its column, and its pattern of bits."""
    first, last, kind, index = plan.runs.T.astype(np.int64)
    partial = kind == PARTIAL
    size = (last - first)[partial]
    each = _count_up(size)
    row = np.repeat(row_of_runs(plan)[partial], size)
    return (
        row,
        np.repeat(first[partial], size) + each,
        plan.tile_bits[np.repeat(index[partial], size) + each].astype(np.int64),
    )


def _parts(plan: Plan) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Row, column and pattern of the partial tiles; the first key and one past the last of the full runs."""
    first, last, kind, _ = plan.runs.T.astype(np.int64)
    full = kind != PARTIAL
    return *tile_patterns(plan), first[full] * plan.tile_k, np.minimum(last[full] * plan.tile_k, plan.nk)


def _ranges_of_patterns(plan: Plan, most: int) -> tuple[Ints, Ints, Ints, Ints] | None:
    """The ranges within each pattern: pattern, query, begin, end; None if a query has more than ``most`` in one tile."""
    bits = np.unpackbits(plan.bits.view(np.uint8), axis=1, bitorder="little").reshape(*plan.bits.shape, TILE_Q)
    edge = np.diff(np.pad(bits.view(np.int8), ((0, 0), (1, 1), (0, 0))), axis=1)  # (patterns, tile_k + 1, 64)
    # Within a query, begins and ends alternate, so the two lists are in the same order.
    of, query, begin = np.nonzero(edge.swapaxes(1, 2) == 1)
    end = np.nonzero(edge.swapaxes(1, 2) == -1)[2]
    if np.bincount(of * TILE_Q + query, minlength=1).max() > most:
        return None
    return of, query, begin, end


def _merged(plan: Plan, most: int, row: Ints, low: Ints, high: Ints) -> NDArray[np.int32] | None:
    """Ranges of rows (queries, counted through all masks), in any order, with adjacent ones joined."""
    order = np.argsort(row * (plan.nk + 1) + low, kind="stable")
    row, low, high = row[order], low[order], high[order]
    begins = np.ones(len(row), bool)
    begins[1:] = (row[1:] != row[:-1]) | (low[1:] != high[:-1])
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], len(row)) - 1 if len(row) else starts
    row, low, high = row[starts], low[starts], high[stops]
    nth = np.arange(len(row)) - np.searchsorted(row, row)
    if len(nth) and nth.max() >= most:
        return None
    masks = len(plan.mask_pairs)
    out = np.zeros((most, 2, masks * plan.rows * TILE_Q), np.int32)
    out[nth, 0, row], out[nth, 1, row] = low, high
    return np.ascontiguousarray(out.reshape(most, 2, masks, plan.rows * TILE_Q)[..., : plan.nq])


def _count_up(sizes: Ints) -> Ints:
    """0 .. n-1 for each n in sizes, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
