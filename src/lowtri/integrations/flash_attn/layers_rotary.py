"""``flash_attn.layers.rotary``: rotary embedding by given tables, new or in place, and a module that makes its tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.arguments import PACKED, ROWS, check_tensor, edges_of, for_rows
from lowtri.nn.positions import rotary_frequencies

__all__ = ["RotaryEmbedding", "apply_rotary_emb"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x rotated in the first 2 R entries of each head, with gradients.

    >>> angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
    >>> x = torch.ones(2, 3, 1, 4)
    >>> apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([0, 2]))[0, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]

    Args:
        x: (B, N, H, D); with ``cu_seqlens`` (total, H, D).  cos, sin: (positions, R).
        interleaved: whether entries 0 and 1, 2 and 3, ... are pairs (GPT-J), not 0 and R, 1 and R + 1, ... (GPT-NeoX).
        inplace: whether to write the result into x and return x.
        seqlen_offsets: the position of the first token, for all rows or one for each, (B,).
        cu_seqlens: (B + 1,), where each packed sequence begins, and the end of the last one; max_seqlen is not needed.

    Raises:
        CallError: if the arguments do not fit together, or the tables are too short.
    """
    name = "apply_rotary_emb"
    check_tensor(name, "cos", cos, "(positions, R)")
    check_tensor(name, "sin", sin, "(positions, R)")
    check_tensor(name, "x", x, ROWS if cu_seqlens is None else PACKED)
    if cu_seqlens is None:
        offsets = for_rows(name, "seqlen_offsets", seqlen_offsets, len(x))
        positions = torch.tensor(offsets, dtype=torch.int64)[:, None] + torch.arange(x.shape[1])
    else:
        edges = edges_of(name, "cu_seqlens", cu_seqlens, len(x))
        offsets = for_rows(name, "seqlen_offsets", seqlen_offsets, len(edges) - 1)
        rows = zip(offsets, pairwise(edges), strict=True)
        positions = torch.cat([torch.arange(offset, offset + end - start) for offset, (start, end) in rows])
    rotated = rotate(x, cos, sin, positions, interleaved, name)
    return x.copy_(rotated) if inplace else rotated


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of ``dim`` entries of a head, with tables of its own. Source: RoFormer (Su et al. 2021)."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise CallError(
                "RotaryEmbedding: scale_base (XPos) is not computed here. "
                "Fix: the package flash_attn on a GPU; scale_base=None is plain rotary."
            )
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate queries and keys in place, or in a copy of a leaf that gets gradients; returns qkv, or the queries and kv.

        Args:
            qkv: (B, N, 3, H, D), or (B, N, Hq + 2 Hkv, D) with ``num_heads_q``; with ``kv`` the queries, (B, N, H, D).
            kv: (B, N, 2, H, D).
            seqlen_offset: the position of the first token, for all rows or one for each, (B,); max_seqlen is not needed.
        """
        offsets = for_rows("RotaryEmbedding", "seqlen_offset", seqlen_offset, len(qkv))
        positions = torch.arange(qkv.shape[1] + max(offsets) if offsets else 0, device=qkv.device)
        angles = torch.outer(positions.float(), rotary_frequencies(self.dim, self.base, device=qkv.device))
        cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
        # A leaf that gets gradients may not be written in place.
        tensors: list[Any] = [x.clone() if x is not None and x.requires_grad and x.is_leaf else x for x in (qkv, kv)]
        qkv, kv = tensors
        if kv is not None:
            parts = [qkv, kv[:, :, 0]]
        elif num_heads_q is not None:
            parts = [qkv[:, :, : (num_heads_q + qkv.shape[2]) // 2]]  # queries and keys
        else:
            parts = [qkv[:, :, 0], qkv[:, :, 1]]  # not unbind: torch writes in place into a single view only
        for part in parts:
            apply_rotary_emb(part, cos, sin, self.interleaved, True, seqlen_offset)
        return qkv if kv is None else (qkv, kv)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, name: str) -> Tensor:
    """x (..., H, D) rotated by the rows of cos and sin (positions, R) at ``positions`` (...); ``name`` is for errors."""
    half, size = cos.shape[-1], x.shape[-1]
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * half > size:
        tables = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} for heads of {size}"
        raise CallError(f"{name}: rotary tables {tables}. Fix: (positions, R) both, 2 R at most the head size.")
    if (last := int(positions.max()) if positions.numel() else -1) >= len(cos):
        raise CallError(f"{name}: the rotary tables have {len(cos)} positions, but one is {last}. Fix: longer tables.")
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions.to(table.device)][..., None, :].to(wide) for table in (cos, sin))  # (..., 1, R)
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    pair = first * c - second * s, first * s + second * c
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)
