"""A backward under ``is_grads_batched=True`` (also ``torch.autograd.functional.jacobian(vectorize=True)``), one gradient at a time.

torch then passes batched tensors, one for many gradients, which few operations accept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["one_by_one"]

Backward = Callable[..., Any]


def one_by_one(backward: Backward) -> Backward:
    """The backward of an autograd.Function, run for each gradient of a batch."""

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        if not any(map(_is_batched, grads)):
            return backward(ctx, *grads)
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        unbatched = [torch._remove_batch_dim(x, level, 0, 0) if _is_batched(x) else None for x in grads]  # (count, ...)
        count = next(len(x) for x in unbatched if x is not None)
        once = _Once(ctx)
        each = [
            backward(once, *(grad if x is None else x[i] for grad, x in zip(grads, unbatched, strict=True)))
            for i in range(count)
        ]
        columns = zip(*(one if isinstance(one, tuple) else (one,) for one in each), strict=True)
        return tuple(None if x[0] is None else torch._add_batch_dim(torch.stack(x), 0, level) for x in columns)

    return run


class _Once:
    """The context of a backward that runs several times: saved tensors can be unpacked only once under checkpointing."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _is_batched(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)
