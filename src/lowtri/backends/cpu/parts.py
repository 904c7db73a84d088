"""How the backward is cut for threads: into parts of the queries, and rounds in which parts add to the gradients of different keys.

A task is a part of the rows of query tiles of one key/value head, those of all heads of its group. dQ of these rows is its own. Several
parts add to one copy of dK and dV. So that no two of them write the same rows at once, key tiles are dealt to as many *phases* as parts
share a copy, and the backward runs in as many rounds, one after another: in each, each of these parts takes the keys of another phase.
So the order of all additions is fixed, and memory does not grow with the number of parts. Other copies have the keys that their parts
see, and are added to the first in their order.

With more rounds there are fewer copies, but each round prepares its rows of queries again, and ends when its last task does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.kernels.abi import KEYS, PART
from lowtri.masks.plan import Plan, row_of_runs
from lowtri.masks.tile import FULL

BUSY = 0.9  # of the threads' time; more parts are not needed
# A partial tile, and preparing a row of query tiles, by the cost of a full tile (dev/decisions/0036-parts-of-queries.md).
PARTIAL_COST = 0.6
ROW_COST = 0.25
_MOST_MEMORY = 3  # times that without parts
_MOST_PARTS = 64

Ints = NDArray[np.int64]


class Memory(NamedTuple):
    """Bytes of the backward without parts but for the scratch memory, of dK and dV of one key, and of a thread's scratch memory."""

    whole: int
    key: int
    thread: int


class Rows:
    """The rows of query tiles of a key/value head, which serves ``group`` heads: those of its first head first.

    Attributes:
        tiles: key tiles.
        seen: the first key tile that each row sees, and one past the last.
    """

    def __init__(self, plan: Plan, group: int) -> None:
        self.plan, self.group = plan, group
        self.tiles = ceil(plan.nk / KEYS)
        row = row_of_runs(plan) % max(plan.rows, 1)
        first = np.full(plan.rows, self.tiles, np.int64)
        last = np.zeros(plan.rows, np.int64)
        np.minimum.at(first, row, plan.runs[:, 0])
        np.maximum.at(last, row, plan.runs[:, 1])
        self.seen = np.tile(first, group), np.tile(last, group)
        self._costs: dict[int, NDArray[np.float64]] = {}

    def costs(self, phases: int) -> NDArray[np.float64]:
        """(rows, phases): what each row costs in each phase, in full key tiles; masks are taken to be equally frequent."""
        if phases not in self._costs:
            first, last, kind = (self.plan.runs[:, field, None] for field in range(3))
            phase = np.arange(phases)

            def before(tile: NDArray[np.int32]) -> Ints:  # how many tiles of each phase lie before this one
                return (tile + 2 * phases - 1 - phase) // (2 * phases) + (tile + phase) // (2 * phases)

            runs = np.where(kind == FULL, 1, PARTIAL_COST) * (before(last) - before(first))
            sums = np.concatenate([np.zeros((1, phases)), np.cumsum(runs, axis=0)])[self.plan.row_start]
            rows = np.diff(sums, axis=0).reshape(self.plan.masks, self.plan.rows, phases)
            self._costs[phases] = np.tile(rows.mean(0) + ROW_COST, (self.group, 1))
        return self._costs[phases]


@dataclass(frozen=True, eq=False)
class Cut:
    """Parts of the rows of a key/value head.

    Attributes:
        order: all rows, part by part.
        starts: where each part begins in ``order``, and where the last one ends.
        rounds: how many parts share a copy of dK and dV.
        copies: the key tiles of each copy, first and one past the last; the first copy, dK and dV themselves, has all.
    """

    order: NDArray[np.int32]
    starts: Ints
    rounds: int
    copies: list[tuple[int, int]]

    @property
    def parts(self) -> int:
        return len(self.starts) - 1


def choose_cut(rows: Rows, heads: int, threads: int, memory: Memory) -> Cut:
    """The cut for so many key/value heads and threads: the least parts that keep the threads busy, and else the best that fit."""
    best = uncut(rows)
    busy = share_busy(heads, threads)
    if threads == 1:
        return best
    most = _MOST_MEMORY * (memory.whole + memory.thread)
    costs = rows.costs(1)[:, 0]
    for count in range(2, min(_MOST_PARTS, len(costs)) + 1):
        if busy >= BUSY:
            break
        if share_busy(heads * count, threads) <= busy:
            continue
        left = most - memory.whole - min(threads, heads * count) * memory.thread
        for order, starts in (in_blocks(costs, count), folded(len(costs), count)):
            cut = with_fewest_rounds(rows, order, starts, left // (KEYS * memory.key))
            if cut is None:
                continue
            share = costs.sum() * heads / (threads * ceil(heads * count / threads) * time_of(rows, cut))
            if share > busy:
                best, busy = cut, share
    return best


def share_busy(tasks: int, threads: int) -> float:
    """The share of the threads' time in which they work on equal tasks."""
    return tasks / (threads * ceil(tasks / threads))


def uncut(rows: Rows) -> Cut:
    """All rows in one part."""
    count = rows.plan.rows * rows.group
    return Cut(np.arange(count, dtype=np.int32), np.array([0, count]), 1, [(0, rows.tiles)])


def in_blocks(costs: NDArray[np.float64], count: int) -> tuple[NDArray[np.int32], Ints]:
    """Parts of neighbouring rows with about equal costs, which see few keys under a window: their order, and starts."""
    middle = np.cumsum(costs) - costs / 2
    starts = np.searchsorted(middle, costs.sum() * np.arange(1, count) / count)
    return np.arange(len(costs), dtype=np.int32), np.concatenate([[0], starts, [len(costs)]])


def folded(rows: int, count: int) -> tuple[NDArray[np.int32], Ints]:
    """Rows dealt to parts there and back: with a causal mask all parts cost the same in each phase."""
    part = phase_of(np.arange(rows), count)
    order = np.argsort(part, kind="stable")
    return order.astype(np.int32), np.searchsorted(part[order], np.arange(count + 1))


def phase_of(tile: Ints, phases: int) -> Ints:
    """The phase of key tiles, as kernels deal them: 0, 1, 2, 2, 1, 0, 0, 1, ... of three."""
    place = tile % (2 * phases)
    return np.minimum(place, 2 * phases - 1 - place)


def with_fewest_rounds(rows: Rows, order: NDArray[np.int32], starts: Ints, most_tiles: int) -> Cut | None:
    """These parts in as many rounds as needed for at most so many key tiles in copies; None if there is no such cut.

    Each copy has as many parts as there are rounds, so that in the first round all of its rows are set.
    """
    count = len(starts) - 1
    if min(np.diff(starts)) == 0:
        return None
    first, last = (np.array(x[order]) for x in rows.seen)
    firsts, lasts = np.minimum.reduceat(first, starts[:-1]), np.maximum.reduceat(last, starts[:-1])
    for rounds in range(1, count + 1):
        if count % rounds == 0:
            low = firsts.reshape(-1, rounds).min(1)
            high = np.maximum(lasts.reshape(-1, rounds).max(1), low)
            if (high - low)[1:].sum() <= most_tiles:
                copies = list(zip(low[1:].tolist(), high[1:].tolist(), strict=True))
                return Cut(order, starts, rounds, [(0, rows.tiles), *copies])
    return None


def time_of(rows: Rows, cut: Cut) -> float:
    """What the longest tasks of all rounds cost."""
    costs = np.add.reduceat(rows.costs(cut.rounds)[cut.order], cut.starts[:-1])  # (parts, rounds)
    part = np.arange(cut.parts)[:, None]
    return float(costs[part, (part + np.arange(cut.rounds)) % cut.rounds].max(0).sum())


def table(cut: Cut, rows: int, heads: int, sizes: Sequence[int]) -> tuple[NDArray[np.void], list[tuple[int, int]]]:
    """The record of each part for the kernel, and where copies of dK and dV begin and end after the first, in numbers.

    Args:
        rows: of dK and dV.
        heads: batch x key/value heads.
        sizes: the numbers in a row of dK, and in one of dV.
    """
    offsets, end = [(0, 0)], 0
    for first, last in cut.copies[1:]:
        count = max(0, min(KEYS * last, rows) - KEYS * first)
        offsets.append((end, end + heads * count * sizes[0]))
        end = offsets[-1][1] + heads * count * sizes[1]
    records = np.zeros(cut.parts, PART)
    for part in range(cut.parts):
        copy = part // cut.rounds
        records[part] = (*cut.starts[part : part + 2], *cut.copies[copy], copy, *offsets[copy])
    return records, [*offsets[1:], (end, end)]
