"""The backend ``reference``: the definition in NumPy float64, for NumPy arrays and torch tensors, with gradients.

Higher derivatives are those of the formula in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.distance_bias import of_pairs, sum_pairs
from lowtri.ops.reference import attend, gradients

__all__ = ["name", "prepare", "supports"]

name = "reference"


def supports(call: Call) -> str | None:
    """Reject dropout, and tensors that NumPy cannot read."""
    return "dropout draws at random, and the definition does not" if call.dropout else call.transformation


def prepare(call: Call) -> _Prepared:
    return _Prepared(call)


@dataclass(frozen=True)
class _Prepared:
    call: Call
    nbytes: int = 256
    computes_gradients: bool = True
    formula_dtype: str | None = "float64"
    from_output: bool = False

    def run(self, inputs: Inputs) -> Result:
        return self.record(inputs)[0]

    def record(self, inputs: Inputs) -> tuple[Result, Any]:
        """Results in the dtype of q, log-sum-exp in float64 or float32; and every intermediate step."""
        call = self.call
        q, k, v, bias, sinks = map(_wide, inputs)
        if call.distance_low is not None:
            bias = of_pairs(call, bias)
        steps = attend(q, k, v, call.visible(), scale=call.scale, softcap=call.softcap, bias=bias, sinks=sinks)
        like = inputs.q
        if call.is_numpy:
            lse = steps.lse.astype(np.promote_types(like.dtype, np.float32))
            return Result(steps.output.astype(like.dtype), steps.weights.astype(like.dtype), lse), steps
        import torch

        at_least_32 = torch.promote_types(like.dtype, torch.float32)
        output, weights = (torch.from_numpy(x).to(like) for x in (steps.output, steps.weights))
        return Result(output, weights, torch.from_numpy(steps.lse).to(like.device, at_least_32)), steps

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients of tensors."""
        import torch

        steps, (q, k, v, bias, sinks) = recorded or self.record(inputs)[1], inputs
        d_results = map(_wide, (d_result.output, d_result.weights, d_result.lse))
        d_q, d_k, d_v, d_bias, d_sinks = gradients(steps, *d_results, sinks=_wide(sinks))
        with np.errstate(all="ignore"):  # gradients of infinite numbers, summed over the heads of a group
            d_k, d_v = (d.reshape(*k.shape[:2], self.call.group, *d.shape[2:]).sum(axis=2) for d in (d_k, d_v))
        if self.call.distance_low is not None:
            d_bias = sum_pairs(self.call, d_bias, bias.shape[3])
        to_bias = None if bias is None else torch.from_numpy(d_bias).sum_to_size(bias.shape).to(bias)
        to_sinks = None if sinks is None else torch.from_numpy(np.asarray(d_sinks)).to(sinks)
        to_q, to_k, to_v = (torch.from_numpy(d).to(x) for d, x in ((d_q, q), (d_k, k), (d_v, v)))
        return Inputs(to_q, to_k, to_v, to_bias, to_sinks)


def _wide(x: Any) -> Any:
    """An array or a tensor as NumPy float64."""
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x.astype(np.float64)
    return x.detach().cpu().double().resolve_neg().numpy()
