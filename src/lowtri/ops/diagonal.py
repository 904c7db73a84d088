"""torch's ``CausalBias`` (``torch.nn.attention.bias``) as a mask. A CausalBias has a shape and an alignment, and no data.

It refers to queries and keys by index: under ``causal_upper_left`` query i sees keys 0 .. i, under ``causal_lower_right`` keys
0 .. i + Nk - Nq.
"""

from __future__ import annotations

from typing import Any

from lowtri.errors import CallError
from lowtri.masks.arrays import is_tensor
from lowtri.masks.formulas import causal, window
from lowtri.masks.mask import Mask

__all__ = ["ahead", "as_mask_by_order", "is_causal_bias"]


def is_causal_bias(x: Any) -> bool:
    """Whether x is a CausalBias as torch constructs it; results computed from one have neither alignment nor data."""
    return type(x).__name__ == "CausalBias" and is_tensor(x) and hasattr(x, "variant")


def ahead(name: str, bias: Any, nq: int, nk: int) -> int:
    """How far past its own index a query sees: 0, or Nk - Nq."""
    made_for = (bias.seq_len_q, bias.seq_len_kv)
    if made_for != (nq, nk):
        raise CallError(f"{name} is a CausalBias of {made_for}, but there are {nq} queries and {nk} keys.")
    return 0 if bias.variant.name == "UPPER_LEFT" else nk - nq


def as_mask_by_order(name: str, bias: Any, nq: int, nk: int) -> Mask:
    """The mask for keys at positions 0 .. Nk-1 and queries at the last Nq of them (from 0 on if Nq > Nk)."""
    back = max(nk - nq, 0) - ahead(name, bias, nq, nk)  # the query at position q sees k <= q - back
    return causal() - window(back) if back else causal()
