"""What the tests of attention share: the engines and dtypes under test, inputs, and attention worked out pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import lowtri
from lowtri.backends import BACKENDS

ENGINES = tuple(name for name in BACKENDS if name != "flex")  # which runs on a GPU only
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Torch's own, called by name, cannot keep what is hidden from some apart.
TRACELESS = tuple(name for name in ENGINES if name != "sdpa")

EPS = {name: torch.finfo(getattr(torch, name)).eps for name in DTYPES}


def draw(
    *,
    b: int = 2,
    hq: int = 4,
    hkv: int = 2,
    nq: int = 9,
    nk: int = 9,
    d: int = 8,
    dv: int = 5,
    seed: int = 0,
    dtype: str = "float32",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv) of normal numbers."""
    source = torch.Generator().manual_seed(seed)
    shapes = ((b, hq, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv))
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64).to(getattr(torch, dtype)) for shape in shapes)
    return q, k, v


def able(q: Any, k: Any, v: Any, mask: Any, *, among: tuple[str, ...] = ENGINES, **options: Any) -> list[str]:
    """The engines that run this call by their own word; never none, and never without the definition or the formula."""
    answers = lowtri.which_engine(q, k, v, mask, **options).answers
    found = [name for name in among if not answers[name].startswith("no: ")]
    assert {"formula", "reference"} & set(found), answers
    return found


def is_contract_precise(output: Any, q: Any, k: Any, v: Any, mask: Any) -> bool:
    """At most twice the plain formula's own greatest error in this dtype, and two units of the greatest value."""
    exact = wide(lowtri.attention(wide(q), wide(k), wide(v), mask, engine="reference"))
    off, plain = (np.abs(wide(x) - exact).max() for x in (output, lowtri.attention(q, k, v, mask, engine="formula")))
    return bool(off <= 2 * plain + 2 * EPS[str(q.dtype).removeprefix("torch.")] * np.abs(wide(v)).max())


def with_gradients(
    engine: str, inputs: tuple[torch.Tensor, ...], mask: Any, d_out: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the gradient of (output * d_out).sum() by each of q, k, v (and bias, sinks where they are given)."""
    named = {name: options.pop(name).detach().requires_grad_() for name in ("bias", "sinks") if name in options}
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = lowtri.attention(*leaves, mask, engine=engine, **named, **options)
    d_out = torch.ones_like(out) if d_out is None else d_out.to(out.dtype)
    return out.detach(), list(torch.autograd.grad(out, [*leaves, *named.values()], d_out))


def pair_by_pair(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    sinks: Any = None,
    q_positions: Any = None,
    k_positions: Any = None,
) -> tuple[Any, Any, Any]:
    """Output, weights and log-sum-exp in float64, in plain loops that ask the mask about one pair at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, heads, nq = q.shape[:3]
    kv_heads, nk, dv = v.shape[1:]
    mask = lowtri.mask(mask)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    where_q = np.broadcast_to(np.arange(nk - nq, nk) if q_positions is None else q_positions, (rows, nq))
    where_k = np.broadcast_to(np.arange(nk) if k_positions is None else k_positions, (rows, nk))
    added = (
        np.zeros((rows, heads, nq, nk))
        if bias is None
        else np.broadcast_to(np.asarray(bias, np.float64), (rows, heads, nq, nk))
    )
    out = np.zeros((rows, heads, nq, dv))
    weights = np.zeros((rows, heads, nq, nk))
    lse = np.full((rows, heads, nq), -np.inf)
    for b, h, i in np.ndindex(rows, heads, nq):
        one = mask.for_row(b, h)
        of = h // (heads // kv_heads)
        scores = {}
        for j in range(nk):
            if one(int(where_q[b, i]), int(where_k[b, j])):
                score = float(q[b, h, i] @ k[b, of, j]) * scale
                score = score if softcap is None else softcap * math.tanh(score / softcap)
                scores[j] = score + added[b, h, i, j]
        everything = [*scores.values(), *([] if sinks is None else [float(sinks[h])])]
        greatest = max(everything, default=-math.inf)
        if greatest == -math.inf:
            continue
        total = sum(math.exp(score - greatest) for score in everything)
        lse[b, h, i] = greatest + math.log(total)
        for j, score in scores.items():
            weights[b, h, i, j] = math.exp(score - greatest) / total
            out[b, h, i] += weights[b, h, i, j] * v[b, of, j]
    return out, weights, lse


def wide(x: Any) -> Any:
    """A tensor or array as NumPy float64."""
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


def near(found: Any, exact: Any, dtype: str, *, times: float = 64) -> bool:
    """Equal to rounding: ``times`` the dtype's epsilon of the greatest number there (and of 1); 2 or 4 for half types.

    ``times`` is the number of terms of the longest sum: at most 64 features or keys unless a test says more. Half types
    round inputs, weights and outputs; their sums are float32's.
    """
    if dtype in ("bfloat16", "float16"):
        times = 2 if times == 64 else 4
    found = wide(found)
    exact = wide(exact)
    finite = np.abs(exact[np.isfinite(exact)])
    room = times * EPS[dtype] * max(1.0, float(finite.max(initial=0)))
    return bool(np.allclose(found, exact, rtol=0, atol=room, equal_nan=True))


def on_threads(counts: tuple[int, ...], compute: Callable[[], Any]) -> list[Any]:
    """What ``compute`` gives with each number of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    return results
