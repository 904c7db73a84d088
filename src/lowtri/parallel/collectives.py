"""The two collectives that move tokens, by names that do not change between versions of torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather", "all_to_all"]


def all_gather(out: Tensor, x: Tensor, group: Any, *, async_op: bool = False) -> Any:
    """``out`` has the ``x`` of each rank, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return gather(out, x, group=group, async_op=async_op)


def all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], group: Any) -> Any:
    """Rows of ``x`` to each rank, and rows of ``out`` from each rank, in the numbers given; not awaited."""
    return dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)
