"""``plan_shards``: tries several layouts of a sequence over ranks, and takes the one whose slowest rank is done first.

Every layout gives all ranks the same number of tokens, to one block: everything in a model except attention costs the same for each
token. A layout without neighbouring blocks balances better; one with long stretches of neighbours needs fewer keys of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError, MaskError
from lowtri.masks import Mask, as_mask
from lowtri.masks.label_masks import check_packed_totals
from lowtri.masks.plan import TILE_Q, plan
from lowtri.masks.tile import check_count
from lowtri.parallel.shards import (
    Ints,
    LayoutCost,
    Runs,
    ShardPlan,
    block_pairs,
    block_runs,
    first_tokens,
    imbalance_of,
    runs_of_ranks,
)

_BLOCKS_OF_A_RANK = 16  # from there on, longer blocks cost little balance
_MOST_BLOCKS = 2**16
_EVEN = 1.15  # imbalance
_MOST_PIECES = 64
_MOST_PARTNERS = 16  # that are tried for the rank with the most pairs
_LIMITS = (1.02, 1.1, 1.4)  # the most visible pairs of a rank over the mean, at which exchanges end
_LITTLE_MORE = 1.2  # costs are estimates: a fifth more is paid for an even way


def plan_shards(
    mask: Mask | str | Sequence[Mask | str],
    n: int,
    ranks: int,
    *,
    block: int | None = None,
    token_cost: float = 1000.0,
    owner: Any = None,
    way: str | None = None,
) -> ShardPlan:
    """Which of ``ranks`` processes holds which of ``n`` tokens, so that all finish the attention of a sequence at the same time.

    >>> from lowtri.parallel import plan_shards
    >>> plan = plan_shards("causal", 1024, 4, block=64)
    >>> plan.way, plan.imbalance
    ('2 pieces', 1.0)
    >>> plan.positions(0)[[0, 127, 128, 255]]  # the first and the last of eight pieces
    array([   0,  127,  896, 1023])
    >>> plan_shards("causal & window(100)", 65536, 8).received.tolist()
    [0, 128, 128, 128, 128, 128, 128, 128]

    The plan follows from the arguments alone, so every process computes it by itself. Several ways of dealing are tried: one
    stretch for each rank, two to 64 pieces for each rank, a stretch of blocks with many pairs and one of those with few, and each
    of these after exchanges that even out the visible pairs. The
    cost of a way is that of its slowest rank: its visible pairs (the mean over batch rows and heads), and ``token_cost`` for
    each token whose keys and values it receives. The cheapest way is chosen, or, if its imbalance exceeds 1.15, a more even one
    that costs at most a fifth more. All ranks hold equally many tokens, to one block.

    Where the ranks need more than half of each other's keys on average, all keys are sent to all ranks, in buffers of equal size.

    Args:
        mask: the mask of the attention, or its text; a list if layers have different masks. A mask with batch rows or heads
            counts with all of them: the plan serves the whole batch.
        n: tokens of the sequence.
        ranks: the number of processes. With fewer blocks than ranks some hold no token.
        block: tokens that stay together, a multiple of 64; by default 64, or more where each rank has many blocks.
        token_cost: how many visible pairs of one head take as long as receiving the keys and values of one token. About 1000 for
            GPUs (64 query heads and 8 key/value heads of 128, 400 TFLOP/s, 50 GB/s), and tens for CPUs; 0 considers balance
            alone.
        owner: (blocks,), the rank of each block, instead of trying ways.
        way: the name of the way to take, such as ``"contiguous"``; ``plan.ways`` has the names.

    Raises:
        CallError: if block is not a multiple of 64, owner does not name a rank for each block, or there is no such way.
        MaskError: if ``mask`` is not a mask, or has no answer for n tokens (a table, lengths of documents).

    Source: zig-zag, Brandon et al. 2023 (striped attention) and Dubey et al. 2024 (Llama 3); by visible pairs, MagiAttention 2025.
    """
    given = [mask] if isinstance(mask, Mask | str) or hasattr(mask, "dtype") or mask is None else list(mask)
    if not given:
        raise MaskError("plan_shards: mask is an empty list. Fix: one mask for each layer.")
    masks = tuple(dict.fromkeys(as_mask(one, "plan_shards: mask") for one in given))
    n = check_count("plan_shards", "n", n, least=1)
    ranks = check_count("plan_shards", "ranks", ranks, least=1)
    block = _block(n, ranks) if block is None else check_count("plan_shards", "block", block, least=1)
    if block % TILE_Q:
        raise CallError(
            f"plan_shards: block is {block}, but blocks are multiples of {TILE_Q} tokens. Fix: block={TILE_Q}."
        )
    positions = np.arange(n)
    blocks = -(-n // block)
    seen: list[Runs] = []  # of each mask
    total = np.zeros(blocks, np.int64)
    mean = np.zeros(blocks)  # of one batch row and head
    for one in masks:
        check_packed_totals("plan_shards", one, n)
        planned = plan(one, positions, positions, tile_k=128 if block % 128 == 0 else 64)
        pairs = block_pairs(planned, block)
        seen.append(block_runs(planned, block))
        total += pairs
        mean += pairs / planned.mask_index.size
    if owner is None:
        ways = candidate_layouts(total, ranks, last_is_short=n % block > 0)
    else:
        array = np.asarray(owner)
        if array.shape != (blocks,) or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= ranks:
            raise CallError(
                f"plan_shards: owner is {array.dtype} {array.shape}, but it names a rank 0 .. {ranks - 1} for each of "
                f"{blocks} blocks."
            )
        ways = {"given": array.astype(np.int64)}
    if way is not None and way not in ways:
        raise CallError(f"plan_shards: way is {way!r}, but the ways are {', '.join(ways)}.")
    tried: dict[str, LayoutCost] = {}
    shards: dict[str, ShardPlan] = {}
    for name, to in ways.items():
        needed = tuple(runs_of_ranks(runs, to) for runs in seen)
        tokens, gathers = _received(needed, to, n, ranks, block)
        pairs = np.bincount(to, total, ranks).astype(np.int64)
        cost = float((np.bincount(to, mean, ranks) + token_cost * tokens).max())
        tried[name] = LayoutCost(imbalance_of(pairs), int(tokens.max()), cost)
        shards[name] = ShardPlan(masks, n, ranks, block, to, pairs, tokens, gathers, name, tried, needed)
    return shards[_chosen(tried) if way is None else way]


def _chosen(ways: dict[str, LayoutCost]) -> str:
    """The cheapest way, the first of equal ones; if it is uneven, an even one that costs little more."""
    least = min(way.cost for way in ways.values())
    cheapest = next(name for name, way in ways.items() if way.cost <= 1.001 * least)
    if ways[cheapest].imbalance <= _EVEN:
        return cheapest
    # Few long blocks to a rank cannot be balanced better than the most even way.
    limit = max(_EVEN, 1.05 * min(way.imbalance for way in ways.values()))
    best = min((name for name in ways if ways[name].imbalance <= limit), key=lambda name: ways[name].cost)
    return best if ways[best].cost <= _LITTLE_MORE * ways[cheapest].cost else cheapest


def _block(n: int, ranks: int) -> int:
    block = TILE_Q
    while n // (2 * block) >= _BLOCKS_OF_A_RANK * ranks and (block < 128 or n // block > _MOST_BLOCKS):
        block *= 2
    return block


def _received(needed: tuple[Runs, ...], owner: Ints, n: int, ranks: int, block: int) -> tuple[Ints, tuple[bool, ...]]:
    """(ranks,) tokens that come from other ranks, and for each mask whether all keys are sent to all ranks."""
    edges = first_tokens(n, block)
    sizes = np.diff(edges)
    others = n - np.bincount(owner, sizes, ranks).astype(np.int64)
    received = np.zeros(ranks, np.int64)
    gathers: list[bool] = []
    for runs in needed:
        seen = np.bincount(runs.owner, edges[runs.last] - edges[runs.first], ranks)
        own = np.bincount(owner, sizes * runs.hold(owner, len(owner)), ranks)
        fetched = (seen - own).astype(np.int64)
        gathers.append(2 * int(fetched.sum()) > int(others.sum()))
        received += others if gathers[-1] else fetched
    return received, tuple(gathers)


def candidate_layouts(pairs: Ints, ranks: int, *, last_is_short: bool) -> dict[str, Ints]:
    """The rank of each block, (blocks,), for each way, those with the longest stretches first.

    contiguous   each rank holds one stretch
    k pieces     each rank holds k stretches, dealt to and fro, those with the most pairs first; two under causal are zig-zag
    two streams  each rank holds a stretch of the blocks with many pairs (more than the median, or the mean) and a stretch of the
                 others, as long as its balance needs: it then shares the keys of one long document or two, not of several
    balanced     one of these ways, after exchanges of blocks between the rank with the most pairs and the one with the fewest,
                 until the former has no more than a limit times the mean: the fewer exchanges, the fewer keys of other ranks

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
        for limit in _LIMITS:
            balanced = _balanced(pairs, owner, ranks, limit, last_is_short)
            if balanced is not None:
                ways[f"{name}, balanced (max/mean <= {limit})"] = balanced
    return ways


def _dealt(pairs: Ints, piece: Ints, ranks: int) -> Ints:
    """Pieces of neighbouring blocks dealt to and fro, those with the most pairs first."""
    order = np.argsort(-np.bincount(piece, pairs), kind="stable")
    turn, place = np.divmod(np.argsort(order), ranks)
    return np.where(turn % 2 == 0, place, ranks - 1 - place)[piece]


def _two_streams(pairs: Ints, ranks: int, many: NDArray[np.bool_]) -> Ints:
    """The heavy blocks, with many pairs, and the light ones, each in order; every rank takes some of both, to the mean of the rest."""
    heavy = np.flatnonzero(many)
    light = np.flatnonzero(~many)
    heavy_sums = np.concatenate([[0], np.cumsum(pairs[heavy])])
    light_sums = np.concatenate([[0], np.cumsum(pairs[light])])
    owner = np.empty(len(pairs), np.int64)
    a = 0  # the next block of the heavy stream
    b = 0  # of the light one
    for rank in range(ranks):
        left = ranks - rank
        count = (len(pairs) - a - b) // left
        wanted = (heavy_sums[-1] - heavy_sums[a] + light_sums[-1] - light_sums[b]) / left
        taken = np.arange(max(0, count - len(light) + b), min(count, len(heavy) - a) + 1)  # of the heavy stream
        total = heavy_sums[a + taken] - heavy_sums[a] + light_sums[b + count - taken] - light_sums[b]
        best = int(taken[np.abs(total - wanted).argmin()])
        owner[heavy[a : a + best]] = rank
        owner[light[b : b + count - best]] = rank
        a += best
        b += count - best
    return owner


def _levelled(owner: Ints, ranks: int, last_is_short: bool) -> Ints:
    """Owners with equal numbers of blocks, to one: ranks with too many give their first ones to ranks with too few."""
    owner = owner.copy()
    blocks = len(owner)
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


def _balanced(pairs: Ints, owner: Ints, ranks: int, limit: float, last_is_short: bool) -> Ints | None:
    """Exchange blocks until no rank has more than ``limit`` times the mean pairs; None if nothing is exchanged."""
    load = np.bincount(owner, pairs, ranks)
    most = limit * pairs.sum() / ranks
    if load.max() <= most:
        return None
    owner = owner.copy()
    blocks = len(owner)
    movable = blocks - 1 if last_is_short else blocks  # a short block would make the numbers of tokens differ by more
    order = np.argsort(owner[:movable], kind="stable")
    blocks_of = np.split(order, np.cumsum(np.bincount(owner[:movable], minlength=ranks))[:-1])
    exchanged = False
    for _ in range(blocks):
        busy = int(load.argmax())
        if load[busy] <= most:
            break
        for idle in _partners(load):
            best = _best_exchange(pairs, blocks_of[busy], blocks_of[idle], load[busy] - load[idle])
            if best is not None:
                break
        else:
            break
        a, b = best
        given = blocks_of[busy][a]
        taken = blocks_of[idle][b]
        owner[given] = idle
        owner[taken] = busy
        blocks_of[busy][a] = taken
        blocks_of[idle][b] = given
        moved = pairs[given] - pairs[taken]
        load[busy] -= moved
        load[idle] += moved
        exchanged = True
    return owner if exchanged else None


def _partners(load: Ints) -> Iterator[int]:
    """The ranks with the fewest pairs; more than the first where blocks are coarse."""
    yield int(load.argmin())
    yield from np.argsort(load, kind="stable")[1:_MOST_PARTNERS].tolist()


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
