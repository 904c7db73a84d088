"""Collectives of a group, whose failures say what was being done; the agreement of its ranks; the exchange of keys and values.

An error of one rank, or arguments that differ, are raised on every rank. A process that ends closes its connections, so that a
collective of the others fails; one that hangs lets them wait until the time-out of the group. torchrun ends the other processes when
one has ended, and reports which one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lowtri.errors import CallError, LowtriError, RankError
from lowtri.parallel.shards import Ints, ShardPlan


def all_gather(out: Tensor, x: Tensor, group: Any, *, async_op: bool = False) -> Any:
    """``out`` has the ``x`` of each rank, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return gather(out, x, group=group, async_op=async_op)


def all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], group: Any) -> Any:
    """Rows of ``x`` to each rank, and rows of ``out`` from each rank, in the numbers given; not awaited."""
    return dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)


@contextmanager
def guard(what: str) -> Iterator[None]:
    """Around a collective: its failure is a RankError, which says what was being done and torch's reason."""
    try:
        yield
    except LowtriError:  # several are RuntimeErrors, too
        raise
    except RuntimeError as error:  # torch's classes for it differ by version and by backend
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise RankError(
            f"{what}: a process of the group has ended, or did not answer in time.\n{reason}\n"
            "Fix: the cause, which is the first error of any process; all make the same calls in the same order."
        ) from error


def agree(what: str, error: str | None, facts: list[str], group: Any, timeout: float | None = None) -> None:
    """Compare facts between all ranks: one all-gather of 33 bytes from each, and one of the texts if they differ.

    Args:
        what: the name of the call, for errors.
        error: what is wrong on this rank, or None.
        timeout: seconds to wait for the other ranks; by default the group's time-out.

    Raises:
        CallError: on every rank, with the error of the first rank that has one.
        RankError: on every rank, if their facts differ; names the first rank that differs from rank 0, and the first such fact.
    """
    ranks = dist.get_world_size(group)
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.tensor([error is not None, *digest], dtype=torch.uint8, device=device)
    every = mine.new_empty(ranks * len(mine))
    with guard(what):
        work = all_gather(every, mine, group, async_op=True)
        if timeout is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout))
    status = every.unflatten(0, (ranks, -1)).cpu()
    if not status[:, 0].any() and (status == status[0]).all():
        return
    texts: list[Any] = [None] * ranks
    with guard(what):
        dist.all_gather_object(texts, (error, facts), group=group)
    for rank, (other_error, _) in enumerate(texts):
        if other_error is not None:
            origin = "" if rank == dist.get_rank(group) else f"\nThis is the error of rank {rank} of {ranks}."
            agreed = CallError(other_error + origin)
            agreed.on_every_rank = True
            raise agreed
    _, first = texts[0]
    rank, other = next((rank, others) for rank, (_, others) in enumerate(texts) if others != first)
    pairs = [pair for pair in zip(first, other, strict=False) if pair[0] != pair[1]]
    first_fact, other_fact = pairs[0] if pairs else ("...", "...")
    raise RankError(
        f"{what}: rank 0 has {_short(first_fact)}, but rank {rank} has {_short(other_fact)}.\n"
        "Fix: the same mask, n, options and kinds of tensors on every rank."
    )


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


class Exchange:
    """The exchange of keys and values of one rank with the others, under one mask, and of their gradients back.

    Rows are (tokens, B, Hkv, D + Dv): the keys and values of a token stand together, so that one message carries both. Each rank
    receives the tokens that its queries see, in an all-to-all of unequal parts; or, where the plan gathers, all tokens, in an
    all-gather of equal parts into one buffer. Gradients go back in an all-to-all, at least in float32, and are added in the order of
    the ranks, so that the sum is the same in each run.

    Attributes:
        whole: the positions of the rows of :meth:`join`, -1 where there is no token.
        others: the positions of the rows of :meth:`fetch`, -1 for rows that are not another rank's token.
    """

    def __init__(self, plan: ShardPlan, mask: int, rank: int, group: Any) -> None:
        self.rank = rank
        self.group = group
        self.gathers = plan.gathers[mask]
        own = plan.positions(rank)
        self.tokens = len(own)
        self.most = int(plan.tokens.max())
        if self.gathers:
            parts = np.full((2, plan.ranks, self.most), -1)
            for other in range(plan.ranks):
                parts[:, other, : plan.tokens[other]] = plan.positions(other)
            parts[1, rank] = -1
            self.whole: Ints = parts[0].ravel()
            self.others: Ints = parts[1].ravel()
            self.sent = self.received = [self.most] * plan.ranks
        else:
            self.others = plan.fetched(rank, mask)
            self.whole = np.concatenate([own, self.others])
            sent = [np.searchsorted(own, plan.fetched(other, mask, rank)) for other in range(plan.ranks)]
            self.sent = [len(part) for part in sent]
            self.received = plan.received_from(rank, mask).tolist()
            self._sent_tokens = torch.from_numpy(np.concatenate(sent))  # for rank 0 first; one may go to several ranks

    def fetch(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to fetch the rows of others, where ``rows`` are this rank's own; the function that waits for them."""
        fetched = rows.new_empty((len(self.others), *rows.shape[1:]))
        if self.gathers:
            sent = rows.new_zeros((self.most, *rows.shape[1:]))
            sent[: len(rows)] = rows
            return _waiting("gathering keys and values", all_gather, fetched, sent, self.group, async_op=True)
        sent = rows.index_select(0, self._index(rows.device))
        return _waiting("fetching keys and values", all_to_all, fetched, sent, self.received, self.sent, self.group)

    def join(self, rows: Tensor, fetched: Tensor) -> Tensor:
        """This rank's own rows and the fetched ones in one tensor."""
        return fetched if self.gathers else torch.cat([rows, fetched])

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of :meth:`join`, for gradients: those of this rank's own rows, and those of fetched ones."""
        start = self.rank * self.most if self.gathers else 0
        return joined[start : start + self.tokens], joined if self.gathers else joined[self.tokens :]

    def give_back(self, d_fetched: Tensor) -> Callable[[], Tensor]:
        """Begin to send the gradients of fetched rows to their owners; the function that waits for those of this rank's rows."""
        d_fetched = d_fetched.contiguous()
        returned = d_fetched.new_empty((sum(self.sent), *d_fetched.shape[1:]))
        return _waiting("returning gradients", all_to_all, returned, d_fetched, self.sent, self.received, self.group)

    def add(self, d_own: Tensor, returned: Tensor) -> Tensor:
        """The gradients of this rank's own rows: its own part and those that other ranks returned, rank by rank."""
        total = d_own.clone(memory_format=torch.contiguous_format)
        start = 0
        for rank, part in enumerate(returned.split(self.sent)):
            if self.gathers and rank != self.rank:  # its own part needs no message
                total += part[: self.tokens]
            elif not self.gathers:
                total.index_add_(0, self._index(d_own.device)[start : start + len(part)], part)
                start += len(part)
        return total

    def _index(self, device: torch.device) -> Tensor:
        self._sent_tokens = self._sent_tokens.to(device)
        return self._sent_tokens


def _waiting(
    what: str, collective: Callable[..., Any], out: Tensor, sent: Tensor, *arguments: Any, **options: Any
) -> Callable[[], Tensor]:
    """Begin a collective; the function that waits for its result."""
    with guard(what):
        begun = [(collective(out, sent, *arguments, **options), sent)]

    def wait() -> Tensor:
        with guard(what):
            for work, _ in begun:
                work.wait()
        begun.clear()  # what was sent can be freed now
        return out

    return wait
