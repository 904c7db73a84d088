"""ShardPlan: which rank holds which tokens of a sequence, and which keys each rank needs; as text and as SVG."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.masks.plan import TILE_Q, Plan, row_of_runs, run_bounds
from lowtri.pictures.grids import MAX_CELLS, Grid, Look, Panel, picture, used
from lowtri.pictures.pages import card
from lowtri.pictures.svg import HIDDEN, fill

Ints = NDArray[np.int64]

_MOST_DRAWN = 16  # ranks
_LOOKS = (
    Look("·", HIDDEN, "not seen"),
    Look("▒", fill("partly"), "received"),
    Look("█", fill("visible"), "its own tokens"),
)
_NOT_SEEN, _RECEIVED, _OWN = range(3)


class Runs(NamedTuple):
    """Runs of blocks, each of one owner: a block of queries, or a rank."""

    owner: Ints  # (R,), increasing
    first: Ints  # (R,), the first block of the run
    last: Ints  # (R,), one past the last

    def blocks(self, owner: int) -> Ints:
        """The blocks in the runs of one owner, increasing."""
        start, stop = np.searchsorted(self.owner, [owner, owner + 1])
        first = self.first[start:stop]
        size = self.last[start:stop] - first
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
    times = np.bincount(plan.mask_index.ravel(), minlength=plan.masks)
    pairs = (plan.row_pairs() * times[:, None]).sum(axis=0)  # (rows,)
    return np.add.reduceat(pairs, np.arange(0, plan.rows, block // TILE_Q))


def block_runs(plan: Plan, block: int) -> Runs:
    """The blocks of keys that each block of queries sees, in any batch row and head."""
    row = row_of_runs(plan) % plan.rows
    first = plan.runs[:, 0].astype(np.int64)
    last = plan.runs[:, 1].astype(np.int64)
    to_block = Runs(row * TILE_Q // block, first * plan.tile_k // block, -(-last * plan.tile_k // block))
    return _united(to_block, -(-plan.nk // block))


def runs_of_ranks(runs: Runs, owner: Ints) -> Runs:
    """The blocks of keys that each rank sees, from those of its blocks of queries; ``owner`` is the rank of each block."""
    return _united(Runs(owner[runs.owner], runs.first, runs.last), len(owner))


def _united(runs: Runs, blocks: int) -> Runs:
    """Each owner's runs, in order, with overlapping and adjacent ones united."""
    order = np.lexsort((runs.first, runs.owner))
    owner = runs.owner[order]
    first = runs.first[order]
    last = np.minimum(runs.last[order], blocks)
    offset = owner * (blocks + 1)  # keeps the runs of different owners apart
    reach = np.maximum.accumulate(offset + last)
    begins = np.ones(len(owner), bool)
    begins[1:] = offset[1:] + first[1:] > reach[:-1]
    starts, ends = run_bounds(begins)
    return Runs(owner[starts], first[starts], reach[ends] - offset[ends])


class LayoutCost(NamedTuple):
    """What a way of dealing gives.

    Attributes:
        imbalance: the most visible pairs of a rank, over the mean.
        received: the most tokens that a rank receives.
        cost: of the slowest rank, in visible pairs.
    """

    imbalance: float
    received: int
    cost: float


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Which rank holds which blocks of a sequence, and which keys each rank needs; made by :func:`plan_shards`.

    Attributes:
        masks: the masks that the sequence is attended with, without repetitions.
        n: tokens of the sequence.
        ranks: the number of ranks.
        block: tokens that stay together, a multiple of 64; the last block may be shorter.
        owner: (blocks,), the rank of each block.
        pairs: (ranks,), visible pairs of the queries of each rank, summed over the masks and over their batch rows and heads.
        received: (ranks,), tokens that each rank receives from others, summed over the masks.
        gathers: for each mask whether all keys are sent to all ranks, which is so where the ranks need more than half of each
            other's keys on average; else each rank receives only what its queries see.
        way: the way of dealing that was chosen.
        ways: every way that was tried, with its imbalance, the most tokens that a rank receives, and its cost.
    """

    masks: tuple[Mask, ...]
    n: int
    ranks: int
    block: int
    owner: Ints
    pairs: Ints
    received: Ints
    gathers: tuple[bool, ...]
    way: str
    ways: dict[str, LayoutCost] = field(default_factory=dict)
    needed: tuple[Runs, ...] = field(default=(), repr=False)  # for each mask the blocks of keys that each rank sees

    @property
    def imbalance(self) -> float:
        """The most visible pairs of a rank, over the mean: 1 is perfect."""
        return imbalance_of(self.pairs)

    @cached_property
    def tokens(self) -> Ints:
        """(ranks,), how many tokens each rank holds."""
        sizes = np.diff(first_tokens(self.n, self.block))
        return np.bincount(self.owner, sizes, self.ranks).astype(np.int64)

    def positions(self, rank: int) -> Ints:
        """The positions of the tokens that a rank holds, increasing."""
        return self._positions(np.flatnonzero(self.owner == self._rank(rank)))

    def key_positions(self, rank: int, mask: int = 0) -> Ints:
        """The positions of the keys that the queries of a rank see under the mask of that index, to the block, increasing."""
        return self._positions(self.needed[mask].blocks(self._rank(rank)))

    def received_from(self, rank: int, mask: int = 0) -> Ints:
        """(ranks,), how many tokens a rank receives from each other rank under the mask of that index."""
        if self.gathers[mask]:
            return np.where(np.arange(self.ranks) == self._rank(rank), 0, self.tokens)
        owners = self.owner[self.fetched(rank, mask) // self.block]
        return np.bincount(owners, minlength=self.ranks)

    def fetched(self, rank: int, mask: int = 0, source: int | None = None) -> Ints:
        """The positions of the keys of other ranks, or of one, that the queries of a rank see, in the order of their owners."""
        blocks = self.needed[mask].blocks(self._rank(rank))
        owner = self.owner[blocks]
        if source is not None:
            return self._positions(blocks[owner == source] if source != rank else blocks[:0])
        order = np.argsort(owner, kind="stable")
        return self._positions(blocks[order[owner[order] != rank]])

    def index(self, mask: Mask | None) -> int:
        """The index of a mask among those of the plan; None stands for the only one.

        Raises:
            CallError: if the plan was not made for the mask, or has several and none is given.
        """
        if mask is None and len(self.masks) == 1:
            return 0
        for index, one in enumerate(self.masks):
            if one is mask or one == mask:
                return index
        raise CallError(
            f"ShardPlan: mask is {mask!r}, but the plan was made for {', '.join(map(repr, self.masks))}.\n"
            "Fix: plan_shards([...], n, ranks) with every mask of the model, and mask= in each call."
        )

    @cached_property
    def digest(self) -> str:
        """A hash of the masks and of the plan; ranks that computed the same plan have the same digest."""
        parts = [repr((self.n, self.ranks, self.block, self.gathers, self.masks)).encode(), self.owner.tobytes()]
        parts += [array.tobytes() for runs in self.needed for array in runs]
        parts += [self.pairs.tobytes()]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def draw(self) -> str:
        """The plan as text: a line for each of at most 16 ranks, █ the tokens that it holds, ▒ those whose keys it receives.

        >>> from lowtri.parallel import plan_shards
        >>> print(plan_shards("causal & window(200)", 1024, 4, block=64).draw())
        causal & window(200): 1,024 tokens on 4 ranks, contiguous, blocks of 64, imbalance 1.11
        rank 0  ████············  256 tokens, 31,300 pairs
        rank 1  ▒▒▒▒████········  256 tokens, 51,200 pairs, receives 256 from 0
        rank 2  ····▒▒▒▒████····  256 tokens, 51,200 pairs, receives 256 from 1
        rank 3  ········▒▒▒▒████  256 tokens, 51,200 pairs, receives 256 from 2
        """
        return "\n".join([self._title(), *self._grid().lines(), *self._more()])

    def _repr_svg_(self) -> str:
        grid = self._grid()
        below = " ".join(["tokens →", *self._more()])
        return picture(self._title(), [Panel([grid], self._title(), below, "")], used(_LOOKS, grid.cells))

    def _repr_html_(self) -> str:
        return card("plan", self._repr_svg_(), self._title(), self.draw())

    def __str__(self) -> str:
        return self.draw()

    def _title(self) -> str:
        masks = ", ".join(map(repr, self.masks))
        masks = masks if len(masks) <= 60 else masks[:57] + "..."
        sent = ", all keys are sent to all" if all(self.gathers) else ""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks:,} ranks"
        return (
            f"{masks}: {self.n:,} tokens on {ranks}, {self.way}, "
            f"blocks of {self.block}, imbalance {self.imbalance:.2f}{sent}"
        )

    def _more(self) -> list[str]:
        left_out = self.ranks - _MOST_DRAWN
        return [f"... and {left_out:,} more ranks"] if left_out > 0 else []

    def _grid(self) -> Grid:
        """A row of at most 64 cells for each rank; one that stands for several blocks shows the most that any of them is."""
        cells = []
        remarks = []
        for rank in range(min(self.ranks, _MOST_DRAWN)):
            needed = np.zeros(len(self.owner), bool)
            senders = np.zeros(self.ranks, np.int64)
            for mask, runs in enumerate(self.needed):
                needed[runs.blocks(rank)] = True
                senders += self.received_from(rank, mask)
            states = np.where(self.owner == rank, _OWN, np.where(needed, _RECEIVED, _NOT_SEEN))
            step = -(-len(states) // MAX_CELLS)
            cells.append(np.maximum.reduceat(states, np.arange(0, len(states), step)))
            text = f"{self.tokens[rank]:,} tokens, {self.pairs[rank]:,} pairs"
            if senders.any():
                names = np.flatnonzero(senders).tolist()
                few = ", ".join(map(str, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                text += f", receives {int(senders.sum()):,} from {few}"
            remarks.append(text)
        size = min(24.0, 480 / len(cells[0]))
        return Grid(np.stack(cells), _LOOKS, size, rows=[f"rank {rank}" for rank in range(len(cells))], remarks=remarks)

    def _positions(self, blocks: Ints) -> Ints:
        positions = (blocks[:, None] * self.block + np.arange(self.block)).ravel()
        return positions[positions < self.n]

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise CallError(f"ShardPlan: rank is {rank}, but the plan has the ranks 0 .. {self.ranks - 1}.")
        return rank


def imbalance_of(pairs: Any) -> float:
    """The most visible pairs of a rank, over the mean; 1 if nothing is visible."""
    return float(pairs.max() / pairs.mean()) if pairs.any() else 1.0
