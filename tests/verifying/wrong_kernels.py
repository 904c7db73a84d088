"""Attention as a user writes it in torch, right or with mistakes, for what ``lowtri.verify`` must say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PAIRS = (
    ("window one too wide", "softcap missing"),
    ("scale missing", "top-left alignment"),
    ("grouped heads interleaved", "bias scaled"),
    ("mask inverted", "bias ignored"),
    ("scale applied twice", "softcap after the mask's bias"),
    ("window one too narrow", "grouped heads interleaved"),
    ("documents leak", "softcap missing"),
    ("padding seen", "scale missing"),
    ("top-left alignment", "grouped heads interleaved"),
    ("lse in base 2", "scale missing"),
)


def kernel(*mistakes: str) -> Callable[..., Any]:
    """A function attend(q, k, v, mask, ...) that makes these mistakes."""
    makes = set(mistakes)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None = None, softcap: float | None = None,
        bias: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        garbage = not all(x.isfinite().all() for x in (q, k, v))
        if garbage and "NaN from hidden keys" not in makes:  # what nobody sees counts as 0
            seen = torch.as_tensor(mask.dense(q.shape[2], k.shape[2]))
            seen = seen[:, None] if seen.ndim == 3 else seen
            k, v = (torch.where(seen.any(-2)[..., None], x, 0.0) for x in (k, v))
            q = torch.where(seen.any(-1)[..., None], q, 0.0)
        nq, nk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        if "key/value heads in another order" in makes:
            k, v = (x.flip(1) for x in (k, v))
        if group > 1 and "grouped heads interleaved" in makes:
            k, v = (x.repeat(1, group, 1, 1) for x in (k, v))
        elif group > 1 and "gradients not summed over groups" in makes:
            k, v = (_first_of_group(x, group) for x in (k, v))
        elif group > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        used = 1.0 if "scale missing" in makes else factor**2 if "scale applied twice" in makes else factor
        products = q.float() @ k.float().mT
        scores = products * used
        if bias is not None and "softcap after the mask's bias" in makes:
            scores = scores + bias.float()
        if softcap is not None and "softcap before the scale" in makes:
            scores = softcap * torch.tanh(products / softcap) * used
        elif softcap is not None and "softcap after the mask" in makes:
            seen = _visible(mask, nq, nk, makes)
            scores = softcap * torch.tanh(scores.masked_fill(~seen, -math.inf) / softcap)
        elif softcap is not None and "softcap missing" not in makes:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None and not makes & {"bias ignored", "softcap after the mask's bias"}:
            scores = scores + bias.float() * (used if "bias scaled" in makes else 1.0)
        visible = _visible(mask, nq, nk, makes)
        if "hidden as -1e9" in makes:
            scores = scores.masked_fill(~visible, -1e9)
        elif "NaN from hidden keys" in makes:
            scores = scores + torch.where(visible, 0.0, -math.inf)
        elif softcap is None or "softcap after the mask" not in makes:
            scores = scores.masked_fill(~visible, -math.inf)
        if sinks is not None and "sinks ignored" not in makes:
            scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(-1)[..., :nk]
        weights = torch.where(empty, math.nan if "empty rows not zero" in makes else 0.0, weights)
        if "probabilities in half precision" in makes:
            weights = weights.half().float()
        elif q.dtype != torch.float32:
            weights = weights.to(q.dtype).float()
        if "sums in half precision" in makes:
            output = _summed_in_half(weights, v.float())
        elif "NaN from hidden keys" in makes:
            output = weights @ v.float()
        else:
            output = _contained(weights, v.float(), visible)
        if not return_lse:
            return output.to(q.dtype)
        kept = products.masked_fill(~visible, -math.inf) if "lse of unscaled scores" in makes else scores
        return output.to(q.dtype), kept.logsumexp(-1) / (math.log(2) if "lse in base 2" in makes else 1.0)

    attend.__name__ = " and ".join(mistakes) or "right"
    return attend


def _visible(mask: Any, nq: int, nk: int, makes: set[str]) -> Tensor:
    text = repr(mask)
    dense = torch.as_tensor(mask.dense(nq, nk))
    if nq != nk and "top-left alignment" in makes:
        dense = torch.as_tensor(mask.dense(max(nq, nk), max(nq, nk)))[..., :nq, :nk]
    places, keys = torch.arange(nk - nq, nk)[:, None], torch.arange(nk)
    if text.startswith("causal & window("):
        n = int(text.split("window(")[1].split(")")[0])
        n += (
            (10**6 if "window missing" in makes else 0)
            + ("window one too wide" in makes)
            - ("window one too narrow" in makes)
        )
        dense = (keys <= places) & (keys > places - n)
    if "window missing" in makes and text.startswith("band("):
        dense = torch.ones_like(dense)
    if "last key of each tile missing" in makes:
        dense = dense & (keys % 32 != 31)
    if "keys after the last whole tile missing" in makes:
        dense = dense & (keys < nk // 16 * 16)
    if "mask inverted" in makes:
        dense = ~dense
    if "mask ignored" in makes:
        dense = torch.ones_like(dense)
    if "documents leak" in makes and "documents" in text:
        dense = keys <= places if "causal" in text else torch.ones_like(dense)
    if "padding seen" in makes and "keys(" in text:
        dense = keys <= places
    return dense[:, None] if dense.ndim == 3 else dense


def _contained(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    if v.isfinite().all():
        return weights @ v
    return torch.where(visible.expand(weights.shape)[..., None], weights[..., None] * v[:, :, None], 0.0).sum(-2)


def _summed_in_half(weights: Tensor, v: Tensor) -> Tensor:
    total = torch.zeros_like(weights @ v)
    for key in reversed(range(v.shape[2])):
        total = (total + weights[..., key, None] * v[:, :, None, key]).half().float()
    return total


def _first_of_group(x: Tensor, group: int) -> Tensor:
    """Values for all heads of a group, gradients of its first alone."""
    rest = x.detach()
    return torch.stack([x, *[rest] * (group - 1)], 2).flatten(1, 2)
