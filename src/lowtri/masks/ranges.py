"""The ranges of keys that each query sees, and who sees anything: causal masks, windows and documents have one range, sinks two."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.plan import TILE_Q, Ints, Plan, count_up, row_of_runs, run_bounds
from lowtri.masks.tile import PARTIAL


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
    ranges = _ranges_of_patterns(plan, most)
    if ranges is None:
        return None
    row, tile, pattern = tile_patterns(plan)
    count = np.bincount(ranges.pattern, minlength=len(plan.bits))
    starts = np.cumsum(count) - count
    # The ranges of partial tiles, then those of full runs, for each of their 64 queries.
    many = count[pattern]
    index = np.repeat(starts[pattern], many) + count_up(many)
    shift = np.repeat(tile, many) * plan.tile_k
    is_full = plan.runs[:, 2] != PARTIAL
    first, last = plan.runs[is_full, :2].T.astype(np.int64) * plan.tile_k
    full_row = row_of_runs(plan)[is_full]
    partial_queries = np.repeat(row, many) * TILE_Q + ranges.query[index]
    full_queries = (full_row[:, None] * TILE_Q + np.arange(TILE_Q)).ravel()
    queries = np.concatenate([partial_queries, full_queries])
    low = np.concatenate([shift + ranges.begin[index], np.repeat(first, TILE_Q)])
    high = np.concatenate([shift + ranges.end[index], np.repeat(np.minimum(last, plan.nk), TILE_Q)])
    return _merged(plan, most, queries, low, high)


def queries_that_see(plan: Plan) -> NDArray[np.bool_]:
    """(masks, Nq): whether a query sees any key."""
    sees = np.zeros((plan.masks * plan.rows, TILE_Q), bool)
    row, _, pattern = tile_patterns(plan)
    words = np.bitwise_or.reduce(plan.bits, axis=1)  # of each pattern: the queries that see a key of it
    of_pattern = np.unpackbits(words[:, None].view(np.uint8), axis=1, bitorder="little").astype(bool)
    np.logical_or.at(sees, row, of_pattern[pattern])
    sees[row_of_runs(plan)[plan.runs[:, 2] != PARTIAL]] = True
    return sees.reshape(plan.masks, plan.rows * TILE_Q)[:, : plan.nq]


def keys_seen(plan: Plan) -> NDArray[np.bool_]:
    """(masks, Nk): whether any query sees a key."""
    masks = plan.masks
    columns = -(-plan.nk // plan.tile_k)
    row, column, pattern = tile_patterns(plan)
    seen = np.zeros((masks * columns, plan.tile_k), bool)
    np.logical_or.at(seen, row // max(plan.rows, 1) * columns + column, (plan.bits != 0)[pattern])
    full = plan.runs[:, 2] != PARTIAL
    mask_of_run = row_of_runs(plan)[full] // max(plan.rows, 1)
    edges = np.zeros((masks, columns + 1), np.int64)
    np.add.at(edges, (mask_of_run, plan.runs[full, 0]), 1)
    np.add.at(edges, (mask_of_run, plan.runs[full, 1]), -1)
    seen[np.flatnonzero(np.cumsum(edges[:, :-1], axis=1))] = True
    return seen.reshape(masks, columns * plan.tile_k)[:, : plan.nk]


def tile_patterns(plan: Plan) -> tuple[Ints, Ints, Ints]:
    """For each partial tile its row (counted through all masks), its column, and its pattern of bits."""
    is_partial = plan.runs[:, 2] == PARTIAL
    runs = plan.runs[is_partial].astype(np.int64)
    size = runs[:, 1] - runs[:, 0]
    each = count_up(size)
    row = np.repeat(row_of_runs(plan)[is_partial], size)
    column = np.repeat(runs[:, 0], size) + each
    return row, column, plan.tile_bits[np.repeat(runs[:, 3], size) + each].astype(np.int64)


class _Ranges(NamedTuple):
    """Ranges of visible keys within patterns, an entry for each."""

    pattern: Ints
    query: Ints
    begin: Ints
    end: Ints


def _ranges_of_patterns(plan: Plan, most: int) -> _Ranges | None:
    """The ranges of all patterns; None if a query has more than ``most`` in one tile."""
    bits = np.unpackbits(plan.bits.view(np.uint8), axis=1, bitorder="little").reshape(*plan.bits.shape, TILE_Q)
    edge = np.diff(np.pad(bits.view(np.int8), ((0, 0), (1, 1), (0, 0))), axis=1)  # (patterns, tile_k + 1, 64)
    # Within a query, begins and ends alternate, so the two lists are in the same order.
    pattern, query, begin = np.nonzero(edge.swapaxes(1, 2) == 1)
    end = np.nonzero(edge.swapaxes(1, 2) == -1)[2]
    if np.bincount(pattern * TILE_Q + query, minlength=1).max() > most:
        return None
    return _Ranges(pattern, query, begin, end)


def _merged(plan: Plan, most: int, row: Ints, low: Ints, high: Ints) -> NDArray[np.int32] | None:
    """Ranges of rows (queries, counted through all masks), in any order, with adjacent ones joined."""
    order = np.argsort(row * (plan.nk + 1) + low, kind="stable")
    row = row[order]
    low = low[order]
    high = high[order]
    begins = np.ones(len(row), bool)
    begins[1:] = (row[1:] != row[:-1]) | (low[1:] != high[:-1])
    starts, ends = run_bounds(begins)
    row = row[starts]
    nth = np.arange(len(row)) - np.searchsorted(row, row)
    if len(nth) and nth.max() >= most:
        return None
    out = np.zeros((most, 2, plan.masks * plan.rows * TILE_Q), np.int32)
    out[nth, 0, row] = low[starts]
    out[nth, 1, row] = high[ends]
    return np.ascontiguousarray(out.reshape(most, 2, plan.masks, plan.rows * TILE_Q)[..., : plan.nq])
