"""The engine ``sdpa``: torch's own fused attention, told the mask by ``is_causal`` where that says exactly the same.

torch multiplies hidden pairs by a weight of 0, so a NaN that is hidden from *some* queries spreads to them; where it is hidden
from *everyone* (pads, cache tails) it is set to 0 before the call. Queries that see nothing give 0 here, whatever torch does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from lowtri.masks.atoms import causal
from lowtri.masks.mask import FULL
from lowtri.ops.call import Call, Result

__all__ = ["name", "run", "why_not"]

name = "sdpa"


def why_not(call: Call) -> str | None:
    """What torch's function has no argument for."""
    missing = {
        "the arrays are NumPy's": call.is_numpy,
        "it has no softcap": call.softcap is not None,
        "it has no sinks": call.sinks is not None,
        "it does not return weights": call.return_weights,
        "it does not return log-sum-exp": call.return_lse,
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def run(call: Call) -> Result:
    """Run torch's function; the mask is a table of bools unless it is exactly causal or full."""
    q, k, v = call.q, call.k, call.v
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout, "enable_gqa": call.group > 1}
    if call.bias is None and _is_torch_causal(call):
        return Result(scaled_dot_product_attention(q, k, v, is_causal=True, **options))
    if call.bias is None and _everybody_sees_everything(call):
        return Result(scaled_dot_product_attention(q, k, v, **options))
    visible, bias = call.visible(), call.bias  # visible (B|1, Hq|1, Nq, Nk)
    some = np.flatnonzero(visible.any(axis=(0, 1, 2)))
    if (
        0 < len(some) < len(visible[0, 0, 0])
    ):  # a new token under a window, the tail of a cache: only the keys in between
        between = slice(some[0], some[-1] + 1)
        k, v, visible = k[:, :, between], v[:, :, between], visible[..., between]
        bias = bias[..., between] if bias is not None and bias.shape[3] > 1 else bias
    if bias is None and visible.all():
        return Result(scaled_dot_product_attention(q, k, v, **options))
    sees = visible.any(axis=3, keepdims=True)  # (B|1, Hq|1, Nq, 1)
    seen = _by_kv_head(call, visible.any(axis=2))[..., None]  # (B|1, Hkv|1, Nk, 1)
    nothing = None if sees.all() else torch.from_numpy(~sees).to(q.device)
    # Hidden from everyone: set to 0, so that 0 * NaN never happens. A query that sees nothing looks at all, and is set to 0 after.
    if nothing is not None:
        q = q.masked_fill(nothing, 0)
    if not seen.all():
        unseen = torch.from_numpy(~seen).to(q.device)
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    table = torch.from_numpy(visible if nothing is None else visible | ~sees).to(q.device)
    if bias is not None:
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))  # torch takes float32 beside half types too
        table = torch.where(table, bias, -torch.inf)
        hidden = (table == -torch.inf).all(dim=3, keepdim=True)
        nothing = hidden if nothing is None else hidden | nothing
        table = table.masked_fill(nothing, 0)
    output = scaled_dot_product_attention(q, k, v, attn_mask=table, **options)
    return Result(output if nothing is None else output.masked_fill(nothing, 0))


def _is_torch_causal(call: Call) -> bool:
    """torch's is_causal means key index <= query index: ours, when both stand at the same places."""
    same = not call.positions_given and call.q.shape[2] == call.k.shape[2]
    return same and call.mask == causal()


def _everybody_sees_everything(call: Call) -> bool:
    """A new token that sees its whole cache, or no mask at all: one question instead of a table."""
    if call.positions_given or call.mask.batch:
        return False
    nq, nk = call.q.shape[2], call.k.shape[2]
    start = max(nk - nq, 0)
    return bool(call.mask.tile(start, start + nq, 0, nk) == FULL)


def _by_kv_head(call: Call, seen: Any) -> Any:
    """(B|1, Hq|1, Nk) -> (B|1, Hkv|1, Nk): whether any head of the group sees the key."""
    if seen.shape[1] == 1:
        return seen
    return np.any(seen.reshape(seen.shape[0], -1, call.group, seen.shape[2]), axis=2)
