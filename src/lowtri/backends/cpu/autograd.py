"""The kernels as a differentiable torch function. Loaded late, since torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtri.backends.cpu import launch
from lowtri.masks.plan import Plan
from lowtri.ops.call import Call, Inputs

if TYPE_CHECKING:
    from lowtri.backends.cpu import PreparedKernels

__all__ = ["Kernels", "gradients"]


class Kernels(torch.autograd.Function):
    """Output and log-sum-exp of a prepared call; gradients by the kernel, once."""

    @staticmethod
    def forward(ctx: Any, prepared: PreparedKernels, *inputs: Tensor | None) -> Any:
        output, lse = prepared.forward(Inputs(*inputs), True)
        ctx.prepared = prepared
        ctx.save_for_backward(*inputs, output, lse)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor, d_lse: Tensor) -> Any:
        *inputs, output, lse = ctx.saved_tensors
        return None, *ctx.prepared.gradients(Inputs(*inputs), output, lse, d_output, d_lse)


def gradients(
    call: Call, plan: Plan, inputs: Inputs, output: Tensor, lse: Tensor, d_output: Tensor, d_lse: Tensor
) -> Inputs:
    """The gradients of a call's inputs from its output (B, Hq, Nq, Dv) and log-sum-exp (B, Hq, Nq), and the gradients of these."""
    q, k, v, bias, sinks = _readable(*inputs)
    nothing = lse == -torch.inf
    delta = ((d_output.to(lse.dtype) * output.to(lse.dtype)).sum(-1) - d_lse).masked_fill(nothing, 0)
    dq, dk, dv, d_bias = launch.backward(call, plan, q, k, v, bias, lse, d_output.to(q.dtype), delta)
    d_sinks = None
    if sinks is not None:  # a sink takes its share of what every row must give up
        share = torch.exp(sinks[None, :, None] - lse).masked_fill(nothing, 0)
        d_sinks = -(share * delta).sum((0, 2)).to(inputs.sinks.dtype)
    d_bias = None if d_bias is None else d_bias.to(inputs.bias.dtype)
    dq, dk, dv = (d.to(inputs.q.dtype) for d in (dq, dk, dv))
    return Inputs(dq, dk, dv, d_bias, d_sinks)


def _readable(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[Any, ...]:
    """The inputs as the kernels read them: float64, bf16 where it can be multiplied in pairs, float32 otherwise."""
    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    input_dtype = torch.bfloat16 if launch.in_pairs(q, k, v) else compute_dtype
    dtypes = (input_dtype, input_dtype, input_dtype, compute_dtype, compute_dtype)
    return tuple(
        None if x is None else x.detach().to(dtype) for x, dtype in zip((q, k, v, bias, sinks), dtypes, strict=True)
    )
