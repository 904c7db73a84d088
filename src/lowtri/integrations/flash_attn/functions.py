"""The public functions of flash-attn: sequences of one length, packed sequences, and a cache that is written in place.

Packed sequences are one row, and the mask keeps them apart as documents. A document is as long as the longer of a sequence's queries
and keys, which both stand at its end: this is flash-attn's alignment to the bottom right corner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib import import_module, util
from inspect import Signature, signature
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from lowtri.compat.torch_private import outside_graph
from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import bottom_right_positions
from lowtri.integrations.flash_attn.arguments import (
    NO_WINDOW,
    PACKED,
    ROWS,
    SLOTS,
    check_inputs,
    check_numbers,
    check_range,
    check_slopes,
    check_tensor,
    edges_of,
    for_rows,
    read_window,
    whole_numbers,
)
from lowtri.integrations.flash_attn.layers_rotary import rotate
from lowtri.masks import POSITION_MAX, Mask, band, causal, full, window
from lowtri.masks.label_masks import PackedDocuments
from lowtri.ops.distance_bias import alibi

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

P = ParamSpec("P")
Ints = NDArray[np.int64]

_UNCHANGED: AbstractContextManager[object] = nullcontext()
_FULL, _CAUSAL = full(), causal()  # a mask takes longer to make than to look up

MARK = "lowtri_installed"  # an attribute of the module that install() puts in the place of flash_attn


def is_real_installed() -> bool:
    """Whether ``import flash_attn`` finds a module that is not lowtri's."""
    module = sys.modules.get("flash_attn")
    return not hasattr(module, MARK) if module is not None else util.find_spec("flash_attn") is not None


def _public(*, in_graphs: bool) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Pass tensors on a CUDA device to the function of the real package, where it is installed.

    Args:
        in_graphs: whether torch.compile may trace the function. It may not where the mask and the positions depend on numbers in
            arguments.
    """

    def public(function: Callable[P, Any]) -> Callable[P, Any]:
        in_program = function if in_graphs else outside_graph(function)

        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> Any:
            q = args[0] if args else options.get("q")
            if getattr(q, "is_cuda", False) and is_real_installed():
                return getattr(import_module("flash_attn"), function.__name__)(*args, **options)
            return in_program(*args, **options) if is_dynamo_compiling() else function(*args, **options)

        return call

    return public


def _packed_form(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A form of a function for packed tensors: it turns its own arguments into the first ones of the function, and has its options."""
    options = [one for one in signature(function).parameters.values() if one.default is not one.empty]

    def form(unpack: Callable[..., Any]) -> Callable[..., Any]:
        own = signature(unpack).parameters

        @wraps(unpack)
        def call(*args: Any, **named: Any) -> Any:
            by_name = {name: named.pop(name) for name in own if name in named}
            return function(*unpack(*args[: len(own)], **by_name), *args[len(own) :], **named)

        parameters = [*own.values(), *(one for one in options if one.name != "block_table")]
        call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return call

    return form


class _Options(NamedTuple):
    """What all functions share, under flash-attn's names."""

    name: str
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    return_attn_probs: bool

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, positions: dict[str, Any]) -> tuple[Tensor, ...]:
        """Attention of q, k and v (B, H, N, D) or (H, N, D), returned in flash-attn's layout.

        Returns:
            the output (..., Nq, Hq, D); and with ``return_attn_probs`` the log-sum-exp (..., Hq, Nq), float32, without gradient, and
            inf where a query sees no key, and the weights, empty without dropout.
        """
        weighted = self.return_attn_probs and self.dropout_p > 0
        bias = None
        if (slopes := self.alibi_slopes) is not None:
            bias = alibi(slopes.detach().to(q.device, torch.promote_types(q.dtype, torch.float32)))
        result: Any = attention(
            q,
            k,
            v,
            mask,
            scale=self.softmax_scale,
            softcap=self.softcap or None,
            bias=bias,
            dropout=self.dropout_p,
            return_weights=weighted,
            return_lse=self.return_attn_probs,
            **positions,
        )
        output, *rest = result if self.return_attn_probs else (result,)
        output = output.transpose(-2, -3).contiguous()  # callers use view
        if not self.return_attn_probs:
            return (output,)
        lse = rest[-1].detach()
        lse = lse.masked_fill(lse == -torch.inf, torch.inf).float()
        return output, lse, rest[0] if weighted else q.new_empty(0)

    def mask(self) -> Mask:
        """Which keys each query sees, for positions that end together."""
        left, right = read_window(self.name, self.window_size)
        if not torch.compiler.is_compiling():  # lowtri.attention checks the numbers of a program
            check_numbers(self.name, self.dropout_p, self.softmax_scale, self.softcap, self.causal)
        right = 0 if self.causal else right
        if left < 0 and right < 0:
            return _FULL
        if right == 0:
            return _CAUSAL if left < 0 else window(left + 1)
        return band(POSITION_MAX if left < 0 else left, POSITION_MAX if right < 0 else right)


# Every sequence of a batch has the same length.


@_public(in_graphs=True)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention in flash-attn's layout.

    >>> import torch
    >>> from lowtri.integrations.flash_attn import flash_attn_func
    >>> q, kv = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)  # (B, N, H, D)
    >>> flash_attn_func(q, kv, kv, causal=True).shape
    torch.Size([2, 3, 4, 8])

    Args:
        q: (B, Nq, Hq, D).  k, v: (B, Nk, Hkv, D); query head h uses key/value head h // (Hq // Hkv).
        dropout_p: the probability with which a weight is dropped, also in evaluation.
        softmax_scale: factor on the scores; 1 / sqrt(D) by default.
        causal: the last query sees the last key, the one before it one key less, and so on.
        window_size: (left, right), how many keys each query sees before and after its own position, which is that of the last key
            for the last query; -1 for no limit.
        softcap: c > 0 caps the scaled scores at c * tanh(score / c); 0: no cap.
        alibi_slopes: (Hq,) or (B, Hq); -slope * distance is added to the scores. No gradient.
        deterministic: accepted; lowtri is always deterministic.
        return_attn_probs: also return the log-sum-exp (B, Hq, Nq), inf where a query sees no key, and with dropout the weights
            (B, Hq, Nq, Nk) before dropout, else an empty tensor.

    Returns:
        (B, Nq, Hq, D), 0 where a query sees no key; or a tuple with the two above.

    Raises:
        CallError: if the arguments do not fit together.
    """
    name = "flash_attn_func"
    of_q, of_k = check_inputs(name, ROWS, q, k, v)
    check_slopes(name, alibi_slopes, of_q[0], of_q[2])
    options = _Options(name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    positions = bottom_right_positions(of_q[1], of_k[1])
    results = options.run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), options.mask(), positions)
    return results if return_attn_probs else results[0]


@_packed_form(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor) -> Any:
    """:func:`flash_attn_func` of qkv (B, N, 3, H, D), with the same options after it."""
    check_tensor("flash_attn_qkvpacked_func", "qkv", qkv, "(B, N, 3, H, D)")
    return qkv.unbind(2)


@_packed_form(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor) -> Any:
    """:func:`flash_attn_func` of q (B, Nq, Hq, D) and kv (B, Nk, 2, Hkv, D), with the same options after them."""
    check_tensor("flash_attn_kvpacked_func", "kv", kv, "(B, N, 2, H, D)")
    return q, *kv.unbind(2)


# Sequences of different lengths, one after the other, without padding.

_VARLEN = "flash_attn_varlen_func"


@_public(in_graphs=False)
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
    window_size: tuple[int, int] = NO_WINDOW,
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
    of_q = edges_of(_VARLEN, "cu_seqlens_q", cu_seqlens_q)
    of_k = of_q if cu_seqlens_k is cu_seqlens_q else edges_of(_VARLEN, "cu_seqlens_k", cu_seqlens_k)
    if len(of_q) != len(of_k):
        raise CallError(
            f"{_VARLEN}: cu_seqlens_q has {len(of_q)} edges and cu_seqlens_k {len(of_k)}. Fix: B + 1 in both."
        )
    if block_table is not None:
        k, v = (_from_pages(x, of_k, block_table) for x in (k, v))
    (total_q, heads, _), (total_k, _, _) = check_inputs(_VARLEN, PACKED, q, k, v)
    check_slopes(_VARLEN, alibi_slopes, len(of_q) - 1, heads)
    for argument, edges, total in (("cu_seqlens_q", of_q, total_q), ("cu_seqlens_k", of_k, total_k)):
        if edges[-1] > total:
            raise CallError(
                f"{_VARLEN}: {argument} ends at {edges[-1]}, but there are {total} tokens. Fix: an end of at most {total}."
            )
    options = _Options(_VARLEN, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    mask = options.mask()
    if alibi_slopes is not None and alibi_slopes.ndim == 2:
        results = _one_by_one(options, (q, k, v), (of_q, of_k))
    else:
        apart, positions = _documents(of_q, of_k, total_q, total_k)
        mask = mask if apart is None else mask & apart
        results = options.run(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, positions)
    return results if return_attn_probs else results[0]


@_packed_form(flash_attn_varlen_func)
def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:
    """:func:`flash_attn_varlen_func` of qkv (total, 3, H, D), with the same options after these arguments."""
    check_tensor("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(total, 3, H, D)")
    return *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen


@_packed_form(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> Any:
    """:func:`flash_attn_varlen_func` of q (total_q, Hq, D) and kv (total_k, 2, Hkv, D), with the same options."""
    check_tensor("flash_attn_varlen_kvpacked_func", "kv", kv, "(total, 2, H, D)")
    return q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def _documents(of_q: list[int], of_k: list[int], total_q: int, total_k: int) -> tuple[Mask | None, dict[str, Ints]]:
    """The mask that keeps sequences apart, None for a single one, and the positions of queries and keys."""
    same = of_q == of_k
    lengths = [end - start for start, end in pairwise(of_q)]
    if not same:
        lengths = [max(n, end - start) for n, (start, end) in zip(lengths, pairwise(of_k), strict=True)]
    real = tuple([length for length in lengths if length])
    mask = PackedDocuments(real) if len(real) > 1 else None  # the edges are checked
    if same and total_q == total_k == of_q[-1]:
        return mask, {}
    ends = np.cumsum(lengths)
    at_end = {}  # each sequence stands at the end of its document; tokens past the last edge have no position
    for name, edges, total in (("q_positions", of_q, total_q), ("k_positions", of_k, total_k)):
        at_end[name] = np.full(total, -1, np.int64)
        at_end[name][: edges[-1]] = np.arange(edges[-1]) + np.repeat(ends - np.array(edges[1:]), np.diff(edges))
    return mask, at_end


def _from_pages(pages: Tensor, edges: list[int], block_table: Any) -> Tensor:
    """The keys of all sequences, packed, from their pages."""
    check_tensor(_VARLEN, "k and v with block_table", pages, "(pages, page size, H, D)")
    lengths, size = np.diff(edges), pages.shape[1]
    table = whole_numbers(_VARLEN, "block_table", block_table, (len(lengths), "pages"))
    if lengths.max(initial=0) > table.shape[1] * size:
        raise CallError(
            f"{_VARLEN}: block_table is {tuple(table.shape)} with pages of {size}, but there are {len(lengths)} sequences "
            f"of up to {lengths.max(initial=0)} keys. Fix: one row per sequence, with all of its pages."
        )
    row = np.repeat(np.arange(len(lengths)), lengths)
    slot = np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)
    page = table[row, slot // size]  # entries past the last page are not read
    check_range(_VARLEN, "block_table", page.tolist(), len(pages))
    return pages[tuple(torch.from_numpy(x).to(pages.device) for x in (page, slot % size))]


def _one_by_one(
    options: _Options, tensors: tuple[Tensor, ...], edges: tuple[list[int], list[int]]
) -> tuple[Tensor, ...]:
    """Slopes that differ between sequences: one call for each."""
    q, k, v = tensors
    of_q, of_k = edges
    mask = options.mask()
    slopes = options.alibi_slopes
    dropped = options.return_attn_probs and options.dropout_p > 0
    weights = q.new_zeros(q.shape[1], len(q), len(k)) if dropped else q.new_empty(0)
    outputs, lses = [], []
    for b in range(len(of_q) - 1):
        one = options._replace(alibi_slopes=None if slopes is None else slopes[b], return_attn_probs=True)
        rows, columns = slice(of_q[b], of_q[b + 1]), slice(of_k[b], of_k[b + 1])
        positions = bottom_right_positions(rows.stop - rows.start, columns.stop - columns.start)
        own_q, own_k, own_v = (x.transpose(0, 1) for x in (q[rows], k[columns], v[columns]))
        output, lse, part = one.run(own_q, own_k, own_v, mask, positions)
        outputs.append(output)
        lses.append(lse)
        if dropped:
            weights[:, rows, columns] = part.detach()
    rest = len(q) - of_q[-1]
    whole = torch.cat([*outputs, q.new_zeros(rest, q.shape[1], v.shape[2])])
    return whole, torch.nn.functional.pad(torch.cat(lses, 1), (0, rest), value=torch.inf), weights


# New tokens over a cache of fixed size, into which their keys and values are written.

_CACHE = "flash_attn_with_kvcache"


@_public(in_graphs=False)
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
    window_size: tuple[int, int] = NO_WINDOW,
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
        rotary_cos, rotary_sin: (positions, R): k is rotated at its slot in the cache; q likewise if ``causal`` or with a window,
            else all of q at ``cache_seqlens``.
        cache_seqlens: how many keys of each row are in the cache, an int or (B,); default all slots.
        cache_batch_idx: (B,), the row of the cache of each row of q; default 0 .. B-1.
        cache_leftpad: (B,), the slot in which each row begins; default 0.
        block_table: (B, pages of a row), the pages of each row in their order; entries past its last page are ignored.
        rotary_interleaved: see :func:`~lowtri.integrations.flash_attn.layers_rotary.apply_rotary_emb`.
        num_splits: accepted; lowtri chooses how it splits the work.
        return_softmax_lse: also return the log-sum-exp, (B, Hq, Nq).

    Returns:
        (B, Nq, Hq, D), or a tuple with the log-sum-exp.

    Raises:
        CallError: if the arguments do not fit together, or new tokens do not fit into the cache. The cache is then unchanged.
    """
    options = _Options(_CACHE, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse)
    mask = options.mask()
    slots = _Slots(q, k_cache, v_cache, block_table, cache_batch_idx)
    rows, nq, heads = slots.of_q[:3]
    lengths = for_rows(_CACHE, "cache_seqlens", slots.count if cache_seqlens is None else cache_seqlens, rows)  # (B,)
    starts = None if cache_leftpad is None else for_rows(_CACHE, "cache_leftpad", cache_leftpad, rows)
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise CallError(f"{_CACHE}: got k without v or cache_seqlens, or v without k. Fix: all three, or none.")
    new = 0 if k is None else slots.check_new(k, v)
    ends = [length + new for length in lengths]
    last = max(ends, default=0)
    if last > slots.count:
        raise CallError(
            f"{_CACHE}: cache_seqlens is {lengths!r:.60} and {new} tokens are new, but a row has {slots.count} slots.\n"
            "Fix: a larger cache."
        )
    slots.check_pages(ends)
    check_slopes(_CACHE, alibi_slopes, rows, heads)
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None or k is None:
            raise CallError(
                f"{_CACHE}: rotary tables need each other and new keys. Fix: rotary_cos=, rotary_sin= and k=."
            )
        check_tensor(_CACHE, "rotary_cos", rotary_cos, "(positions, R)")
        check_tensor(_CACHE, "rotary_sin", rotary_sin, "(positions, R)")
        own = causal or read_window(_CACHE, window_size) != (-1, -1)
        steps = torch.arange(nq) if own else torch.zeros(nq, dtype=torch.int64)
        before = torch.tensor(lengths, dtype=torch.int64)[:, None]
        q = rotate(q, rotary_cos, rotary_sin, before + steps, rotary_interleaved, _CACHE)
        k = rotate(k, rotary_cos, rotary_sin, before + torch.arange(new), rotary_interleaved, _CACHE)
    positions = _slot_positions(nq, last, starts, ends)
    with torch.no_grad() if torch.is_grad_enabled() else _UNCHANGED:
        if k is not None and v is not None:
            slots.write(lengths, k, v)
        keys, values = slots.read(last)  # (B, Hkv, S, D)
        results = options.run(q.transpose(1, 2), keys, values, mask, positions)
    return results[:2] if return_softmax_lse else results[0]


class _Slots:
    """The slots of each row of q in a cache, which are in pages; without ``block_table``, a row of the cache is one page."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, table: Any, index: Any) -> None:
        self.of_q, of_k = check_inputs(_CACHE, SLOTS, q, k, v)
        if not (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type)):
            raise CallError(
                f"{_CACHE}: q is {q.dtype}, k_cache {k.dtype} and v_cache {v.dtype}. Fix: one dtype, as q.to(k_cache.dtype)."
            )
        if table is not None and index is not None:
            raise CallError(
                f"{_CACHE}: block_table and cache_batch_idx exclude each other. Fix: the rows of block_table."
            )
        self.k, self.v = k, v
        self.batch = self.of_q[0]
        self.table: Ints | None = None  # (B, pages); None: row by row, so that nothing is copied
        if table is not None:
            self.table = whole_numbers(_CACHE, "block_table", table, (self.batch, "pages"))
        elif index is not None:
            chosen = whole_numbers(_CACHE, "cache_batch_idx", index, (self.batch,))
            check_range(_CACHE, "cache_batch_idx", chosen.tolist(), of_k[0])
            self.table = chosen[:, None]
        self.size = max(1, of_k[1])  # of a page
        self.count = of_k[1] * (1 if self.table is None else self.table.shape[1])
        if self.table is None and of_k[0] != self.batch:
            raise CallError(
                f"{_CACHE}: q has {self.batch} rows, but the cache {of_k[0]}. Fix: cache_batch_idx=, one per row of q."
            )

    def check_new(self, k: Any, v: Any) -> int:
        """The number of new tokens of each row."""
        new = None
        for argument, x, cache in (("k", k, self.k), ("v", v, self.v)):
            check_tensor(_CACHE, argument, x, "(B, N, H, D)")
            of_cache, given = cache.shape, x.shape
            new = given[1] if new is None else new
            expected = (self.batch, new, of_cache[2], of_cache[3])
            if given != expected or not x.is_floating_point():
                raise CallError(
                    f"{_CACHE}: {argument} is {tuple(given)} {x.dtype}. Fix: {expected} floats, as q and the cache."
                )
            steps = cache.stride()
            if 0 in steps and any(step == 0 and n > 1 for step, n in zip(steps, of_cache, strict=True)):
                raise CallError(
                    f"{_CACHE}: {argument}_cache is expanded, so its rows share memory and cannot hold different tokens. "
                    f"Fix: {argument}_cache.contiguous()."
                )
        return new or 0

    def check_pages(self, ends: list[int]) -> None:
        """Raise if a page that is used does not exist; other entries of the table may hold anything."""
        if self.table is not None:
            used = np.arange(self.table.shape[1]) < -(-np.array(ends, int) // self.size)[:, None]
            check_range(_CACHE, "block_table", self.table[used].tolist(), len(self.k))
            self.table = np.where(used, self.table, 0)

    def write(self, lengths: list[int], k: Tensor, v: Tensor) -> None:
        """Write new keys and values (B, N, H, D) after the present ones."""
        n = k.shape[1]
        if self.table is None and len(set(lengths)) == 1:  # one rectangle
            for cache, fresh in ((self.k, k), (self.v, v)):
                cache.narrow(1, lengths[0], n).copy_(fresh)
            return
        slot = np.array(lengths, int)[:, None] + np.arange(n)  # (B, N)
        page = np.arange(self.batch)[:, None]
        if self.table is not None:
            page, slot = self.table[page, slot // self.size], slot % self.size
        for cache, fresh in ((self.k, k), (self.v, v)):
            cache[tuple(torch.from_numpy(x).to(cache.device) for x in (page, slot))] = fresh.to(cache.dtype)

    def read(self, n: int) -> tuple[Tensor, Tensor]:
        """The first ``n`` slots of each row, (B, H, n, D): views, except for pages and chosen rows."""
        if self.table is None:
            return _first_slots(self.k, n), _first_slots(self.v, n)
        pages = torch.from_numpy(self.table[:, : -(-n // self.size)])
        keys, values = (x[pages, :n].flatten(1, 2)[:, :n].transpose(1, 2) for x in (self.k, self.v))
        return keys, values


def _first_slots(cache: Tensor, n: int) -> Tensor:
    """cache[:, :n].transpose(1, 2) as one operation of torch, of which each takes some microseconds."""
    sizes, steps = cache.shape, cache.stride()
    return cache.as_strided((sizes[0], sizes[2], n, sizes[3]), (steps[0], steps[2], steps[1], steps[3]))


def _slot_positions(nq: int, nk: int, starts: list[int] | None, ends: list[int]) -> dict[str, Ints]:
    """Slots as positions, -1 before a row's start and after its end; the last query stands at the last key."""
    if not ends:  # no rows, so no position of each row
        return {"q_positions": np.arange(nq), "k_positions": np.arange(nk)}
    starts = starts or [0] * len(ends)
    if nq <= nk == min(ends) and not any(starts):  # no row ends after nk
        return {}
    slots = np.arange(nk)
    first, end = np.array(starts)[:, None], np.array(ends)[:, None]
    k = np.where((slots >= first) & (slots < end), slots + nq, -1)  # + nq: none of q's is negative
    return {"q_positions": end + np.arange(nq), "k_positions": k}
