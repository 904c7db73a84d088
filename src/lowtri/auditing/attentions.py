"""Reads the mask of every attention that a run computes, from the arguments of torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["attention_tables"]


def attention_tables(run: Callable[[], Any]) -> list[Any]:
    """The pairs that each attention of a run shows, (1 or B, Nq, Nk), from torch's functions or from returned weights."""
    tables: list[Any] = []
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _Attentions(tables):
            answer = run()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    weights = getattr(answer, "attentions", None)
    return tables or [(w > 0).any(dim=1).cpu().numpy() for w in weights or () if w is not None]


class _Attentions(TorchFunctionMode):
    def __init__(self, tables: list[Any]) -> None:
        super().__init__()
        self.tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            q, k, mask = args[0], args[1], args[3] if len(args) > 3 else kwargs.get("attn_mask")
            self.add(
                q.shape[-2], k.shape[-2], mask, kwargs.get("is_causal", args[5] if len(args) > 5 else False), q.dim()
            )
        elif func is torch.nn.functional.multi_head_attention_forward:
            mask, n = kwargs.get("attn_mask"), args[0].shape[0]
            mask = None if mask is None else ~mask if mask.dtype == torch.bool else mask
            pads = kwargs.get("key_padding_mask")
            self.add(n, args[1].shape[0], mask if mask is None or mask.dim() == 2 else None, False, 4)
            if pads is not None:
                hidden = pads if pads.dtype == torch.bool else pads < -1e3
                self.tables[-1] = self.tables[-1] & ~hidden.cpu().numpy().reshape(-1, 1, pads.shape[-1])
        return func(*args, **kwargs)

    def add(self, nq: int, nk: int, mask: Any, is_causal: bool, dims: int) -> None:
        pairs = torch.ones(1, nq, nk, dtype=torch.bool)
        if is_causal:
            pairs = pairs.tril()
        if mask is not None:
            shown = mask if mask.dtype == torch.bool else mask > -1e3
            shown = shown.expand(*shown.shape[:-2], nq, nk).cpu()
            pairs = pairs & (shown.any(dim=1) if shown.dim() == 4 else shown if shown.dim() == 3 else shown[None])
        self.tables.append(pairs.numpy())
