"""The engine ``sdpa``: torch's own fused attention, told the mask by ``is_causal`` where that says exactly the same.

torch multiplies hidden pairs by a weight of 0, so a NaN that is hidden from *some* queries spreads to them; where it is hidden
from *everyone* (pads, cache tails) it is set to 0 before the call. Queries that see nothing give 0 here, whatever torch does.
In half types torch may swallow an infinity that a query does see.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lowtri.engines.plans import all_seen, asked, between
from lowtri.masks.atoms import causal
from lowtri.ops.call import Call, Result

__all__ = ["name", "run", "why_not"]

name = "sdpa"

# torch's own function by the name that nobody replaces: torch.nn.functional's may be lowtri's by now.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention


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
    if call.bias is None and not call.positions_given and all_seen(call):
        return Result(scaled_dot_product_attention(q, k, v, **options))
    seen, bias = _seen(call), call.bias
    if seen.between is not None:  # a new token under a window, the tail of a cache
        k, v = k[:, :, seen.between], v[:, :, seen.between]
        bias = bias[..., seen.between] if bias is not None and bias.shape[3] > 1 else bias
    if bias is None and seen.all:
        return Result(scaled_dot_product_attention(q, k, v, **options))
    # Hidden from everyone: set to 0, so that 0 * NaN never happens. A query that sees nothing looks at all, and is set to 0 after.
    nothing = None if seen.nothing is None else torch.from_numpy(seen.nothing).to(q.device)
    if nothing is not None:
        q = q.masked_fill(nothing, 0)
    if seen.unseen is not None:
        unseen = torch.from_numpy(seen.unseen).to(q.device)
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    table = torch.from_numpy(seen.table).to(q.device)
    if bias is not None:
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))  # torch takes float32 beside half types too
        table = torch.where(table, bias, -torch.inf)
        hidden = (table == -torch.inf).all(dim=3, keepdim=True)
        nothing = hidden if nothing is None else hidden | nothing
        table = table.masked_fill(nothing, 0)
    output = scaled_dot_product_attention(q, k, v, attn_mask=table, **options)
    return Result(output if nothing is None else output.masked_fill(nothing, 0))


class _Seen(NamedTuple):
    """What the call's mask says, as torch's function is told it."""

    table: NDArray[np.bool_]  # (B|1, Hq|1, Nq, keys); a query that sees nothing sees all
    nothing: NDArray[np.bool_] | None  # (B|1, Hq|1, Nq, 1), the queries that see nothing
    unseen: NDArray[np.bool_] | None  # (B|1, Hkv|1, keys, 1), the keys that nobody sees
    between: slice | None  # the keys of the table, where it leaves some out at the ends
    all: bool  # whether everybody sees everything between


_newest: OrderedDict[Any, _Seen] = OrderedDict()  # the layers of a model ask for the same one
_KEPT = 2  # of at most 16 MB each
_lock = Lock()


def _seen(call: Call) -> _Seen:
    """What the mask says, from the newest where the same mask and positions came before."""
    key = (asked(call), call.group)
    with _lock:
        if key in _newest:
            _newest.move_to_end(key)
            return _newest[key]
    found = _look(call)
    if found.table.nbytes <= 2**24:
        with _lock:
            _newest[key] = found
            while len(_newest) > _KEPT:
                _newest.popitem(last=False)
    return found


def _look(call: Call) -> _Seen:
    visible = call.visible()  # (B|1, Hq|1, Nq, Nk)
    here = between(visible)
    if here is not None:
        visible = visible[..., here]
    sees = visible.any(axis=3, keepdims=True)  # (B|1, Hq|1, Nq, 1)
    seen = _by_kv_head(call, visible.any(axis=2))[..., None]  # (B|1, Hkv|1, keys, 1)
    everything = bool(visible.all())
    nothing = None if sees.all() else np.logical_not(sees)
    unseen = None if seen.all() else np.logical_not(seen)
    return _Seen(visible if nothing is None else np.logical_or(visible, nothing), nothing, unseen, here, everything)


def _is_torch_causal(call: Call) -> bool:
    """torch's is_causal means key index <= query index: ours, when both stand at the same places."""
    same = not call.positions_given and call.q.shape[2] == call.k.shape[2]
    return same and call.mask == causal()


def _by_kv_head(call: Call, seen: Any) -> Any:
    """(B|1, Hq|1, Nk) -> (B|1, Hkv|1, Nk): whether any head of the group sees the key."""
    if seen.shape[1] == 1:
        return seen
    return np.any(seen.reshape(seen.shape[0], -1, call.group, seen.shape[2]), axis=2)
