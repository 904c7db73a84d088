"""A call of attention in torch's own operations, for torch.onnx.export: ONNX has no operator for the kernels.

The mask becomes a table of all pairs in the exported program, so the lengths are those of the example.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.compat import constant_while_traced
from lowtri.errors import CallError
from lowtri.ops.arguments import describe
from lowtri.ops.call import CallOptions, Result

__all__ = ["exports_to_onnx", "formula_for_onnx"]


@constant_while_traced
def exports_to_onnx() -> bool:
    """Whether torch.onnx.export is recording."""
    return torch.onnx.is_in_onnx_export()


def formula_for_onnx(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Any:
    """The results of a call, as :func:`lowtri.attention` returns them.

    Raises:
        CallError: for a length that varies, positions that are inputs of the program, or dropout.
    """
    _check_static(q, k, v, options)
    call, inputs = describe(q, k, v, mask, options)
    q, k, v = inputs[:3]
    bias, sinks = inputs.bias, inputs.sinks
    table = call.visible()  # (B|1, Hq|1, Nq, Nk)
    visible = torch.from_numpy(table).to(q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    if call.group > 1:
        k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)
    unseen = torch.from_numpy(np.logical_not(table.any(axis=2))[..., None]).to(q.device)  # (B|1, Hq|1, Nk, 1)
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    scores = (q.to(wide) @ k.to(wide).transpose(2, 3)) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        scores = scores + (bias if call.distance_low is None else call.bias_of_pairs(bias)).to(wide)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    weights, lse = _softmax(scores, visible)
    sums = weights.sum(2)
    weights = weights.to(q.dtype)
    output = (weights.to(wide) @ v.to(wide)).to(q.dtype)
    return call.returned(Result(output, weights, lse, received=sums))


def _softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the keys and the log-sum-exp; 0 and -inf where a query sees nothing."""
    nothing = (scores == -torch.inf).all(3, keepdim=True)
    scores = scores.masked_fill(nothing, 0)
    lse = torch.logsumexp(scores, 3).masked_fill(nothing[..., 0], -torch.inf)
    return torch.softmax(scores, 3)[..., : visible.shape[3]].masked_fill(~visible | nothing, 0), lse


def _check_static(q: Any, k: Any, v: Any, options: CallOptions) -> None:
    if options.dropout:
        raise CallError("attention: torch.onnx.export with dropout. Fix: model.eval(), or dropout=0.")
    lengths = [n for x in (q, k, v) for n in getattr(x, "shape", ())[-2:]]
    # What the recording refuses is tried again by the compiler, for which varying lengths are whole numbers.
    if torch.compiler.is_dynamo_compiling() or any(not isinstance(n, int) for n in lengths):
        raise CallError(
            f"attention: torch.onnx.export with lengths that vary: {lengths}; the mask becomes a table of the example's.\n"
            "Fix: export without dynamic_shapes for the dimensions of tokens, once for each length."
        )
    for name, x in (("q_positions", options.q_positions), ("k_positions", options.k_positions)):
        if isinstance(x, Tensor):
            raise CallError(
                f"attention: torch.onnx.export with {name} that are a tensor of the program. Fix: a range or a NumPy array."
            )
