"""``plan_shards``: tries several ways of dealing a sequence to ranks, and takes the one whose slowest rank is done first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowtri.errors import CallError, MaskError
from lowtri.masks import Mask, as_mask
from lowtri.masks.label_masks import check_row_lengths
from lowtri.masks.plan import TILE_Q, Plan, plan
from lowtri.masks.tile import check_count
from lowtri.parallel.dealing import ways_of_dealing
from lowtri.parallel.runs import Ints, Runs, block_pairs, block_runs, first_tokens, runs_of_ranks
from lowtri.parallel.shards import ShardPlan, Way, imbalance_of

__all__ = ["plan_shards"]

_BLOCKS_OF_A_RANK = 16  # from there on, longer blocks cost little balance
_MOST_BLOCKS = 2**16
_EVEN = 1.15  # imbalance
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
    masks = _masks(mask)
    n, ranks = check_count("plan_shards", "n", n, least=1), check_count("plan_shards", "ranks", ranks, least=1)
    block = _block(n, ranks) if block is None else check_count("plan_shards", "block", block, least=1)
    if block % TILE_Q:
        raise CallError(
            f"plan_shards: block is {block}, but blocks are multiples of {TILE_Q} tokens. Fix: block={TILE_Q}."
        )
    for one in masks:
        check_row_lengths("plan_shards", one, n)
    positions = np.arange(n)
    sight = [_sight(plan(one, positions, positions, tile_k=128 if block % 128 == 0 else 64), block) for one in masks]
    blocks = -(-n // block)
    total = np.sum([each.pairs for each in sight], axis=0)
    mean = np.sum([each.pairs / each.tables for each in sight], axis=0)  # of one batch row and head
    if owner is not None:
        ways = {"given": _given(owner, blocks, ranks)}
    else:
        ways = ways_of_dealing(total, ranks, last_is_short=n % block > 0)
    if way is not None and way not in ways:
        raise CallError(f"plan_shards: way is {way!r}, but the ways are {', '.join(ways)}.")
    tried: dict[str, Way] = {}
    plans: dict[str, ShardPlan] = {}
    for name, to in ways.items():
        needed = tuple(runs_of_ranks(each.runs, to) for each in sight)
        tokens, gathers = _received(needed, to, n, ranks, block)
        pairs = np.bincount(to, total, ranks)
        cost = float((np.bincount(to, mean, ranks) + token_cost * tokens).max())
        tried[name] = Way(imbalance_of(pairs), int(tokens.max()), cost)
        plans[name] = ShardPlan(
            masks, n, ranks, block, to, pairs.astype(np.int64), tokens, gathers, name, tried, needed
        )
    return plans[_chosen(tried) if way is None else way]


def _chosen(ways: dict[str, Way]) -> str:
    """The cheapest way, the first of equal ones; if it is uneven, an even one that costs little more."""
    least = min(way.cost for way in ways.values())
    cheapest = next(name for name, way in ways.items() if way.cost <= 1.001 * least)
    if ways[cheapest].imbalance <= _EVEN:
        return cheapest
    # Few long blocks to a rank cannot be balanced better than the most even way.
    limit = max(_EVEN, 1.05 * min(way.imbalance for way in ways.values()))
    best = min((name for name in ways if ways[name].imbalance <= limit), key=lambda name: ways[name].cost)
    return best if ways[best].cost <= _LITTLE_MORE * ways[cheapest].cost else cheapest


class _Sight(NamedTuple):
    """What the blocks of queries see under one mask."""

    pairs: Ints  # (blocks,)
    runs: Runs
    tables: int  # batch rows times heads that the pairs are summed over


def _sight(planned: Plan, block: int) -> _Sight:
    return _Sight(block_pairs(planned, block), block_runs(planned, block), planned.mask_index.size)


def _masks(mask: Any) -> tuple[Mask, ...]:
    given = [mask] if isinstance(mask, Mask | str) or hasattr(mask, "dtype") or mask is None else list(mask)
    if not given:
        raise MaskError("plan_shards: mask is an empty list. Fix: one mask for each layer.")
    return tuple(dict.fromkeys(as_mask(one, "plan_shards: mask") for one in given))


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
    received, gathers = np.zeros(ranks, np.int64), []
    for runs in needed:
        seen = np.bincount(runs.owner, edges[runs.last] - edges[runs.first], ranks)
        own = np.bincount(owner, sizes * runs.hold(owner, len(owner)), ranks)
        fetched = (seen - own).astype(np.int64)
        gathers.append(2 * int(fetched.sum()) > int(others.sum()))
        received += others if gathers[-1] else fetched
    return received, tuple(gathers)


def _given(owner: Any, blocks: int, ranks: int) -> Ints:
    array = np.asarray(owner)
    if array.shape != (blocks,) or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= ranks:
        raise CallError(
            f"plan_shards: owner is {array.dtype} {array.shape}, but it names a rank 0 .. {ranks - 1} for each of {blocks} blocks."
        )
    return array.astype(np.int64)
