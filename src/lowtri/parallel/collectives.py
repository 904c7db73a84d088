"""Collectives of a group, whose failures say what was being done, and the agreement of its ranks before data moves.

An error of one rank, or arguments that differ, are raised on every rank. A process that ends closes its connections, so that a
collective of the others fails; one that hangs lets them wait until the time-out of the group. torchrun ends the other processes when
one has ended, and reports which one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtri.errors import CallError, LowtriError, RankError


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


def barrier(what: str, group: Any, timeout: float) -> None:
    """Wait until every process of the group is here; only gloo has a barrier that notices which one is not.

    Args:
        timeout: in seconds.

    Raises:
        RankError: on every process that is here, if one is not; on rank 0 the message has the numbers of those missing.
    """
    if dist.get_backend(group) == "gloo":
        with guard(what):
            dist.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)


def describe_call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: dict[str, Any]) -> list[str]:
    """Everything about a call that all ranks must have in common, as texts."""
    facts = [f"{name} {[*x.shape[:2], x.shape[3]]} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v))]
    facts.append(f"sinks {None if sinks is None else tuple(sinks.shape)}")
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    facts.append(f"gradients {records}")
    return facts + [f"{name} {value}" for name, value in options.items()]


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
        work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))
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
    first, *others = (facts for _, facts in texts)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    a, b = next((pair for pair in zip(first, other, strict=False) if pair[0] != pair[1]), ("...", "..."))
    raise RankError(
        f"{what}: rank 0 has {_short(a)}, but rank {rank} has {_short(b)}.\n"
        "Fix: the same mask, n, options and kinds of tensors on every rank."
    )


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
