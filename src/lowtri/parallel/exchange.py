"""The exchange of keys and values between ranks, and of their gradients back.

Rows are (tokens, B, Hkv, D + Dv): the keys and values of a token stand together, so that one message carries both.

    Selected   each rank receives the tokens that its queries see: an all-to-all of unequal parts
    Gathered   each rank receives all tokens: an all-gather into one buffer of equal parts, which has no second copy of the rows

Gradients go back the same way, at least in float32, and are added in the order of the ranks, so that the sum is the same in each run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.parallel import collectives
from lowtri.parallel.collectives import guard
from lowtri.parallel.runs import Ints, first_tokens
from lowtri.parallel.shards import ShardPlan


class Pending:
    """Rows on their way; without ``work`` they have arrived."""

    def __init__(self, work: Any, rows: Tensor, sent: Tensor | None, what: str) -> None:
        self._work, self._rows, self._sent, self._what = work, rows, sent, what

    def wait(self) -> Tensor:
        """The rows, when they are here."""
        if self._work is not None:
            with guard(self._what):
                self._work.wait()
            self._work = self._sent = None  # what was sent can be freed now
        return self._rows


class Exchange(ABC):
    """The exchange of one rank under one mask.

    Attributes:
        others: the positions of the rows that :meth:`fetch` gives, -1 for rows that are not another rank's token.
        whole: the positions of the rows of :meth:`join`.
        sent, received: rows that go to each rank, and that come from each.
    """

    others: Ints
    whole: Ints
    sent: list[int]
    received: list[int]

    def __init__(self, plan: ShardPlan, rank: int, group: Any) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self.tokens = int(plan.tokens[rank])

    @abstractmethod
    def fetch(self, rows: Tensor) -> Pending:
        """Begin to fetch the rows of others; ``rows`` are this rank's own."""

    @abstractmethod
    def join(self, rows: Tensor, fetched: Tensor) -> Tensor:
        """This rank's own rows and the fetched ones in one tensor."""

    @abstractmethod
    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of :meth:`join`, for gradients: those of this rank's own rows, and those of fetched ones."""

    def give_back(self, d_fetched: Tensor) -> Pending:
        """Begin to send the gradients of fetched rows to their owners."""
        d_fetched = d_fetched.contiguous()
        returned = d_fetched.new_empty((sum(self.sent), *d_fetched.shape[1:]))
        return self._started(
            "returning gradients",
            lambda: collectives.all_to_all(returned, d_fetched, self.sent, self.received, self.group),
            returned,
            d_fetched,
        )

    @abstractmethod
    def add(self, d_own: Tensor, returned: Tensor) -> Tensor:
        """The gradients of this rank's own rows: its own part and those that other ranks returned."""

    def _started(self, what: str, start: Callable[[], Any], rows: Tensor, sent: Tensor) -> Pending:
        with guard(what):
            work = start()
        return Pending(work, rows, sent, what)


class Selected(Exchange):
    def __init__(self, plan: ShardPlan, mask: int, rank: int, group: Any) -> None:
        super().__init__(plan, rank, group)
        self._sent_tokens, self.sent, self.received, self.others = route_of(plan, mask, rank)
        self.whole = np.concatenate([plan.positions(rank), self.others])
        self._send: dict[torch.device, Tensor] = {}

    def _index(self, device: torch.device) -> Tensor:
        if device not in self._send:
            self._send[device] = torch.from_numpy(self._sent_tokens).to(device)
        return self._send[device]

    def fetch(self, rows: Tensor) -> Pending:
        sent = rows.index_select(0, self._index(rows.device))
        fetched = rows.new_empty((len(self.others), *rows.shape[1:]))
        return self._started(
            "fetching keys and values",
            lambda: collectives.all_to_all(fetched, sent, self.received, self.sent, self.group),
            fetched,
            sent,
        )

    def join(self, rows: Tensor, fetched: Tensor) -> Tensor:
        return torch.cat([rows, fetched])

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        return joined[: self.tokens], joined[self.tokens :]

    def add(self, d_own: Tensor, returned: Tensor) -> Tensor:
        total, index, start = d_own.clone(memory_format=torch.contiguous_format), self._index(d_own.device), 0
        for count in self.sent:  # rank by rank; within a rank no token occurs twice, so the order is fixed
            total.index_add_(0, index[start : start + count], returned[start : start + count])
            start += count
        return total


class Gathered(Exchange):
    def __init__(self, plan: ShardPlan, rank: int, group: Any) -> None:
        super().__init__(plan, rank, group)
        self.most = int(plan.tokens.max())
        self.sent = self.received = [self.most] * plan.ranks
        slots = np.full((plan.ranks, self.most), -1, np.int64)
        for other in range(plan.ranks):
            slots[other, : plan.tokens[other]] = plan.positions(other)
        self.whole = slots.ravel()
        others = slots.copy()
        others[rank] = -1
        self.others = others.ravel()

    def fetch(self, rows: Tensor) -> Pending:
        sent = rows.new_zeros((self.most, *rows.shape[1:]))
        sent[: len(rows)] = rows
        fetched = rows.new_empty((self.plan.ranks * self.most, *rows.shape[1:]))
        return self._started(
            "gathering keys and values",
            lambda: collectives.all_gather(fetched, sent, self.group, async_op=True),
            fetched,
            sent,
        )

    def join(self, rows: Tensor, fetched: Tensor) -> Tensor:
        return fetched  # it has this rank's own rows, too

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        start = self.rank * self.most
        return joined[start : start + self.tokens], joined

    def add(self, d_own: Tensor, returned: Tensor) -> Tensor:
        total = d_own.clone(memory_format=torch.contiguous_format)
        for rank, part in enumerate(returned.unflatten(0, (self.plan.ranks, self.most))):
            if rank != self.rank:  # its own part needs no message
                total += part[: self.tokens]
        return total


def exchange_of(plan: ShardPlan, mask: int, rank: int, group: Any) -> Exchange:
    """The exchange that the plan prescribes for the mask of that index."""
    if plan.gathers[mask]:
        return Gathered(plan, rank, group)
    return Selected(plan, mask, rank, group)


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
