"""The backend ``reference``: the definition of attention, in NumPy and float64, one step per line, and every step is kept.

It is slow on purpose, and the oracle for all other backends. Hidden pairs are never multiplied, because 0 * NaN is NaN and hidden
values must not reach any result. Gradients are those of the formula in float64.

Source: Vaswani et al. 2017, section 3.2.1; the softcap of Gemma 2 (2024); sinks as in gpt-oss (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends import Drawn, GradientSource, Prepared
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.dropout import kept, kept_scale, new_seed

__all__ = ["Steps", "attend", "name", "prepare", "supports"]

name = "reference"

Floats = NDArray[np.float64]


def supports(call: Call) -> str | None:
    """Reject tensors that NumPy cannot read."""
    return call.transformation


def prepare(call: Call) -> Prepared:
    return _Definition(call)


class _Definition(Prepared):
    def __init__(self, call: Call) -> None:
        self.call = call

    def gradient_source(self) -> GradientSource:
        return GradientSource.FORMULA

    def checks_values(self) -> bool:
        return False

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        """Results in the dtype of q, log-sum-exp in float64 or float32."""
        call, like = self.call, inputs.q
        exact = Inputs(*map(_in_float64, inputs))
        bias = exact.bias
        if call.distance_low is not None:
            bias = call.bias_of_pairs(bias)
        options: Any = {"scale": call.scale, "softcap": call.softcap, "bias": bias, "sinks": exact.sinks}
        state = None
        if call.dropout:
            state = Drawn(int(new_seed(call.is_numpy) if seed is None else seed))
            is_kept = kept(
                state.seed, call.dropout, (call.sizes.batch, call.sizes.heads), call.q_positions, call.k_positions
            )
            options["dropout"] = is_kept * kept_scale(call.dropout)
        steps = attend(exact.q, exact.k, exact.v, call.visible(), **options)
        received = steps.weights.sum(axis=2) if call.return_received else None
        if call.is_numpy:
            at_least = np.promote_types(like.dtype, np.float32)
            with np.errstate(all="ignore"):  # a small weight becomes 0 in a narrower dtype
                return Result(
                    steps.output.astype(like.dtype),
                    steps.weights.astype(like.dtype),
                    steps.lse.astype(at_least),
                    state,
                    None if received is None else received.astype(at_least),
                )
        import torch

        at_least_32 = torch.promote_types(like.dtype, torch.float32)
        output = torch.from_numpy(steps.output).to(like)
        weights = torch.from_numpy(steps.weights).to(like)
        lse, sums = (
            None if x is None else torch.from_numpy(x).to(like.device, at_least_32) for x in (steps.lse, received)
        )
        return Result(output, weights, lse, state, sums)


def _in_float64(x: Any) -> Any:
    """An array or a tensor as NumPy float64."""
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x.astype(np.float64)
    return x.detach().cpu().double().resolve_neg().numpy()


@dataclass(frozen=True)
class Steps:
    """Every step of one attention, all float64."""

    q: Floats  # (B, Hq, Nq, D)
    k: Floats  # (B, Hq, Nk, D), key heads repeated for the query heads of their group
    v: Floats  # (B, Hq, Nk, Dv)
    visible: NDArray[np.bool_]  # (B, Hq, Nq, Nk)
    scores: Floats  # (B, Hq, Nq, Nk), q k^T
    scaled: Floats  # times scale
    capped: Floats  # softcap * tanh(scaled / softcap)
    masked: Floats  # plus bias; -inf where hidden
    weights: Floats  # softmax over the keys, before dropout; exactly 0 where hidden
    lse: Floats  # (B, Hq, Nq), log-sum-exp of a row of masked (and its sink)
    output: Floats  # (B, Hq, Nq, Dv)
    scale: float
    softcap: float | None


def attend(
    q: Floats,
    k: Floats,
    v: Floats,
    visible: NDArray[np.bool_],
    *,
    scale: float,
    softcap: float | None = None,
    bias: Floats | None = None,
    sinks: Floats | None = None,
    dropout: Floats | None = None,
) -> Steps:
    """Attention, step by step.

    >>> x = np.eye(2)[None, None]
    >>> attend(x, x, x, np.tri(2, dtype=bool), scale=1.0).weights[0, 0].round(4)
    array([[1.    , 0.    ],
           [0.2689, 0.7311]])

    Args:
        q: (B, Hq, Nq, D).  k: (B, Hkv, Nk, D).  v: (B, Hkv, Nk, Dv).
        visible: True = may see; broadcasts to (B, Hq, Nq, Nk).  bias: the same, numbers.  sinks: (Hq,).
        dropout: what each weight is multiplied by for the output; the same shape.
    """
    group = q.shape[1] // max(1, k.shape[1])
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    visible = np.broadcast_to(visible, (*q.shape[:3], k.shape[2]))
    with np.errstate(all="ignore"):  # hidden values may be NaN or infinite
        scores = q @ k.swapaxes(2, 3)
        scaled = scores * scale
        capped = scaled if softcap is None else softcap * np.tanh(scaled / softcap)
        masked = np.where(visible, capped if bias is None else capped + bias, -np.inf)
        # A row whose bias is -inf everywhere sees nothing.
        visible = visible & (masked.max(axis=3, keepdims=True, initial=-np.inf) != -np.inf)
        row = masked if sinks is None else np.concatenate([masked, _column(sinks, masked)], axis=3)
        row_max = row.max(axis=3, keepdims=True, initial=-np.inf)
        row_max = np.where(row_max == -np.inf, 0, row_max)  # a query that sees nothing gets weights of 0
        exps = np.exp(row - row_max)
        row_sum = exps.sum(axis=3, keepdims=True)
        weights = np.where(visible, (exps / np.where(row_sum == 0, 1, row_sum))[..., : k.shape[2]], 0)
        lse = (row_max + np.log(row_sum))[..., 0]
        output = _sum_visible(weights if dropout is None else weights * dropout, v, visible)
    return Steps(q, k, v, visible, scores, scaled, capped, masked, weights, lse, output, scale, softcap)


def _sum_visible(weights: Floats, x: Floats, visible: NDArray[np.bool_]) -> Floats:
    """``weights @ x`` over visible pairs only: a row of x with NaN or inf reaches exactly the queries that see it.

    weights, visible: (B, H, M, N).  x: (B, H, N, D).  Returns (B, H, M, D).
    """
    non_finite = np.logical_not(np.isfinite(x).all(axis=3))  # (B, H, N)
    out = weights @ np.where(non_finite[..., None], 0, x)
    for j in np.flatnonzero(non_finite.any(axis=(0, 1))):
        affected = visible[..., j, None] & non_finite[:, :, j, None, None]  # (B, H, M, 1)
        out = out + np.where(affected, weights[..., j, None] * x[:, :, None, j], 0)
    return out


def _column(sinks: Floats, masked: Floats) -> Any:
    """The sinks as one more key that every query sees: (Hq,) -> (B, Hq, Nq, 1)."""
    return np.broadcast_to(sinks[None, :, None, None], (*masked.shape[:3], 1))
