"""The implementations of one case. Each is made once for a case and then called with q, k and v, or gives the reason why it cannot run.

Whatever does not change between calls is made before timing starts: torch's boolean mask, FlexAttention's blocks, lowtri's plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lowtri.benching.cases import Case
from lowtri.dispatch.attend import attention
from lowtri.masks import mask as read_mask

__all__ = ["FLEX", "FORMULA", "OURS", "PEERS", "SDPA", "Attend"]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (B, H, N, D) each

OURS, SDPA, FLEX, FORMULA = "lowtri", "torch SDPA", "FlexAttention", "plain formula"
_MOST_PAIRS = 2**26  # of a boolean mask, which torch converts to floats


def ours(case: Case) -> Attend:
    """The CPU kernels, by name, so that no other engine is measured where they cannot run."""
    mask = read_mask(case.mask)
    return lambda q, k, v: attention(q, k, v, mask, engine="cpu")


def formula(case: Case) -> Attend:
    """Attention in torch by its textbook formula, tile by tile."""
    mask = read_mask(case.mask)
    return lambda q, k, v: attention(q, k, v, mask, engine="formula")


def sdpa(case: Case) -> Attend | str:
    """torch's own: `is_causal=True` where the mask is causal, a boolean table for every other mask."""
    grouped = case.heads != case.kv_heads
    if case.who == "full" or case.work == "decode":  # the newest query sees the whole cache
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    if case.who == "causal":
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if case.n**2 > _MOST_PAIRS:
        return f"its table of bools would hold {case.n**2 / 1e6:,.0f} million pairs"
    table = torch.from_numpy(read_mask(case.mask).dense(case.n).copy())  # (N, N)
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=table, enable_gqa=grouped)


def flex(case: Case) -> Attend | str:
    """torch's FlexAttention, compiled; that needs a C++ compiler."""
    if case.work == "training":
        return "it has no backward on CPU"
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    width = read_mask(case.mask).pairs(1, case.n) if case.who == "window" else 0  # the last query sees a whole window
    first = case.n - case.queries  # the position of the first query
    sees: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, q, k: q + first >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < width),
        "documents": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
    }
    block = None
    if case.who in sees:
        block = create_block_mask(sees[case.who], None, None, case.queries, case.n, device="cpu")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block, enable_gqa=case.heads != case.kv_heads)


PEERS: dict[str, Callable[[Case], Attend | str]] = {OURS: ours, SDPA: sdpa, FLEX: flex, FORMULA: formula}
