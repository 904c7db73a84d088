"""torch's fused attention: what its function gets besides the arrays, laid out before they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.ops.call import Call, Inputs, Result, seen_keys

__all__ = ["Direct", "WithTable"]

# torch's own function by a name that nobody replaces: torch.nn.functional's may be lowtri's by now.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention


class Direct:
    """``is_causal``, or no mask at all."""

    nbytes = 256

    def __init__(self, call: Call, is_causal: bool) -> None:
        self.may_spread = is_causal
        self.options = {**_options(call), "is_causal": is_causal}

    def run(self, inputs: Inputs) -> Result:
        q, k, v, _, _ = inputs
        return Result(scaled_dot_product_attention(q, k, v, **self.options))


class WithTable:
    """A table of bools, or of the bias with -inf where hidden, cut to the keys that anybody sees."""

    may_spread = True

    def __init__(self, call: Call) -> None:
        self.options = _options(call)
        visible = call.visible()  # (B|1, Hq|1, Nq, Nk)
        self.keys = seen_keys(visible)
        visible = visible if self.keys is None else visible[..., self.keys]
        sees = visible.any(axis=3, keepdims=True)  # (B|1, Hq|1, Nq, 1)
        seen = _by_kv_head(visible.any(axis=2), call.group)[..., None]  # (B|1, Hkv|1, keys, 1)
        # A query that sees nothing sees all for torch, and gives 0 after it; a key that nobody sees is set to 0 before.
        self.blind = None if sees.all() else _tensor(np.logical_not(sees), call)
        self.unseen = None if seen.all() else _tensor(np.logical_not(seen), call)
        self.table = None if visible.all() else _tensor(np.logical_or(visible, np.logical_not(sees)), call)
        kept = (self.blind, self.unseen, self.table)
        self.nbytes = 256 + sum(0 if x is None else x.nbytes for x in kept)

    def run(self, inputs: Inputs) -> Result:
        q, k, v, bias, _ = inputs
        if self.keys is not None:  # a new token under a window, the tail of a cache
            k, v = k[:, :, self.keys], v[:, :, self.keys]
            bias = bias[..., self.keys] if bias is not None and bias.shape[3] > 1 else bias
        blind = self.blind
        if blind is not None:
            q = q.masked_fill(blind, 0)
        if self.unseen is not None:
            k, v = k.masked_fill(self.unseen, 0), v.masked_fill(self.unseen, 0)
        table = self.table
        if bias is not None:
            bias = bias.to(torch.promote_types(q.dtype, torch.float32))  # torch takes a float32 mask for half types too
            table = bias if table is None else torch.where(table, bias, -torch.inf)
            hidden = (table == -torch.inf).all(dim=3, keepdim=True)
            blind = hidden if blind is None else hidden | blind
            table = table.masked_fill(blind, 0)
        output = scaled_dot_product_attention(q, k, v, attn_mask=table, **self.options)
        return Result(output if blind is None else output.masked_fill(blind, 0))


def _options(call: Call) -> dict[str, Any]:
    return {"scale": call.scale, "dropout_p": call.dropout, "enable_gqa": call.group > 1}


def _tensor(table: Any, call: Call) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(call.device)


def _by_kv_head(seen: Any, group: int) -> Any:
    """(B|1, Hq|1, Nk) -> (B|1, Hkv|1, Nk): whether any head of the group sees the key."""
    if seen.shape[1] == 1:
        return seen
    return seen.reshape(seen.shape[0], -1, group, seen.shape[2]).any(axis=2)
