"""The backend ``reference``: the definition in NumPy float64, for NumPy arrays and torch tensors; gradients are those of the formula
in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.backends.base import Prepared
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.distance_bias import of_pairs
from lowtri.ops.reference import attend

name = "reference"


def supports(call: Call) -> str | None:
    """Reject dropout, and tensors that NumPy cannot read."""
    return "dropout draws at random, and the definition does not" if call.dropout else call.transformation


def prepare(call: Call) -> Prepared:
    return _Definition(call)


class _Definition(Prepared):
    formula_dtype = "float64"

    def __init__(self, call: Call) -> None:
        self.call = call

    def run(self, inputs: Inputs) -> Result:
        """Results in the dtype of q, log-sum-exp in float64 or float32."""
        call, like = self.call, inputs.q
        q, k, v, bias, sinks = map(_wide, inputs)
        if call.distance_low is not None:
            bias = of_pairs(call, bias)
        steps = attend(q, k, v, call.visible(), scale=call.scale, softcap=call.softcap, bias=bias, sinks=sinks)
        if call.is_numpy:
            lse = steps.lse.astype(np.promote_types(like.dtype, np.float32))
            return Result(steps.output.astype(like.dtype), steps.weights.astype(like.dtype), lse)
        import torch

        at_least_32 = torch.promote_types(like.dtype, torch.float32)
        output, weights = (torch.from_numpy(x).to(like) for x in (steps.output, steps.weights))
        return Result(output, weights, torch.from_numpy(steps.lse).to(like.device, at_least_32))


def _wide(x: Any) -> Any:
    """An array or a tensor as NumPy float64."""
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x.astype(np.float64)
    return x.detach().cpu().double().resolve_neg().numpy()
