"""Runs of key blocks: which blocks of keys the queries of a block, or of a rank, see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.plan import TILE_Q, Plan

Ints = NDArray[np.int64]


class Runs(NamedTuple):
    """Runs of blocks, each of one owner: a block of queries, or a rank."""

    owner: Ints  # (R,), increasing
    first: Ints  # (R,), the first block of the run
    last: Ints  # (R,), one past the last

    def of(self, owner: int) -> tuple[Ints, Ints]:
        """The runs of one owner: first blocks, and one past the last ones."""
        start, stop = np.searchsorted(self.owner, [owner, owner + 1])
        return self.first[start:stop], self.last[start:stop]

    def blocks(self, owner: int) -> Ints:
        """The blocks in the runs of one owner, increasing."""
        first, last = self.of(owner)
        size = last - first
        return np.repeat(first - np.cumsum(size) + size, size) + np.arange(int(size.sum()))

    def hold(self, owner: Ints, blocks: int) -> NDArray[np.bool_]:
        """For each block, whether it lies in a run of ``owner[block]``; there are ``blocks`` blocks."""
        keys = self.owner * (blocks + 1)
        wanted = owner * (blocks + 1) + np.arange(blocks)
        index = np.searchsorted(keys + self.first, wanted, side="right") - 1
        return (index >= 0) & (wanted < np.append(keys + self.last, -1)[index])


def first_tokens(n: int, block: int) -> Ints:
    """(blocks + 1,): the first token of each block, and ``n``."""
    return np.minimum(np.arange(-(-n // block) + 1) * block, n)


def block_pairs(plan: Plan, block: int) -> Ints:
    """(blocks,): the visible pairs of each block of queries, summed over all batch rows and heads of the mask."""
    times = np.bincount(plan.mask_index.ravel(), minlength=len(plan.mask_pairs))
    pairs = (plan.row_pairs() * times[:, None]).sum(axis=0)  # (rows,)
    return np.add.reduceat(pairs, np.arange(0, plan.rows, block // TILE_Q))


def block_runs(plan: Plan, block: int) -> Runs:
    """The blocks of keys that each block of queries sees, in any batch row and head."""
    row = np.repeat(np.arange(len(plan.mask_pairs) * plan.rows), np.diff(plan.row_start)) % plan.rows
    first, last = plan.runs[:, 0].astype(np.int64), plan.runs[:, 1].astype(np.int64)
    to_block = Runs(row * TILE_Q // block, first * plan.tile_k // block, -(-last * plan.tile_k // block))
    return _united(to_block, -(-plan.nk // block))


def runs_of_ranks(runs: Runs, owner: Ints) -> Runs:
    """The blocks of keys that each rank sees, from those of its blocks of queries; ``owner`` is the rank of each block."""
    return _united(Runs(owner[runs.owner], runs.first, runs.last), len(owner))


def _united(runs: Runs, blocks: int) -> Runs:
    """Each owner's runs, in order, with overlapping and adjacent ones united."""
    order = np.lexsort((runs.first, runs.owner))
    owner, first = runs.owner[order], runs.first[order]
    last = np.minimum(runs.last[order], blocks)
    offset = owner * (blocks + 1)  # keeps the runs of different owners apart
    reach = np.maximum.accumulate(offset + last)
    begins = np.ones(len(owner), bool)
    begins[1:] = offset[1:] + first[1:] > reach[:-1]
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(owner)) - 1 if len(starts) else starts
    return Runs(owner[starts], first[starts], reach[ends] - offset[ends])
