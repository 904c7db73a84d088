"""``flash_attn.layers.rotary``: rotary embedding by given tables, new or in place, and the module that makes its tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.arguments import check_tensor, edges_of, for_rows
from lowtri.nn.positions import rotary_frequencies

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
]


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
        x: (B, N, H, D); with ``cu_seqlens`` (total, H, D).
        cos, sin: (positions, R).
        interleaved: see :func:`~lowtri.integrations.flash_attn.layers_rotary.rotate`.
        inplace: whether to write the result into x and return x.
        seqlen_offsets: the position of the first token, for all rows or one for each, (B,).
        cu_seqlens: (B + 1,), where each packed sequence begins, and the end of the last one.
        max_seqlen: the longest sequence; not needed here.

    Raises:
        CallError: if the arguments do not fit together, or the tables are too short.
    """
    name = "apply_rotary_emb"
    for table, of in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, of, "(positions, R)")
    if cu_seqlens is None:
        check_tensor(name, "x", x, "(B, N, H, D)")
        offsets = for_rows(name, "seqlen_offsets", seqlen_offsets, len(x))
        positions = offsets[:, None] + torch.arange(x.shape[1])  # (B, N)
        rotated = rotate(x, cos, sin, positions, interleaved, name)
    else:
        check_tensor(name, "x", x, "(total, H, D)")
        edges = torch.from_numpy(edges_of(name, "cu_seqlens", cu_seqlens, len(x)))
        lengths = edges.diff()
        begins = edges[:-1] - for_rows(name, "seqlen_offsets", seqlen_offsets, len(lengths))
        positions = torch.arange(len(x)) - begins.repeat_interleave(lengths)
        rotated = rotate(x[None], cos, sin, positions[None], interleaved, name)[0]
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb  # its older name


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and keys of qkv in place; returns qkv.

    Args:
        qkv: (B, N, 3, H, D), or (B, N, Hq + 2 Hkv, D) with ``num_heads_q``.
        cos_k, sin_k: tables of the keys, if they differ.
    """
    if num_heads_q is None:
        check_tensor("apply_rotary_emb_qkv_", "qkv", qkv, "(B, N, 3, H, D)")
        q, k = qkv[:, :, 0], qkv[:, :, 1]  # not unbind: torch writes in place into a single view only
    else:
        check_tensor("apply_rotary_emb_qkv_", "qkv with num_heads_q", qkv, "(B, N, H, D)")
        kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if num_heads_q < 1 or kv_heads < 1 or rest:
            raise CallError(
                f"apply_rotary_emb_qkv_: num_heads_q is {num_heads_q}, of {qkv.shape[2]} heads in qkv.\n"
                "Fix: as many heads of keys as of values after those of the queries."
            )
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + kv_heads]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys of kv (B, N, 2, H, D) in place; returns kv."""
    check_tensor("apply_rotary_emb_kv_", "kv", kv, "(B, N, 2, H, D)")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables of its own, which grow with the longest sequence.

    Args:
        dim: the rotated entries of a head, an even number.
        base: the base of the frequencies.
        interleaved: see :func:`~lowtri.integrations.flash_attn.layers_rotary.rotate`.
        scale_base: of XPos, which scales queries up and keys down with their position; None for none.
        device: of the buffers.

    Source: RoFormer (Su et al. 2021); XPos (Sun et al. 2022).
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", rotary_frequencies(dim, self.base, device=device), persistent=False)
        entry = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (entry + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[Tensor, ...] = ()  # cos and sin of the queries, and of the keys

    def _update(self, n: int, like: Tensor) -> None:
        """Make the tables for n positions, unless they are there."""
        kept = self._tables[0] if self._tables else None
        if kept is not None and len(kept) >= n and (kept.device, kept.dtype) == (like.device, like.dtype):
            return
        place = torch.arange(n, device=like.device, dtype=torch.float32)
        angles = torch.outer(place, rotary_frequencies(self.dim, self.base, device=like.device))
        tables = [angles.cos(), angles.sin(), angles.cos(), angles.sin()]
        if self.scale is not None and self.scale_base is not None:
            scale = self.scale.to(like.device, torch.float32) ** ((place - n // 2) / self.scale_base)[:, None]
            tables = [x * scale for x in tables[:2]] + [x / scale for x in tables[:2]]
        self._tables = tuple(x.to(like.dtype) for x in tables)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place.

        Args:
            qkv: (B, N, 3, H, D), or (B, N, Hq + 2 Hkv, D) with ``num_heads_q``; with ``kv`` the queries, (B, N, H, D).
            kv: (B, N, 2, H, D).
            seqlen_offset: the position of the first token, for all rows or one for each, (B,).
            max_seqlen: how many positions the tables have; needed if ``seqlen_offset`` is a tensor.

        Returns:
            qkv; or the queries and kv.
        """
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update(max_seqlen, qkv)
        elif not self._tables:
            raise CallError(
                "RotaryEmbedding: seqlen_offset is a tensor. Fix: max_seqlen=, the positions of the tables."
            )
        cos, sin, cos_k, sin_k = self._tables
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)


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
