"""The engine ``formula``: attention in torch as it is written on the board, query tile by query tile.

It takes every option, any device, and gradients to any order; memory grows with Nq x tile, since each tile is computed again
for its gradient. It is *the* plain formula of the precision contract: for half types it rounds inputs, weights and output.

What a mask hides leaves no trace, forward and backward: the products of :mod:`lowtri.engines.careful` make sure of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtri.engines.careful import Mix, Scores
from lowtri.engines.memory import transformed
from lowtri.ops.call import Call, Result

__all__ = ["name", "run", "why_not"]

name = "formula"

_AT_ONCE = 2**23  # scores in a tile of queries, over all heads: 32 MB in float32


def why_not(call: Call) -> str | None:
    """None: the formula runs everything."""
    return None


def run(call: Call) -> Result:
    """Run the formula over tiles of queries, each with the keys that it may see."""
    if call.is_numpy:
        return _run_numpy(call)
    rows, heads, nq, _ = call.q.shape
    nk = call.k.shape[2]
    size = max(64, _AT_ONCE // max(1, rows * heads * nk) // 64 * 64)
    tiles = [(start, min(start + size, nq)) for start in range(0, nq, size)]
    # A tile is computed again for its gradient, not kept; torch.func cannot do so.
    again = len(tiles) > 1 and call.needs_grad and transformed() is None
    parts = []
    # Last tile first: under a causal mask it has the most keys, and each later one fits into the memory that it gave back.
    for start, stop in reversed(tiles or [(0, 0)]):
        k0, k1 = call.key_range(start, stop) if len(tiles) > 1 and not call.return_weights else (0, nk)
        inputs: Any = (call, (start, stop, k0, k1), *_slices(call, start, stop, k0, k1))
        parts.append(checkpoint(_tile, *inputs, use_reentrant=False) if again else _tile(*inputs))
    outputs, weights, lses = zip(*parts[::-1], strict=True)
    return Result(torch.cat(outputs, 2), torch.cat(weights, 2) if call.return_weights else None, torch.cat(lses, 2))


def _slices(call: Call, start: int, stop: int, k0: int, k1: int) -> tuple[Tensor | None, ...]:
    bias = call.bias
    if bias is not None:
        bias = bias[:, :, start:stop] if bias.shape[2] > 1 else bias
        bias = bias[..., k0:k1] if bias.shape[3] > 1 else bias
    return call.q[:, :, start:stop], call.k[:, :, k0:k1], call.v[:, :, k0:k1], bias, call.sinks


def _tile(
    call: Call, where: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """One tile of queries, ``where`` in the call; the query heads of a group stand below one another as rows."""
    # Asked here and not outside, so that a tile that is computed again does not keep its table meanwhile.
    visible = torch.from_numpy(call.visible(*where)).to(q.device)  # (B|1, Hq|1, n, Nk)
    kind, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    kv_heads, group, n = k.shape[1], call.group, q.shape[2]

    def rows(x: Tensor) -> Tensor:  # (B, Hq, n, ...) -> (B, Hkv, group * n, ...)
        return x.unflatten(1, (kv_heads, group)).flatten(2, 3)

    def heads(x: Tensor) -> Tensor:  # (B, Hkv, group * n, ...) -> (B, Hq, n, ...)
        return x.unflatten(2, (group, n)).flatten(1, 2)

    shown = visible  # (B|1, Hkv|1, group * n, Nk)
    if group > 1:
        shown = visible.repeat(1, 1, group, 1) if visible.shape[1] == 1 else rows(visible)
    s = heads(Scores.apply(rows(q.to(wide)), k.to(wide), shown)) * call.scale  # (B, Hq, n, Nk)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if bias is not None:
        s = s + bias.to(wide)
    s = s.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(wide)[None, :, None, None].expand(*s.shape[:3], 1)], dim=3)
    # A query that sees nothing gets scores of 0 for the softmax, and weights of 0 after it: no NaN, no gradient.
    nothing = (s == -torch.inf).all(dim=3, keepdim=True)
    s = s.masked_fill(nothing, 0)
    if s.shape[3]:
        lse = torch.logsumexp(s, dim=3).masked_fill(nothing[..., 0], -torch.inf)
        weights = torch.softmax(s, dim=3)[..., : k.shape[2]].masked_fill(~visible | nothing, 0).to(kind)
    else:
        lse, weights = s.new_full(s.shape[:3], -torch.inf), s.to(kind)
    used = torch.nn.functional.dropout(weights, call.dropout) if call.dropout else weights
    if bias is not None:  # a row that bias hides whole sees nothing
        hidden = (s[..., : k.shape[2]] == -torch.inf).all(dim=3, keepdim=True) | nothing
        shown = rows((visible & ~hidden).expand(q.shape[0], kv_heads * group, -1, -1))
    output = heads(Mix.apply(rows(used.to(wide)), v.to(wide), shown)).to(kind)
    return output, weights if call.return_weights else None, lse


def _run_numpy(call: Call) -> Result:
    tensors: dict[str, Any] = {}
    for part in ("q", "k", "v", "bias", "sinks"):
        array = getattr(call, part)
        if array is not None and (not array.flags.writeable or min(array.strides, default=0) < 0):
            array = array.copy()  # torch warns of the one and refuses the other
        tensors[part] = None if array is None else torch.from_numpy(array)
    with torch.no_grad():
        found = run(replace(call, **tensors))
    return Result(*(None if x is None else x.numpy() for x in (found.output, found.weights, found.lse)))
