"""The weights themselves, where a call asks for them: the softmax of visible scores, exactly 0 elsewhere.

No kernel writes them down. Here they are computed again, tile by tile of queries, each with the keys that it may see. The
kernel's log-sum-exp would save a sum, but it comes of scores with another rounding: large scores make that visible.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.engines.careful import Scores
from lowtri.ops.call import Call

__all__ = ["weights_of"]

_AT_ONCE = 2**21  # scores in a tile of queries, over all heads: 8 MB in float32


def weights_of(call: Call) -> Any:
    """The weights (B, Hq, Nq, Nk) in the dtype of q; differentiable by q, k, bias and sinks."""
    if call.is_numpy:
        tensors = {name: _tensor(getattr(call, name)) for name in ("q", "k", "bias", "sinks")}
        found: Tensor = weights_of(replace(call, **tensors))
        return found.numpy()
    rows, heads, nq, _ = call.q.shape
    nk = call.k.shape[2]
    out = call.q.new_zeros((rows, heads, nq, nk))
    size = max(64, _AT_ONCE // (rows * heads * nk) // 64 * 64)
    for start in range(0, nq, size):
        stop = min(start + size, nq)
        k0, k1 = call.key_range(start, stop)
        if k0 < k1:
            out[:, :, start:stop, k0:k1] = _tile(call, start, stop, k0, k1)
    return out


def _tile(call: Call, start: int, stop: int, k0: int, k1: int) -> Tensor:
    """The weights of the queries start .. stop and the keys k0 .. k1; the query heads of a group stand below one another as rows."""
    visible = torch.from_numpy(call.visible(start, stop, k0, k1))  # (B|1, Hq|1, n, Nk)
    kind, n, group = call.q.dtype, stop - start, (call.k.shape[1], call.group)
    wide = torch.promote_types(kind, torch.float32)
    q = call.q[:, :, start:stop].to(wide).unflatten(1, group).flatten(2, 3)  # (B, Hkv, group * n, D)
    shown = visible.repeat(1, 1, call.group, 1)  # (B|1, Hkv|1, group * n, Nk)
    if visible.shape[1] > 1:
        shown = visible.unflatten(1, group).flatten(2, 3)
    s = Scores.apply(q, call.k[:, :, k0:k1].to(wide), shown).unflatten(2, (call.group, n)).flatten(1, 2) * call.scale
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        bias = call.bias[:, :, start:stop] if call.bias.shape[2] > 1 else call.bias
        s = s + (bias[..., k0:k1] if bias.shape[3] > 1 else bias).to(wide)
    s = s.masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        s = torch.cat([s, call.sinks.to(wide)[None, :, None, None].expand(*s.shape[:3], 1)], dim=3)
    nothing = (s == -torch.inf).all(dim=3, keepdim=True)  # such a query has weights 0, and never NaN
    s = s.masked_fill(nothing, 0)
    return torch.softmax(s, dim=3)[..., : k1 - k0].masked_fill(~visible | nothing, 0).to(kind)


def _tensor(array: Any) -> Any:
    """A copy: torch takes neither read-only arrays nor steps backwards."""
    return None if array is None else torch.from_numpy(np.array(array))
