"""``flash_attn_varlen_func`` and its packed forms: sequences of different lengths, one after the other, without padding.

All sequences are one packed row, and the mask keeps them apart as documents. A document is as long as the longer of a sequence's
queries and keys, which both stand at its end: this is flash-attn's alignment to the bottom right corner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.arguments import check_shapes, check_slopes, check_tensor, whole_numbers
from lowtri.integrations.flash_attn.real import real_function
from lowtri.integrations.flash_attn.settings import Positions, Settings, seen
from lowtri.masks import Mask, documents

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]

_NAME = "flash_attn_varlen_func"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences. Arguments that are not listed are those of
    :func:`~lowtri.integrations.flash_attn.flash_attn_func`.

    >>> import torch
    >>> from lowtri.integrations.flash_attn import flash_attn_varlen_func
    >>> x, edges = torch.randn(5, 2, 8), torch.tensor([0, 3, 5])  # sequences of 3 and 2 tokens
    >>> flash_attn_varlen_func(x, x, x, edges, edges, 3, 3, causal=True).shape
    torch.Size([5, 2, 8])

    Args:
        q: (total_q, Hq, D).  k, v: (total_k, Hkv, D); with ``block_table`` pages (pages, page size, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), where each sequence begins, from 0, and the end of the last one. Queries past this end
            give 0.
        max_seqlen_q, max_seqlen_k: the longest sequence; not needed here.
        alibi_slopes: (Hq,), or (B, Hq).
        block_table: (B, pages of a sequence), the pages of each sequence's keys in their order; entries past its last page are ignored.

    Returns:
        (total_q, Hq, D); with ``return_attn_probs`` also the log-sum-exp (Hq, total_q), and the weights, which are empty without
        dropout, else (Hq, total_q, total_k) before dropout.

    Raises:
        CallError: if the arguments do not fit together.
    """
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if (real := real_function(_NAME, q)) is not None:
        edges: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return real(q, k, v, *edges, *options, deterministic, return_attn_probs, block_table)
    settings = Settings(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _outside(settings, (q, k, v), (cu_seqlens_q, cu_seqlens_k), block_table)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of qkv (total, 3, H, D)."""
    check_tensor("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(total, 3, H, D)")
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of q (total_q, Hq, D) and kv (total_k, 2, Hkv, D)."""
    check_tensor("flash_attn_varlen_kvpacked_func", "kv", kv, "(total, 2, H, D)")
    edges: tuple[Any, ...] = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *edges, *options)


def _attend(settings: Settings, tensors: tuple[Tensor, ...], cu_seqlens: tuple[Any, ...], block_table: Any) -> Any:
    of_q, of_k = (_edges(f"cu_seqlens_{x}", edges) for x, edges in zip("qk", cu_seqlens, strict=True))
    if len(of_q) != len(of_k):
        raise CallError(
            f"{_NAME}: cu_seqlens_q has {len(of_q)} edges and cu_seqlens_k {len(of_k)}. Fix: B + 1 in both."
        )
    q, k, v = tensors
    if block_table is not None:
        k, v = (_from_pages(x, of_k, block_table) for x in (k, v))
    for argument, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(_NAME, argument, x, "(total, H, D)")
    check_shapes(_NAME, q, k, v)
    check_slopes(_NAME, settings.alibi_slopes, len(of_q) - 1, q.shape[1])
    for argument, edges, x in (("cu_seqlens_q", of_q, q), ("cu_seqlens_k", of_k, k)):
        if edges[-1] > len(x):
            raise CallError(
                f"{_NAME}: {argument} ends at {edges[-1]}, but there are {len(x)} tokens. Fix: an end of at most {len(x)}."
            )
    own = settings.mask(_NAME)
    if settings.alibi_slopes is not None and settings.alibi_slopes.ndim == 2:
        return _row_by_row(settings, (q, k, v), (of_q, of_k))
    apart, at = _documents(of_q, of_k, len(q), len(k))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, H, total, D)
    output, lse, weights = settings.run(q, k, v, own if apart is None else own & apart, at)
    output = output[0].transpose(0, 1).contiguous()
    if not settings.return_attn_probs:
        return output
    return output, seen(lse)[0], weights[0] if weights.numel() else weights


_outside: Callable[..., Any] = torch.compiler.disable(
    _attend
)  # masks and positions are made of the numbers in cu_seqlens


def _edges(argument: str, edges: Any) -> NDArray[np.int64]:
    array: NDArray[np.int64] = whole_numbers(_NAME, argument, edges, ("B + 1",), None).numpy()
    if len(array) < 2 or array[0] != 0 or np.any(np.diff(array) < 0):
        raise CallError(
            f"{_NAME}: {argument} is {array.tolist()!r:.60}. Fix: (B + 1,) whole numbers, ascending from 0."
        )
    return array


def _documents(
    of_q: NDArray[np.int64], of_k: NDArray[np.int64], total_q: int, total_k: int
) -> tuple[Mask | None, Positions]:
    """The mask that keeps sequences apart, None for a single one, and the positions of queries and keys."""
    lengths = np.maximum(np.diff(of_q), np.diff(of_k))
    ends = np.cumsum(lengths)
    real = lengths[lengths > 0].tolist()
    mask = documents(lengths=real) if len(real) > 1 else None
    if np.array_equal(of_q, of_k) and total_q == total_k == of_q[-1]:
        return mask, Positions()
    return mask, Positions(_positions(of_q, ends, total_q), _positions(of_k, ends, total_k))


def _positions(edges: NDArray[np.int64], ends: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Each sequence stands at the end of its document; tokens past the last edge have no position."""
    positions = np.full(total, -1, np.int64)
    positions[: edges[-1]] = np.arange(edges[-1]) + np.repeat(ends - edges[1:], np.diff(edges))
    return positions


def _from_pages(pages: Tensor, edges: NDArray[np.int64], block_table: Any) -> Tensor:
    """The keys of all sequences, packed, from their pages."""
    check_tensor(_NAME, "k and v with block_table", pages, "(pages, page size, H, D)")
    lengths, size = np.diff(edges), pages.shape[1]
    table = whole_numbers(_NAME, "block_table", block_table, (len(lengths), "pages"), None)
    if lengths.max(initial=0) > table.shape[1] * size:
        raise CallError(
            f"{_NAME}: block_table is {tuple(table.shape)} with pages of {size}, but there are {len(lengths)} sequences "
            f"of up to {lengths.max(initial=0)} keys. Fix: one row per sequence, with all of its pages."
        )
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)
    page = table[
        torch.from_numpy(row), torch.from_numpy(place // size)
    ]  # entries past a sequence's last page are not read
    page = whole_numbers(_NAME, "block_table", page, ("pages",), len(pages)).to(pages.device)
    return pages[page, torch.from_numpy(place % size).to(pages.device)]


def _row_by_row(settings: Settings, tensors: tuple[Tensor, ...], edges: tuple[NDArray[np.int64], ...]) -> Any:
    """Slopes that differ between sequences: one call for each."""
    from lowtri.integrations.flash_attn.dense import flash_attn_func

    (q, k, v), (of_q, of_k), s = tensors, edges, settings
    assert s.alibi_slopes is not None
    outputs, lses = [], []
    dropped = s.return_attn_probs and s.dropout_p > 0
    weights = q.new_zeros(q.shape[1], len(q), len(k)) if dropped else q.new_empty(0)
    for b, slopes in enumerate(s.alibi_slopes):
        own_q, own_k = slice(of_q[b], of_q[b + 1]), slice(of_k[b], of_k[b + 1])
        output, lse, own = flash_attn_func(
            q[own_q][None],
            k[own_k][None],
            v[own_k][None],
            s.dropout_p,
            s.softmax_scale,
            s.causal,
            s.window_size,
            s.softcap,
            slopes,
            return_attn_probs=True,
        )
        outputs.append(output[0])
        lses.append(lse[0])
        if dropped:
            weights[:, own_q, own_k] = own[0].detach()
    rest = len(q) - int(of_q[-1])
    whole = torch.cat([*outputs, q.new_zeros(rest, *q.shape[1:2], v.shape[2])])
    lse = torch.nn.functional.pad(torch.cat(lses, 1), (0, rest), value=torch.inf)
    return (whole, lse, weights) if s.return_attn_probs else whole
