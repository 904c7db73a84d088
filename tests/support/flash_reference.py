"""flash-attn's functions as plain formulas in float64, pair by pair: the oracle of the tests of lowtri.integrations.flash_attn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def visible(nq: int, nk: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """Who may see whom (Nq, Nk): the last query stands at the last key."""
    left, right = window
    ahead = torch.arange(nk) - (torch.arange(nq)[:, None] + nk - nq)  # how far the key is after the query
    table = torch.ones(nq, nk, dtype=torch.bool)
    if causal or right >= 0:
        table &= ahead <= (0 if causal else right)
    if left >= 0:
        table &= ahead >= -left
    return table


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """One sequence: q (Nq, Hq, D), k and v (Nk, Hkv, D); the output (Nq, Hq, D) and the log-sum-exp (Hq, Nq)."""
    causal = options.get("causal", False)
    window = options.get("window_size", (-1, -1))
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))  # (H, N, D)
    group = len(q) // len(k)
    nq = q.shape[1]
    nk = k.shape[1]
    k = k.repeat_interleave(group, 0)
    v = v.repeat_interleave(group, 0)
    scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
    scores = q @ k.mT * scale  # (Hq, Nq, Nk)
    if cap := options.get("softcap", 0.0):
        scores = cap * torch.tanh(scores / cap)
    if (slopes := options.get("alibi_slopes")) is not None:
        distance = (torch.arange(nk) - (torch.arange(nq)[:, None] + nk - nq)).abs()
        scores = scores - slopes.double()[:, None, None] * distance
    table = visible(nq, nk, causal, window)
    scores = scores.masked_fill(~table, -torch.inf)
    empty = ~table.any(1)
    weights = torch.softmax(scores.masked_fill(empty[:, None], 0), -1).masked_fill(empty[:, None], 0)
    lse = torch.logsumexp(scores.masked_fill(empty[:, None], 0), -1).masked_fill(empty, torch.inf)
    return (weights @ v).transpose(0, 1), lse


def batch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The same for (B, N, H, D); slopes (Hq,) or (B, Hq)."""
    slopes = options.pop("alibi_slopes", None)
    rows = []
    for b in range(len(q)):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        rows.append(attend(q[b], k[b], v[b], alibi_slopes=own, **options))
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (N, H, D) with its first 2 R entries turned as complex numbers."""
    x = x.double().clone()
    half = cos.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    turned = (
        torch.complex(x[..., first], x[..., second]) * torch.complex(cos.double(), sin.double())[positions][:, None]
    )
    x[..., first] = turned.real
    x[..., second] = turned.imag
    return x
