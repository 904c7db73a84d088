"""The gradients of a call, from its output and log-sum-exp. Loaded late, since torch is."""

from __future__ import annotations

from typing import Any

import torch

from lowtri.backends.cpu import launch
from lowtri.masks.plan import Plan
from lowtri.ops.call import Call, Inputs, Result

__all__ = ["gradients"]


def gradients(call: Call, plan: Plan, inputs: Inputs, result: Result, d_result: Result) -> Inputs:
    """The gradients of the inputs, from those of the output (B, Hq, Nq, Dv) and the log-sum-exp (B, Hq, Nq)."""
    q, k, v, bias, sinks = _readable(*inputs)
    lse, d_output, d_lse = result.lse, d_result.output, d_result.lse
    nothing = lse == -torch.inf
    delta = (d_output.to(lse.dtype) * result.output.to(lse.dtype)).sum(-1)
    delta = (delta if d_lse is None else delta - d_lse).masked_fill(nothing, 0)
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
