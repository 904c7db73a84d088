"""A backward under ``is_grads_batched=True`` (also ``torch.autograd.functional.jacobian(vectorize=True)``), one gradient at a time.

torch then passes batched tensors, each of which holds many gradients, and few operations accept them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lowtri.compat.torch_private import in_batch, is_batched, out_of_batch, vmap_level

Backward = Callable[..., Any]


def loop_over_vmapped_grads(backward: Backward) -> Backward:
    """The backward of an autograd.Function, run for each gradient of a batch."""

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        for x in grads:  # a loop, since small calls take microseconds
            if x is not None and is_batched(x):
                break
        else:
            return backward(ctx, *grads)
        level = vmap_level()
        unbatched = [out_of_batch(x, level, 0, 0) if _is_batched(x) else None for x in grads]  # (count, ...)
        count = next(len(x) for x in unbatched if x is not None)
        once = _Once(ctx)
        each = [
            backward(once, *(grad if x is None else x[i] for grad, x in zip(grads, unbatched, strict=True)))
            for i in range(count)
        ]
        columns = zip(*(one if isinstance(one, tuple) else (one,) for one in each), strict=True)
        return tuple(None if x[0] is None else in_batch(torch.stack(x), 0, level) for x in columns)

    return run


class _Once:
    """The context of a backward that runs several times: saved tensors can be unpacked only once under checkpointing."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _is_batched(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and bool(is_batched(x))
