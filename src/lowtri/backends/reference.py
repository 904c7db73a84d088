"""The backend ``reference``: the definition in NumPy float64, for NumPy arrays and torch tensors, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import EngineError
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.reference import Steps, attend, gradients

if TYPE_CHECKING:
    import torch

__all__ = ["cost", "name", "prepare", "supports"]

name = "reference"


def supports(call: Call) -> str | None:
    """The definition runs everything that has one answer."""
    return "dropout draws at random, and the definition does not" if call.dropout else None


def cost(call: Call) -> float:
    """The first choice for small NumPy arrays, since it does not load torch; the last one for tensors."""
    batch, heads, _, nq, nk, *_ = call.sizes
    return (100 if call.is_numpy else 1e9) + batch * heads * nq * nk / 20


@dataclass(frozen=True)
class _Prepared:
    call: Call
    nbytes: int = 0
    may_spread: bool = False

    def run(self, inputs: Inputs) -> Result:
        """Results in the dtype of q, log-sum-exp in float64 or float32."""
        if not self.call.is_numpy:
            return Result(*_function().apply(self.call, *inputs))
        steps = _steps(self.call, *inputs)
        dtype = inputs.q.dtype
        lse = steps.lse.astype(np.promote_types(dtype, np.float32))
        return Result(steps.output.astype(dtype), steps.weights.astype(dtype), lse)


def prepare(call: Call) -> _Prepared:
    return _Prepared(call)


def _steps(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Steps:
    q, k, v, bias, sinks = (None if x is None else np.asarray(x, np.float64) for x in (q, k, v, bias, sinks))
    return attend(q, k, v, call.visible(), scale=call.scale, softcap=call.softcap, bias=bias, sinks=sinks)


def _function() -> type[torch.autograd.Function]:
    """The definition as a differentiable torch function; made late, since torch is loaded late."""
    import torch

    def wide(x: torch.Tensor | None) -> NDArray[np.float64] | None:
        return None if x is None else x.detach().cpu().double().numpy()

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, *inputs: torch.Tensor | None) -> Any:
            steps = _steps(call, *(wide(x) for x in inputs))
            ctx.call, ctx.steps = call, steps
            ctx.save_for_backward(*inputs)  # so that torch notices when one was changed in place
            like = inputs[0]
            assert like is not None
            at_least_32 = torch.promote_types(like.dtype, torch.float32)
            lse = torch.from_numpy(steps.lse).to(like.device, at_least_32)
            output, weights = (torch.from_numpy(x).to(like) for x in (steps.output, steps.weights))
            return output, weights, lse

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            if torch.is_grad_enabled():  # create_graph=True: NumPy would break the graph in silence
                raise EngineError(
                    'attention: engine "reference" gives gradients once, not gradients of gradients. Fix: engine="formula".'
                )
            call, (q, k, v, bias, sinks) = ctx.call, ctx.saved_tensors
            d_output, d_weights, d_lse = (wide(g) for g in grads)
            assert d_output is not None
            d_q, d_k, d_v, d_bias, d_sinks = gradients(ctx.steps, d_output, d_weights, d_lse, sinks=wide(sinks))
            d_k, d_v = (d.reshape(*k.shape[:2], call.group, *d.shape[2:]).sum(axis=2) for d in (d_k, d_v))
            d_inputs = [torch.from_numpy(d).to(x) for d, x in ((d_q, q), (d_k, k), (d_v, v))]
            to_bias = None if bias is None else torch.from_numpy(d_bias).sum_to_size(bias.shape).to(bias)
            to_sinks = None if sinks is None else torch.from_numpy(np.asarray(d_sinks)).to(sinks)
            return (None, *d_inputs, to_bias, to_sinks)

    return Reference
