"""The implementations of one case. Each is made once for a case and then called with q, k and v, or gives the reason why it cannot run.

Whatever does not change between calls is made before timing starts: torch's boolean mask, FlexAttention's blocks, lowtri's plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lowtri.benching.cases import PLAIN, Case
from lowtri.dispatch.attend import attention
from lowtri.masks import mask as read_mask

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (B, H, N, D) each

OURS, SDPA, FLEX, FORMULA = "lowtri", "torch SDPA", "FlexAttention", "plain formula"
_MOST_PAIRS = 2**26  # of a boolean mask, which torch converts to floats


def ours(case: Case, engine: str = "cpu") -> Attend:
    """The CPU kernels, by name, so that no other engine is measured where they cannot run; or what ``auto`` chooses."""
    mask = read_mask(case.mask)
    return lambda q, k, v: attention(q, k, v, mask, engine=engine)


def sdpa(case: Case, most_pairs: int = _MOST_PAIRS) -> Attend | str:
    """torch's own: `is_causal=True` where the mask is causal, a boolean table, made here, for every other mask."""
    options: dict[str, Any] = {"enable_gqa": True} if case.heads != case.kv_heads else {}
    if needs_table(case):
        pairs = case.queries * case.n
        if pairs > most_pairs:
            return f"its table of bools would hold {pairs / 1e6:,.0f} million pairs"
        options["attn_mask"] = torch.from_numpy(read_mask(case.mask).dense(case.queries, case.n).copy())  # (Nq, Nk)
    elif case.mask_name == "causal" and case.work != "decode":  # the newest query sees the whole cache
        options["is_causal"] = True
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def needs_table(case: Case) -> bool:
    """Whether torch's function has no argument for the mask."""
    return case.mask_name not in PLAIN


def flex(case: Case) -> Attend | str:
    """torch's FlexAttention, compiled; that needs a C++ compiler."""
    if case.work == "training":
        return "it has no backward on CPU"
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    width = (
        read_mask(case.mask).pairs(1, case.n) if case.mask_name == "window" else 0
    )  # the last query sees a whole window
    first = case.n - case.queries  # the position of the first query
    sees: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, q, k: q + first >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < width),
        "documents": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
    }
    block = None
    if case.mask_name in sees:
        block = create_block_mask(sees[case.mask_name], None, None, case.queries, case.n, device="cpu")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block, enable_gqa=case.heads != case.kv_heads)


PEERS: dict[str, Callable[[Case], Attend | str]] = {
    OURS: ours,
    SDPA: sdpa,
    FLEX: flex,
    FORMULA: partial(ours, engine="formula"),
}
