"""The kernels as a differentiable torch function. Loaded late, since torch is."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from lowtri.engines import launch
from lowtri.ops.call import Call

__all__ = ["Kernels"]


Known: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Kernels(torch.autograd.Function):
    """Output and log-sum-exp of a call; gradients by the kernel, once. What the kernels do not multiply goes in as float32.

    ``known``: the output and log-sum-exp, where they have been computed before and only the gradients are wanted.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, known: Known | None, *inputs: torch.Tensor | None) -> Any:
        if known is None:
            q, k, v, bias, sinks = _readable(*inputs)
            known = launch.forward(call, q, k, v, bias, sinks, True)
        output, lse = known
        ctx.call = call
        ctx.save_for_backward(*inputs, output, lse)
        return output.to(call.q.dtype), lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor, d_lse: torch.Tensor) -> Any:
        *inputs, output, lse = ctx.saved_tensors
        q, k, v, bias, sinks = _readable(*inputs)
        nothing = lse == -torch.inf
        delta = ((d_output.to(lse.dtype) * output.to(lse.dtype)).sum(-1) - d_lse).masked_fill(nothing, 0)
        dq, dk, dv, d_bias = launch.backward(ctx.call, q, k, v, bias, lse, d_output.to(q.dtype), delta)
        found = [d.to(x.dtype) for d, x in zip((dq, dk, dv), inputs, strict=False)]
        to_bias = None if d_bias is None else d_bias.to(inputs[3].dtype)
        to_sinks = None
        if sinks is not None:  # a sink takes its share of what every row must give up
            share = torch.exp(sinks[None, :, None] - lse).masked_fill(nothing, 0)
            to_sinks = -(share * delta).sum((0, 2)).to(inputs[4].dtype)
        return (None, None, *found, to_bias, to_sinks)


def _readable(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[Any, ...]:
    """The inputs as the kernels read them: as they are, or cast to float32; bias and sinks in the dtype that is computed with."""
    beside = torch.float64 if q.dtype == torch.float64 else torch.float32
    inner = q.dtype if launch.readable(q, k, v) else beside
    kinds = (inner, inner, inner, beside, beside)
    return tuple(
        None if x is None else x.detach().to(kind) for x, kind in zip((q, k, v, bias, sinks), kinds, strict=True)
    )
