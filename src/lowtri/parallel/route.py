"""Which tokens a rank sends to whom, and the positions of those that it receives; from the plan alone, without a message."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtri.parallel.runs import Ints, first_tokens
from lowtri.parallel.shards import ShardPlan

__all__ = ["Route", "route_of"]


class Route(NamedTuple):
    """The part of one rank in an all-to-all of unequal parts."""

    send: Ints  # indices of this rank's tokens, those for rank 0 first; a token may go to several ranks
    sent: list[int]  # tokens to each rank
    received: list[int]  # tokens from each rank
    positions: Ints  # of the received tokens: rank by rank, increasing


def route_of(plan: ShardPlan, mask: int, rank: int) -> Route:
    """The route of a rank under the mask of that index: to every rank the tokens whose keys its queries see."""
    sizes = np.diff(first_tokens(plan.n, plan.block))
    mine = np.flatnonzero(plan.owner == rank)  # blocks
    starts = np.cumsum(sizes[mine]) - sizes[mine]
    send, sent = [], []
    for other in range(plan.ranks):
        first, last = plan.needed[mask].of(other)
        begin, end = np.searchsorted(mine, first), np.searchsorted(mine, last)
        wanted = _ranges(begin, end - begin) if other != rank else begin[:0]  # indices into mine
        send.append(_ranges(starts[wanted], sizes[mine[wanted]]))
        sent.append(len(send[-1]))
    needed = plan.needed[mask].blocks(rank)
    needed = needed[plan.owner[needed] != rank]
    needed = needed[np.argsort(plan.owner[needed], kind="stable")]
    received = np.bincount(plan.owner[needed], sizes[needed], plan.ranks).astype(int).tolist()
    return Route(np.concatenate(send), sent, received, _ranges(needed * plan.block, sizes[needed]))


def _ranges(starts: Ints, sizes: Ints) -> Ints:
    """start, start + 1, ... for each start, one range after the other."""
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(int(sizes.sum()))
