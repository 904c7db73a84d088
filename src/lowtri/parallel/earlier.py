"""Which keys a shard takes from earlier shards, where the shards of a plan are computed one after the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtri.errors import CallError
from lowtri.parallel.runs import Ints, first_tokens
from lowtri.parallel.shards import ShardPlan

__all__ = ["EarlierKeys", "Source", "order_of_shards"]


class Source(NamedTuple):
    """Keys that a shard takes from another one."""

    shard: int
    indices: Ints  # (Nk,), among those that the shard keeps for others
    positions: Ints  # (Nk,)


class EarlierKeys:
    """The keys that shards take from each other under one mask.

    Attributes:
        kept: for each shard the indices of its tokens whose keys other shards see.
    """

    def __init__(self, plan: ShardPlan, mask: int) -> None:
        self.plan, self.mask = plan, mask
        self._owner = np.repeat(plan.owner, np.diff(first_tokens(plan.n, plan.block)))  # (n,)
        seen = np.zeros(plan.n, np.bool_)
        for shard in range(plan.ranks):
            seen[self._others(shard)] = True
        positions = np.flatnonzero(seen)
        by_shard = np.argsort(self._owner[positions], kind="stable")
        counts = np.bincount(self._owner[positions], minlength=plan.ranks)
        self._kept = np.split(positions[by_shard], np.cumsum(counts)[:-1])  # positions
        self.kept = [np.searchsorted(plan.positions(shard), kept) for shard, kept in enumerate(self._kept)]

    def sources(self, shard: int) -> list[Source]:
        """The keys that a shard takes from each other shard."""
        others = self._others(shard)
        owner = self._owner[others]
        parts = ((source, others[owner == source]) for source in np.unique(owner).tolist())
        return [Source(source, np.searchsorted(self._kept[source], part), part) for source, part in parts]

    def _others(self, shard: int) -> Ints:
        positions = self.plan.key_positions(shard, self.mask)
        return positions[self._owner[positions] != shard]


def order_of_shards(plan: ShardPlan) -> list[int]:
    """The shards that hold tokens, each after those whose keys it needs.

    Raises:
        CallError: if some need each other's keys.
    """
    needs: dict[int, set[int]] = {shard: set() for shard in np.unique(plan.owner).tolist()}
    for runs in plan.needed:
        for shard, needed in needs.items():
            needed.update(np.unique(plan.owner[runs.blocks(shard)]).tolist())
    order: list[int] = []
    while needs:
        done = set(order)
        ready = next((shard for shard, needed in needs.items() if needed <= done | {shard}), None)
        if ready is None:
            names = ", ".join(map(str, list(needs)[:4])) + (" and more" if len(needs) > 4 else "")
            raise CallError(
                f"SequentialShards: the shards {names} of {plan.way!r} need each other's keys, so none of them can come first.\n"
                'Fix: plan_shards(..., way="contiguous"), and a mask under which no query sees a later key.'
            )
        order.append(ready)
        del needs[ready]
    return order
