"""Attention with linear biases (ALiBi): -slope * |q - k| is added to each score, without a table of all pairs.

Before a query the bias is slope * k - slope * q. The second term is the same for all keys of the query, so softmax cancels it: a bias
over keys alone, slope * k, gives the same output. After the query it is -slope * k in the same way. Where a mask shows keys on both
sides, the two halves are computed one after the other and merged by their log-sum-exps.

Source: Press et al. 2022.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.dispatch.merge import merge
from lowtri.errors import CallError
from lowtri.masks import EMPTY, Mask, causal

__all__ = ["alibi_attention"]


def alibi_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, slopes: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, log-sum-exp and weights (empty) of q, k and v (B, H, N, D) under a mask, with options of ``attention``.

    Args:
        slopes: (Hq,) or (B, Hq).
    """
    rows, heads, nq, _ = q.shape
    if tuple(slopes.shape) not in ((heads,), (rows, heads)):
        raise CallError(
            f"alibi_slopes is {tuple(slopes.shape)}. Fix: ({heads},) or ({rows}, {heads}), one per query head."
        )
    if options["return_weights"]:
        raise CallError(
            "return_attn_probs: with alibi_slopes and dropout no probabilities are returned. Fix: dropout_p=0"
        )
    nk = k.shape[2]
    at_q = np.arange(nk - nq, nk) if options["q_positions"] is None else options["q_positions"]
    at_k = np.arange(nk) if options["k_positions"] is None else options["k_positions"]
    options = {**options, "q_positions": at_q, "k_positions": at_k, "return_weights": False, "return_lse": True}
    slopes = slopes.detach().to(q.device, torch.float64).reshape(-1, heads, 1)  # (B|1, H, 1)
    # Centred positions are small, so that the sums lose little.
    centre = (int(at_k.max(initial=0)) + int(at_q.max(initial=0))) // 2
    of_q, of_k = (
        torch.from_numpy(np.atleast_2d(x) - centre).to(q.device, torch.float64)[:, None] for x in (at_q, at_k)
    )
    bounds = (
        int(at_q.min(initial=0)),
        int(at_q.max(initial=0)) + 1,
        int(at_k.min(initial=0)),
        int(at_k.max(initial=0)) + 1,
    )
    halves = [(mask & causal(), 1.0), (mask - causal(), -1.0)]
    outputs, lses = [], []
    for half, sign in halves:
        if sign < 0 and np.all(half.tile(*(max(0, edge) for edge in bounds)) == EMPTY):
            continue
        bias = (sign * slopes * of_k)[:, :, None].to(q.dtype if q.dtype is torch.float64 else torch.float32)
        output, lse = attention(q, k, v, half, bias=bias, **options)
        outputs.append(output)
        lses.append((lse - sign * slopes * of_q).to(lse.dtype))
    if len(outputs) == 1:
        return outputs[0], lses[0], q.new_empty(0)
    return (*merge(outputs, lses), q.new_empty(0))
