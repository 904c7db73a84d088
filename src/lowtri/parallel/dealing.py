"""Ways of dealing blocks of tokens to ranks.

Every way gives all ranks the same number of tokens, to one block: everything in a model except attention costs the same for each
token. A way without neighbouring blocks balances better; a way with long stretches of neighbours needs fewer keys of other ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtri.parallel.runs import Ints

__all__ = ["ways_of_dealing"]

_MOST_PIECES = 64
_MOST_PARTNERS = 16  # that are tried for the rank with the most pairs
_EVENED = (1.02, 1.1, 1.4)  # the most visible pairs of a rank over the mean, at which exchanges end


def ways_of_dealing(pairs: Ints, ranks: int, *, last_is_short: bool) -> dict[str, Ints]:
    """The rank of each block, (blocks,), for each way, those with the longest stretches first.

    contiguous   each rank holds one stretch
    k pieces     each rank holds k stretches, dealt to and fro, those with the most pairs first; two under causal are zig-zag
    two streams  each rank holds a stretch of the blocks with many pairs (more than the median, or the mean) and a stretch of the
                 others, as long as its balance needs: it then shares the keys of one long document or two, not of several
    evened to x  one of these ways, after exchanges of blocks between the rank with the most pairs and the one with the fewest,
                 until the former has no more than x times the mean: the fewer exchanges, the fewer keys of other ranks

    Args:
        pairs: visible pairs of each block of queries.
        last_is_short: whether the last block has fewer tokens than the others.
    """
    blocks = len(pairs)
    # The ranks with one more block come last, so that one of them holds the last block, which may be short.
    ways = {"contiguous": ranks - 1 - np.arange(blocks)[::-1] * ranks // max(blocks, 1)}
    pieces = 2
    while pieces * ranks <= blocks and pieces <= _MOST_PIECES:
        dealt = _dealt(pairs, np.arange(blocks) * (pieces * ranks) // blocks, ranks)
        ways[f"{pieces} pieces"] = _levelled(dealt, ranks, last_is_short)
        pieces *= 2
    for name, most in (("two streams", np.median(pairs)), ("two streams by the mean", pairs.mean())):
        ways[name] = _levelled(_two_streams(pairs, ranks, pairs > most), ranks, last_is_short)
    for name, owner in list(ways.items()):
        for limit in _EVENED:
            evened = _evened(pairs, owner, ranks, limit, last_is_short)
            if evened is not None:
                ways[f"{name}, evened to {limit}"] = evened
    return ways


def _dealt(pairs: Ints, piece: Ints, ranks: int) -> Ints:
    """Pieces of neighbouring blocks dealt to and fro, those with the most pairs first."""
    order = np.argsort(-np.bincount(piece, pairs), kind="stable")
    turn, place = np.divmod(np.argsort(order), ranks)
    return np.where(turn % 2 == 0, place, ranks - 1 - place)[piece]


def _two_streams(pairs: Ints, ranks: int, many: NDArray[np.bool_]) -> Ints:
    """The blocks with many pairs in order, and those with few in order; each rank takes some of both, to the mean of what is left."""
    streams = np.flatnonzero(many), np.flatnonzero(~many)
    sums = [np.concatenate([[0], np.cumsum(pairs[stream])]) for stream in streams]
    owner, a, b = np.empty(len(pairs), np.int64), 0, 0  # the next block of each stream
    for rank in range(ranks):
        left = ranks - rank
        count = (len(pairs) - a - b) // left
        wanted = (sums[0][-1] - sums[0][a] + sums[1][-1] - sums[1][b]) / left
        taken = np.arange(
            max(0, count - len(streams[1]) + b), min(count, len(streams[0]) - a) + 1
        )  # of the first stream
        total = sums[0][a + taken] - sums[0][a] + sums[1][b + count - taken] - sums[1][b]
        best = int(taken[np.abs(total - wanted).argmin()])
        owner[streams[0][a : a + best]] = owner[streams[1][b : b + count - best]] = rank
        a, b = a + best, b + count - best
    return owner


def _levelled(owner: Ints, ranks: int, last_is_short: bool) -> Ints:
    """The same with equal numbers of blocks, to one: ranks with too many give their first ones to ranks with too few."""
    owner, blocks = owner.copy(), len(owner)
    count = np.bincount(owner, minlength=ranks)
    quota = np.full(ranks, blocks // ranks)
    fullest = np.argsort(-count, kind="stable")
    if last_is_short and blocks % ranks:  # the rank that holds the short block is one of those with one more
        fullest = np.concatenate([owner[-1:], fullest[fullest != owner[-1]]])
    quota[fullest[: blocks % ranks]] += 1
    by_rank = np.argsort(owner, kind="stable")
    index = np.empty(blocks, np.int64)  # of each block among those of its rank, counted from the last
    index[by_rank] = np.arange(blocks) - np.repeat(np.cumsum(count) - count, count)
    index = count[owner] - 1 - index
    surplus = np.flatnonzero(index >= quota[owner])
    owner[surplus] = np.repeat(np.arange(ranks), np.maximum(quota - count, 0))
    return owner


def _evened(pairs: Ints, owner: Ints, ranks: int, limit: float, last_is_short: bool) -> Ints | None:
    """Exchange blocks until no rank has more than ``limit`` times the mean pairs; None if nothing is exchanged."""
    load, most = np.bincount(owner, pairs, ranks), limit * pairs.sum() / ranks
    if load.max() <= most:
        return None
    owner, blocks = owner.copy(), len(owner)
    movable = blocks - 1 if last_is_short else blocks  # a short block would make the numbers of tokens differ by more
    order = np.argsort(owner[:movable], kind="stable")
    held = np.split(order, np.cumsum(np.bincount(owner[:movable], minlength=ranks))[:-1])
    exchanged = False
    for _ in range(blocks):
        busy, idle = int(load.argmax()), int(load.argmin())
        if load[busy] <= most:
            break
        best = _best_exchange(pairs, held[busy], held[idle], load[busy] - load[idle])
        if best is None:  # blocks are coarse here: other partners may fit
            partners = np.argsort(load, kind="stable")[1:_MOST_PARTNERS].tolist()
            for idle in partners:
                best = _best_exchange(pairs, held[busy], held[idle], load[busy] - load[idle])
                if best is not None:
                    break
            else:
                break
        a, b = best
        given, taken = held[busy][a], held[idle][b]
        owner[given], owner[taken] = idle, busy
        held[busy][a], held[idle][b] = taken, given
        moved = pairs[given] - pairs[taken]
        load[busy] -= moved
        load[idle] += moved
        exchanged = True
    return owner if exchanged else None


def _best_exchange(pairs: Ints, given: Ints, taken: Ints, gap: float) -> tuple[int, int] | None:
    """The indices of the two blocks whose exchange closes most of the gap between two ranks; None if none closes any."""
    if not len(given) or not len(taken):
        return None
    order = np.argsort(pairs[taken], kind="stable")
    # For each block that could be given, the one to take for it.
    near = order[np.searchsorted(pairs[taken[order]], pairs[given] - gap / 2).clip(0, len(taken) - 1)]
    moved = pairs[given] - pairs[taken[near]]
    a = int(np.abs(moved - gap / 2).argmin())
    return (a, int(near[a])) if 0 < moved[a] < gap else None
