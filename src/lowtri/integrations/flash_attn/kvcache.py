"""``flash_attn_with_kvcache``: attention of new tokens over a cache of fixed size, into which their keys and values are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.arguments import (
    check_shapes,
    check_slopes,
    check_tensor,
    read_window,
    whole_numbers,
)
from lowtri.integrations.flash_attn.real import real_function
from lowtri.integrations.flash_attn.rotary import rotate
from lowtri.integrations.flash_attn.settings import Positions, Settings, seen
from lowtri.masks import POSITION_MAX

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

    The last query stands at the last key. Arguments that are not listed are those of
    :func:`~lowtri.integrations.flash_attn.flash_attn_func`.

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
        block_table: (B, pages of a row), the pages of each row in their order; entries past its last page are ignored.
        rotary_interleaved: see :func:`~lowtri.integrations.flash_attn.rotary.rotate`.
        num_splits: accepted; lowtri chooses how it splits the work.
        return_softmax_lse: also return the log-sum-exp, (B, Hq, Nq).

    Returns:
        (B, Nq, Hq, D), or a tuple with the log-sum-exp.

    Raises:
        CallError: if the arguments do not fit together, or new tokens do not fit into the cache. The cache is then unchanged.
    """
    if (real := real_function(_NAME, q)) is not None:
        cached = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
        rest = (softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits)
        return real(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, *cached, *rest, return_softmax_lse)
    settings = Settings(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse)
    cache = (k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    return _outside(settings, q, (k, v), (rotary_cos, rotary_sin, rotary_interleaved), cache)


def _attend(
    settings: Settings, q: Tensor, fresh: tuple[Any, Any], rotary: tuple[Any, Any, bool], cache: tuple[Any, ...]
) -> Any:
    (k, v), (rotary_cos, rotary_sin, interleaved) = fresh, rotary
    k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table = cache
    mask = settings.mask(_NAME)
    slots = _Slots(q, k_cache, v_cache, block_table, cache_batch_idx)
    lengths = slots.rows("cache_seqlens", slots.count if cache_seqlens is None else cache_seqlens)  # (B,)
    starts = slots.rows("cache_leftpad", 0 if cache_leftpad is None else cache_leftpad)
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise CallError(f"{_NAME}: k came without v or cache_seqlens, or v without k. Fix: all three, or none.")
    new = 0
    if k is not None:
        new = slots.check_new(q, k, v)
    ends = (lengths + new).numpy()
    if ends.max(initial=0) > slots.count:
        raise CallError(
            f"{_NAME}: cache_seqlens is {lengths.tolist()!r:.60} and {new} tokens are new, but a row has {slots.count} slots.\n"
            "Fix: a larger cache."
        )
    slots.check_pages(ends)
    check_slopes(_NAME, settings.alibi_slopes, q.shape[0], q.shape[2])
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            raise CallError(
                f"{_NAME}: rotary tables need each other and new keys. Fix: rotary_cos=, rotary_sin= and k=."
            )
        check_tensor(_NAME, "rotary_cos", rotary_cos, "(positions, R)")
        check_tensor(_NAME, "rotary_sin", rotary_sin, "(positions, R)")
        own = settings.causal or read_window(_NAME, settings.window_size) != (-1, -1)
        steps = torch.arange(q.shape[1]) if own else torch.zeros(q.shape[1], dtype=torch.int64)
        q = rotate(q, rotary_cos, rotary_sin, lengths[:, None] + steps, interleaved)
        k = rotate(k, rotary_cos, rotary_sin, lengths[:, None] + torch.arange(new), interleaved)
    if k is not None and v is not None:
        slots.write(lengths, k, v)
    keys, values = slots.read(int(ends.max(initial=0)))  # (B, S, Hkv, D)
    at = _positions(q.shape[1], keys.shape[1], starts.numpy(), ends)
    q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))  # (B, H, N, D)
    output, lse, _ = settings.run(q, keys, values, mask, at)
    output = output.transpose(1, 2).contiguous()
    return (output, seen(lse)) if settings.return_attn_probs else output


_outside: Callable[..., Any] = torch.compiler.disable(
    _attend
)  # masks and positions are made of the numbers in cache_seqlens


class _Slots:
    """The slots of each row of q in a cache: rows of it, or pages."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, table: Any, index: Any) -> None:
        check_tensor(_NAME, "q", q, "(B, N, H, D)")
        check_tensor(_NAME, "k_cache", k, "(B, slots, H, D)")
        check_tensor(_NAME, "v_cache", v, "(B, slots, H, D)")
        check_shapes(_NAME, q, k, v, ("k_cache", "v_cache"), one_batch=False)
        if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
            raise CallError(
                f"{_NAME}: q is {q.dtype}, k_cache {k.dtype} and v_cache {v.dtype}. Fix: one dtype, as q.to(k_cache.dtype)."
            )
        if table is not None and index is not None:
            raise CallError(
                f"{_NAME}: block_table and cache_batch_idx exclude each other. Fix: the rows of block_table."
            )
        self.k, self.v, self.batch = k, v, q.shape[0]
        self.table = None if table is None else whole_numbers(_NAME, "block_table", table, (self.batch, "pages"), None)
        self.index = None if index is None else whole_numbers(_NAME, "cache_batch_idx", index, (self.batch,), len(k))
        self.count = k.shape[1] if self.table is None else self.table.shape[1] * k.shape[1]
        if table is None and index is None and len(k) != self.batch:
            raise CallError(
                f"{_NAME}: q has {self.batch} rows, but the cache {len(k)}. Fix: cache_batch_idx=, one per row of q."
            )

    def rows(self, argument: str, value: int | Tensor) -> Tensor:
        """(B,) numbers from one for all rows, or one for each."""
        sizes = () if np.ndim(value) == 0 else (self.batch,)
        return whole_numbers(_NAME, argument, value, sizes, POSITION_MAX).expand(self.batch)

    def check_new(self, q: Tensor, k: Any, v: Any) -> int:
        """The number of new tokens of each row."""
        for argument, x, cache in (("k", k, self.k), ("v", v, self.v)):
            check_tensor(_NAME, argument, x, "(B, N, H, D)")
            expected = (self.batch, k.shape[1], *cache.shape[2:])
            if tuple(x.shape) != expected or not x.is_floating_point():
                raise CallError(
                    f"{_NAME}: {argument} is {tuple(x.shape)} {x.dtype}. Fix: {expected} floats, as q and the cache."
                )
            if any(step == 0 and size > 1 for step, size in zip(cache.stride(), cache.shape, strict=True)):
                raise CallError(
                    f"{_NAME}: {argument}_cache is expanded, so its rows share memory and cannot hold different tokens. "
                    f"Fix: {argument}_cache.contiguous()."
                )
        return int(k.shape[1])

    def check_pages(self, ends: NDArray[np.int64]) -> None:
        """Raise if a page that is used does not exist; other entries of the table may hold anything."""
        if self.table is None:
            return
        used = torch.from_numpy(np.arange(self.table.shape[1]) < -(-ends // max(1, self.k.shape[1]))[:, None])
        whole_numbers(_NAME, "block_table", self.table[used], ("pages",), len(self.k))
        self.table = self.table.where(used, 0)

    def write(self, lengths: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new keys and values (B, N, H, D) after the present ones."""
        place = lengths[:, None] + torch.arange(k.shape[1])  # (B, N)
        if self.table is not None:
            row, place = self.table.gather(1, place // self.k.shape[1]), place % self.k.shape[1]
        else:
            row = (torch.arange(self.batch) if self.index is None else self.index)[:, None]
        for cache, fresh in ((self.k, k), (self.v, v)):
            cache[row.to(cache.device), place.to(cache.device)] = fresh.to(cache.dtype)

    def read(self, n: int) -> tuple[Tensor, Tensor]:
        """The first ``n`` slots of each row, (B, n, H, D): views, except for pages and chosen rows."""
        if self.table is not None:
            pages = self.table[:, : -(-n // self.k.shape[1])]
            return self.k[pages].flatten(1, 2)[:, :n], self.v[pages].flatten(1, 2)[:, :n]
        if self.index is not None:
            return self.k[self.index, :n], self.v[self.index, :n]
        return self.k[:, :n], self.v[:, :n]


def _positions(nq: int, nk: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Positions:
    """Slots as positions, -1 before a row's start and after its end; the last query stands at the last key."""
    if not len(ends):  # no rows, so no position of each row
        return Positions(np.arange(nq), np.arange(nk))
    if (ends == nk).all() and not starts.any() and nq <= nk:
        return Positions()
    slots = np.arange(nk)
    k = np.where((slots >= starts[:, None]) & (slots < ends[:, None]), slots + nq, -1)  # + nq: none of q's is negative
    return Positions(ends[:, None] + np.arange(nq), k)
