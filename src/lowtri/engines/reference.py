"""The engine ``reference``: the definition in NumPy float64, for NumPy arrays and torch tensors, with gradients.

Gradients of gradients are those of the formula in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtri.ops.call import Call, Result
from lowtri.ops.reference import Steps, attend, gradients

if TYPE_CHECKING:
    import torch

__all__ = ["name", "run", "why_not"]

name = "reference"


def why_not(call: Call) -> str | None:
    """What has more than one answer, and what torch does not let NumPy read."""
    if call.dropout:
        return "dropout draws at random, and the definition does not"
    if call.is_numpy:
        return None
    from lowtri.engines.memory import transformed

    return transformed()


def run(call: Call) -> Result:
    """Run the definition; results in the dtype of q, log-sum-exp in float64 or float32."""
    if call.is_numpy:
        steps = _steps(call, call.q, call.k, call.v, call.bias, call.sinks)
        kind = call.q.dtype
        lse = steps.lse.astype(np.promote_types(kind, np.float32))
        return Result(steps.output.astype(kind), steps.weights.astype(kind), lse)
    return Result(*_function().apply(call, call.q, call.k, call.v, call.bias, call.sinks))


def _steps(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Steps:
    q, k, v, bias, sinks = (None if x is None else np.asarray(x, np.float64) for x in (q, k, v, bias, sinks))
    return attend(q, k, v, call.visible(), scale=call.scale, softcap=call.softcap, bias=bias, sinks=sinks)


def _function() -> type[torch.autograd.Function]:
    """The definition as a differentiable torch function; made late, since torch is loaded late."""
    import torch

    from lowtri.engines.batched import one_by_one
    from lowtri.engines.differentiable import by_formula, needs_formula

    def wide(x: torch.Tensor | None) -> NDArray[np.float64] | None:
        return None if x is None else x.detach().cpu().double().numpy()

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, *inputs: torch.Tensor | None) -> Any:
            steps = _steps(call, *(wide(x) for x in inputs))
            ctx.call, ctx.steps = call, steps
            ctx.save_for_backward(*inputs)  # so that torch notices when one was changed in place
            like = call.q
            at_least_32 = torch.promote_types(like.dtype, torch.float32)
            lse = torch.from_numpy(steps.lse).to(like.device, at_least_32)
            output, weights = (torch.from_numpy(x).to(like) for x in (steps.output, steps.weights))
            return output, weights, lse

        @staticmethod
        @one_by_one
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            if needs_formula():  # NumPy has no graph
                call = replace(ctx.call, return_weights=True)
                wanted = ctx.needs_input_grad[1:]
                return (None, *by_formula(call, ctx.saved_tensors, grads, wanted, torch.float64))
            call, (q, k, v, bias, sinks) = ctx.call, ctx.saved_tensors
            d_output, d_weights, d_lse = (wide(g) for g in grads)
            assert d_output is not None
            d_q, d_k, d_v, d_bias, d_sinks = gradients(ctx.steps, d_output, d_weights, d_lse, sinks=wide(sinks))
            d_k, d_v = (d.reshape(*k.shape[:2], call.group, *d.shape[2:]).sum(axis=2) for d in (d_k, d_v))
            found = [torch.from_numpy(d).to(x) for d, x in ((d_q, q), (d_k, k), (d_v, v))]
            to_bias = None if bias is None else torch.from_numpy(d_bias).sum_to_size(bias.shape).to(bias)
            to_sinks = None if sinks is None else torch.from_numpy(np.asarray(d_sinks)).to(sinks)
            return (None, *found, to_bias, to_sinks)

    return Reference
