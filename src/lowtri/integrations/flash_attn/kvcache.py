"""``flash_attn_with_kvcache``: attention of new tokens over a cache of fixed size, into which their keys and values are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.real import real_function
from lowtri.integrations.flash_attn.rotary import rotate
from lowtri.integrations.flash_attn.settings import Positions, Settings, check_tensor, seen

__all__ = ["flash_attn_with_kvcache"]

_NAME = "flash_attn_with_kvcache"


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, which is updated in place. No gradients.

    >>> import torch
    >>> from lowtri.integrations.flash_attn import flash_attn_with_kvcache
    >>> cache = torch.zeros(2, 2, 16, 4, 8)  # keys and values: (B, slots, H, D)
    >>> q, k, v = torch.randn(3, 2, 1, 4, 8)  # one new token of each row, after 5 and 7 in the cache
    >>> flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=torch.tensor([5, 7]), causal=True).shape
    torch.Size([2, 1, 4, 8])
    >>> torch.equal(cache[0][0, 5], k[0, 0])
    True

    Args:
        q: (B, Nq, Hq, D).
        k_cache, v_cache: (Bc, slots, Hkv, D); with ``block_table`` pages (pages, page size, Hkv, D).
        k, v: (B, N, Hkv, D), keys and values that are first written to the cache after ``cache_seqlens``.
        rotary_cos, rotary_sin: (positions, R): k is rotated at its place in the cache; q likewise if ``causal`` or with a window,
            else all of q at ``cache_seqlens``.
        cache_seqlens: how many keys of each row are in the cache, an int or (B,); default all slots.
        cache_batch_idx: (B,), the row of the cache of each row of q; default 0 .. B-1.
        cache_leftpad: (B,), the slot in which each row begins; default 0.
        block_table: (B, pages of a row), the pages of each row in their order.
        rotary_interleaved: see :func:`~lowtri.integrations.flash_attn.rotary.rotate`.
        num_splits: accepted; lowtri chooses how it splits the work.
        return_softmax_lse: also return the log-sum-exp, (B, Hq, Nq).
        The others: those of :func:`~lowtri.integrations.flash_attn.flash_attn_func`; the last query stands at the last key.

    Returns:
        (B, Nq, Hq, D), or a tuple with the log-sum-exp.

    Raises:
        CallError: if the arguments do not fit together, or new tokens do not fit into the cache, which is then unchanged.
    """
    if (real := real_function(_NAME, q)) is not None:
        cached = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
        rest = (softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits)
        return real(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, *cached, *rest, return_softmax_lse)
    settings = Settings(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse)
    mask = settings.mask(_NAME)
    slots = _Slots(q, k_cache, v_cache, block_table, cache_batch_idx)
    lengths = slots.rows("cache_seqlens", slots.count if cache_seqlens is None else cache_seqlens)  # (B,)
    starts = slots.rows("cache_leftpad", 0 if cache_leftpad is None else cache_leftpad)
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise CallError(f"{_NAME}: k came without v or cache_seqlens, or v without k. Fix: all three, or none.")
    new = 0
    if k is not None:
        check_tensor(_NAME, "k", k, "(B, N, H, D)")
        new = k.shape[1]
        for argument, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
            expected = (q.shape[0], new, *cache.shape[2:])
            if x is not None and tuple(x.shape) != expected:
                raise CallError(f"{_NAME}: {argument} is {tuple(x.shape)}. Fix: {expected}, as q and the cache.")
    if int(lengths.max()) + new > slots.count or int(lengths.min()) < 0:
        raise CallError(
            f"{_NAME}: cache_seqlens is {lengths.tolist()!r:.60} and {new} tokens are new, but a row has {slots.count} slots.\n"
            "Fix: a larger cache."
        )
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            raise CallError(
                f"{_NAME}: rotary tables need each other and new keys. Fix: rotary_cos=, rotary_sin= and k=."
            )
        own = causal or tuple(window_size) != (-1, -1)
        steps = torch.arange(q.shape[1]) if own else torch.zeros(q.shape[1], dtype=torch.int64)
        q = rotate(q, rotary_cos, rotary_sin, lengths[:, None] + steps, rotary_interleaved)
        k = rotate(k, rotary_cos, rotary_sin, lengths[:, None] + torch.arange(new), rotary_interleaved)
    if k is not None and v is not None:
        slots.write(lengths, k, v)
    ends = (lengths + new).numpy()
    keys, values = slots.read(int(ends.max()))  # (B, S, Hkv, D)
    at = _positions(q.shape[1], keys.shape[1], starts.numpy(), ends)
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))  # (B, H, N, D)
    output, lse, _ = settings.run(q, keys, values, mask, at)
    output = output.transpose(1, 2).contiguous()
    return (output, seen(lse)) if return_softmax_lse else output


class _Slots:
    """The slots of each row of q in a cache: rows of it, or pages."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, index: Tensor | None) -> None:
        check_tensor(_NAME, "q", q, "(B, N, H, D)")
        check_tensor(_NAME, "k_cache", k, "(B, slots, H, D)")
        check_tensor(_NAME, "v_cache", v, "(B, slots, H, D)")
        if table is not None and index is not None:
            raise CallError(
                f"{_NAME}: block_table and cache_batch_idx exclude each other. Fix: the rows of block_table."
            )
        self.k, self.v, self.batch, self.index = k, v, q.shape[0], index
        self.table = None if table is None else table.long()
        self.count = k.shape[1] if table is None else table.shape[1] * k.shape[1]
        rows = len(table) if table is not None else len(index) if index is not None else len(k)
        if rows != self.batch:
            raise CallError(
                f"{_NAME}: q has {self.batch} rows, but the cache {rows}. Fix: cache_batch_idx=, one per row of q."
            )

    def rows(self, argument: str, value: int | Tensor) -> Tensor:
        """(B,) numbers from one for all rows, or one for each."""
        numbers = torch.as_tensor(value).cpu().long()
        if numbers.ndim > 1 or (numbers.ndim == 1 and len(numbers) != self.batch):
            raise CallError(f"{_NAME}: {argument} is {tuple(numbers.shape)}. Fix: an int, or ({self.batch},).")
        return numbers.expand(self.batch)

    def write(self, lengths: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new keys and values (B, N, H, D) after the present ones."""
        place = lengths[:, None] + torch.arange(k.shape[1])  # (B, N)
        if self.table is not None:
            row, place = self.table.cpu().gather(1, place // self.k.shape[1]), place % self.k.shape[1]
        else:
            row = (torch.arange(self.batch) if self.index is None else self.index.cpu().long())[:, None]
        for cache, fresh in ((self.k, k), (self.v, v)):
            cache[row.to(cache.device), place.to(cache.device)] = fresh.to(cache.dtype)

    def read(self, n: int) -> tuple[Tensor, Tensor]:
        """The first ``n`` slots of each row, (B, n, H, D): views, except for pages and chosen rows."""
        if self.table is not None:
            pages = self.table[:, : -(-n // self.k.shape[1])]
            return self.k[pages].flatten(1, 2)[:, :n], self.v[pages].flatten(1, 2)[:, :n]
        if self.index is not None:
            index = self.index.long()
            return self.k[index, :n], self.v[index, :n]
        return self.k[:, :n], self.v[:, :n]


def _positions(nq: int, nk: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Positions:
    """Slots as positions, -1 before a row's start and after its end; the last query stands at the last key."""
    if (ends == nk).all() and not starts.any() and nq <= nk:
        return Positions()
    slots = np.arange(nk)
    k = np.where((slots >= starts[:, None]) & (slots < ends[:, None]), slots + nq, -1)  # + nq: none of q's is negative
    return Positions(ends[:, None] + np.arange(nq), k)
