"""Agreement of the ranks on the arguments of a call before data moves: an error of one rank is raised on all of them."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtri.errors import CallError, RankError
from lowtri.parallel import collectives
from lowtri.parallel.roll_call import RollCall

__all__ = ["agree", "describe_call"]

_DIGEST = 32  # bytes


def describe_call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: dict[str, Any]) -> list[str]:
    """Everything about a call that all ranks must have in common, as texts."""
    facts = [f"{name} {[*x.shape[:2], x.shape[3]]} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v))]
    facts.append(f"sinks {None if sinks is None else tuple(sinks.shape)}")
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    facts.append(f"gradients {records}")
    return facts + [f"{name} {value}" for name, value in options.items()]


def agree(
    what: str, error: str | None, facts: list[str], group: Any, roll_call: RollCall, limit: float | None = None
) -> None:
    """Compare facts between all ranks: one all-gather of 33 bytes from each, and another one if they differ.

    Args:
        what: the name of the call, for errors.
        error: what is wrong on this rank, or None.
        limit: seconds to wait for the other ranks; by default the group's time-out.

    Raises:
        CallError: on every rank, with the error of the first rank that has one.
        RankError: on every rank, if their facts differ; names the first rank that differs from rank 0, and the first such fact.
    """
    device = _device(group)
    mine = hashlib.sha256("\n".join(facts).encode()).digest()
    status = torch.tensor([error is not None, *mine], dtype=torch.uint8, device=device)
    every = _gathered(status, what, group, roll_call, limit)
    if not every[:, 0].any() and (every == every[0]).all():
        return
    text = (f"!{error}" if error is not None else "\n".join(facts)).encode()
    size = _gathered(torch.tensor([len(text)], device=device), what, group, roll_call)
    padded = torch.zeros(int(size.max()), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    rows = _gathered(padded, what, group, roll_call).tolist()
    texts = [bytes(row[:n]).decode() for row, n in zip(rows, size[:, 0].tolist(), strict=True)]
    for rank, one in enumerate(texts):
        if one.startswith("!"):
            origin = "" if rank == dist.get_rank(group) else f"\nThis came from rank {rank} of {len(texts)}."
            agreed = CallError(one[1:] + origin)
            agreed.on_every_rank = True
            raise agreed
    other = next(rank for rank, one in enumerate(texts) if one != texts[0])
    pairs = zip(texts[0].split("\n"), texts[other].split("\n"), strict=False)
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("...", "..."))
    raise RankError(
        f"{what}: rank 0 has {_short(here)}, but rank {other} has {_short(there)}.\n"
        "Fix: the same mask, n, options and kinds of tensors on every rank."
    )


def _gathered(x: Tensor, what: str, group: Any, roll_call: RollCall, limit: float | None = None) -> Tensor:
    """(ranks, n) from the (n,) of each rank, on the CPU."""
    out = x.new_empty(dist.get_world_size(group) * len(x))
    with roll_call.required(what):
        work = collectives.all_gather(out, x, group, async_op=True)
        work.wait() if limit is None else work.wait(timedelta(seconds=limit))
    return out.unflatten(0, (-1, len(x))).cpu()


def _device(group: Any) -> str:
    """Where the group's backend reads tensors: the CPU if it can."""
    backend = dist.get_backend(group)
    return "cuda" if backend == "nccl" else "cpu"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
