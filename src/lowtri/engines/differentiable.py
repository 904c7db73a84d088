"""Gradients that can be differentiated again: what an engine's own backward cannot record, the formula computes.

A kernel, NumPy and torch's fused attention give numbers without a graph. Where torch needs the graph (``create_graph=True``), or
transforms the backward, the call is computed again by the formula, tile by tile, and differentiated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtri.engines.choice import load
from lowtri.engines.memory import transformed
from lowtri.ops.call import Call

__all__ = ["by_formula", "needs_formula"]


def needs_formula() -> bool:
    """Inside a backward: whether torch records a graph of it, or hands it tensors that show no numbers."""
    return torch.is_grad_enabled() or transformed() is not None


def by_formula(
    call: Call,
    inputs: Sequence[Tensor | None],
    starts: Sequence[Tensor],
    wanted: Sequence[bool],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias and sinks, those that are ``wanted``; with a graph where torch records one.

    Args:
        inputs: q, k, v, bias, sinks as autograd knows them.
        starts: gradients of the output, then of the weights if the call returns them, then of the log-sum-exp; or the first of these.
        dtype: what the formula computes in; that of the inputs by default.
    """
    recording = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since one tensor may be several inputs, or one input the source of another: each has a gradient of its own.
        views = [None if x is None else x.view_as(x) for x in inputs]
        q, k, v, bias, sinks = (x if x is None or dtype is None else x.to(dtype) for x in views)
        found = load("formula").run(replace(call, q=q, k=k, v=v, bias=bias, sinks=sinks))
        results = [x for x in (found.output, found.weights, found.lse) if x is not None]
        pairs = [(x, start.to(x.dtype)) for x, start in zip(results, starts, strict=False) if x.requires_grad]
        leaves = [x for x, want in zip(views, wanted, strict=True) if want and x is not None]
        outputs, begin = zip(*pairs, strict=True)
        made = iter(torch.autograd.grad(outputs, leaves, begin, create_graph=recording, materialize_grads=True))
    return tuple(next(made) if want else None for want in wanted)
