"""Rotary embedding by given tables, of the first entries of each head, in flash-attn's two orders."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtri.errors import CallError

__all__ = ["rotate"]


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, name: str = "flash_attn_with_kvcache"
) -> Tensor:
    """x (B, N, H, D) rotated in its first 2 R entries by the rows of cos and sin (positions, R) at ``positions`` (B, N).

    Args:
        interleaved: entries 0 and 1, 2 and 3, ... form pairs (GPT-J); otherwise 0 and R, 1 and R + 1, ... (GPT-NeoX).
        name: of the function that is called, for errors.
    """
    half = cos.shape[-1]
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * half > x.shape[3]:
        raise CallError(
            f"{name}: rotary tables cos {tuple(cos.shape)} and sin {tuple(sin.shape)} "
            f"for heads of {x.shape[3]}. Fix: (positions, R) both, 2 R at most the head size."
        )
    if positions.numel() and int(positions.max()) >= cos.shape[0]:
        raise CallError(
            f"{name}: the rotary tables have {cos.shape[0]} positions, but one is {int(positions.max())}. "
            "Fix: longer tables."
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[positions.to(table.device)][:, :, None].to(wide) for table in (cos, sin))  # (B, N, 1, R)
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    pair = first * c - second * s, first * s + second * c
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)
