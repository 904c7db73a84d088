"""One call of attention, checked once: its description without the numbers, and its arrays in four dimensions.

A :class:`Call` says everything about a call except where its numbers lie. Backends read it to answer whether they support the
call, what it would cost them, and to prepare it; the arrays come when a prepared call runs, so equal calls are prepared once.

Whatever rank the user passed, ``q`` is (B, Hq, Nq, D), ``k`` (B, Hkv, Nk, D), ``v`` (B, Hkv, Nk, Dv), ``bias`` is None or has
four dimensions that broadcast against (B, Hq, Nq, Nk), and positions are NumPy integers, (1, N) or (B, N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.formulas import full
from lowtri.masks.mask import Mask
from lowtri.masks.plan import Plan, plan
from lowtri.masks.text import as_mask
from lowtri.masks.tile import FULL, default_positions
from lowtri.ops.arguments import (
    bias_in_four,
    check_arrays,
    check_batch,
    check_bias,
    check_numbers,
    check_positions,
    check_recorded,
    check_sinks,
    dtype_name,
    packed,
    plain_array,
)
from lowtri.ops.diagonal import as_mask_by_order, is_causal_bias
from lowtri.ops.memory_limit import check_weights
from lowtri.ops.threads import thread_count

__all__ = ["ArrayInfo", "Call", "Inputs", "Result", "arrange", "describe", "dtype_name", "seen_keys"]


class ArrayInfo(NamedTuple):
    """An array without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in numbers, not bytes
    dtype: str
    requires_grad: bool  # and gradients are recorded


class Inputs(NamedTuple):
    """The arrays of a call: NumPy arrays or torch tensors, all of one kind and device."""

    q: Any  # (B, Hq, Nq, D)
    k: Any  # (B, Hkv, Nk, D)
    v: Any  # (B, Hkv, Nk, Dv)
    bias: Any  # None or (B|1, Hq|1, Nq|1, Nk|1)
    sinks: Any  # None or (Hq,)


@dataclass(frozen=True, eq=False)
class Result:
    """What a backend computes, in four dimensions; ``weights`` and ``lse`` where the call returns them."""

    output: Any  # (B, Hq, Nq, Dv), the dtype of q
    weights: Any = None  # (B, Hq, Nq, Nk), the dtype of q, before dropout
    lse: Any = None  # (B, Hq, Nq), at least float32


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call without its numbers."""

    q: ArrayInfo
    k: ArrayInfo
    v: ArrayInfo
    bias: ArrayInfo | None
    sinks: ArrayInfo | None
    is_numpy: bool
    device: str  # "cpu", "cuda", ...
    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    q_positions: NDArray[np.int64]  # (B|1, Nq)
    k_positions: NDArray[np.int64]  # (B|1, Nk)
    positions_given: bool
    return_weights: bool
    return_lse: bool
    threads: int
    opaque: str | None  # why the numbers cannot be read from memory, or None
    transformation: str | None  # torch's transform (vmap, jvp, ...) around the call, or None
    lead: tuple[int, ...]  # the user's dimensions before (Hq, Nq, D)
    rank: int  # of the user's q

    @property
    def dtype(self) -> str:
        return self.q.dtype

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, Hq, Hkv, Nq, Nk, D, Dv."""
        (batch, heads, nq, d), (_, kv_heads, nk, dv) = self.q.shape, self.v.shape
        return batch, heads, kv_heads, nq, nk, d, dv

    @property
    def group(self) -> int:
        """How many neighbouring query heads one key/value head serves."""
        return self.q.shape[1] // self.k.shape[1]

    @cached_property
    def needs_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in (self.q, self.k, self.v, self.bias, self.sinks))

    @cached_property
    def shows_all(self) -> bool:
        """Whether every query sees every key, by one question about the box of positions around them."""
        q, k = self.q_positions, self.k_positions
        if self.mask.batch or 0 in (q.size, k.size):
            return False
        if not self.positions_given:  # consecutive: the ends are the box
            return self.mask.tile(int(q[0, 0]), int(q[0, -1]) + 1, 0, k.shape[1]) is FULL
        if q.min() < 0 or k.min() < 0:
            return False
        return bool(self.mask.tile(int(q.min()), int(q.max()) + 1, int(k.min()), int(k.max()) + 1) == FULL)

    def plan(self, tile_k: int = 128) -> Plan:
        """The plan of the mask at these positions."""
        return plan(self.mask, self.q_positions, self.k_positions, tile_k=tile_k)

    def visible(self, start: int = 0, stop: int | None = None, k0: int = 0, k1: int | None = None) -> NDArray[np.bool_]:
        """Who sees whom among the queries ``start .. stop`` and the keys ``k0 .. k1`` (indices): (B|1, Hq|1, nq, nk)."""
        q, k, mask = self.q_positions[:, start:stop], self.k_positions[:, k0:k1], self.mask
        if len(q) == len(k) == 1 and not mask.batch:
            return np.asarray(mask(q[0][:, None], k[0][None, :]))[None, None]
        rows, heads = max(len(q), len(k), *(mask.batch[:1] or (1,))), (*mask.batch, 1, 1)[1]
        out = np.empty((rows, heads, q.shape[1], k.shape[1]), bool)
        for b, h in np.ndindex(rows, heads):
            out[b, h] = mask.at(b, h)(q[b % len(q)][:, None], k[b % len(k)][None, :])
        return out

    def restore(self, x: Any) -> Any:
        """A result (B, Hq, ...) in the rank of the user's q."""
        if self.rank == 4:
            return x
        if self.rank == 2:
            return x[0, 0]
        return x.reshape(*self.lead, *x.shape[1:])

    def __str__(self) -> str:
        shapes = f"q {tuple(self.q.shape)}   k {tuple(self.k.shape)}   {self.dtype}   {self.device}"
        text = repr(self.mask)
        return f"{shapes}   mask {text if len(text) <= 80 else text[:77] + '...'}"


def describe(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    q_positions: Any = None,
    k_positions: Any = None,
    return_weights: bool = False,
    return_lse: bool = False,
) -> tuple[Call, Inputs]:
    """Check the arguments of a call; returns its description and its arrays in four dimensions.

    Raises:
        CallError: where they do not fit together, or the weights do not fit into memory; the message names the argument,
            what came, and the fix.
        MaskError: where the mask is none.
    """
    diagonal = None  # who may see whom by order, as torch says it
    if is_causal_bias(mask):
        diagonal, mask = ("mask", mask), full()
    elif is_causal_bias(bias):
        diagonal, bias = ("bias", bias), None
    mask = as_mask(mask, "attention: mask")
    q, k, v = plain_array("q", q), plain_array("k", k), plain_array("v", v)
    rank, lead = check_arrays(q, k, v)
    q, k, v = (_as_rows(x, rank, lead) for x in (q, k, v))
    (rows, heads, nq, size), nk = q.shape, k.shape[2]
    check_batch(mask, rank, rows, heads)
    if bias is not None:
        bias = check_bias(plain_array("bias", bias), q, (rows, heads, nq, nk), lead)
    if sinks is not None:
        sinks = check_sinks(plain_array("sinks", sinks), q, heads)
    check_numbers(scale, softcap, dropout)
    if return_weights and (isinstance(q, np.ndarray) or q.is_cpu):
        check_weights((rows, heads, nq, nk), q.dtype.itemsize, dtype_name(q.dtype))
    given = q_positions is not None or k_positions is not None
    keys = _counted(0, nk) if k_positions is None else check_positions("k_positions", k_positions, rows, nk)
    start = max(nk - nq, 0)
    if q_positions is not None:
        queries = check_positions("q_positions", q_positions, rows, nq)
    elif nq > nk and mask.asks_query:
        default_positions(mask, nq, nk)  # raises with the fix
    elif k_positions is not None and mask.asks_query:
        queries = keys[:, start:]  # the positions of the last nq keys, be they shifted, padded or a batch of both
    else:
        queries = _counted(start, start + nq)
    if diagonal is not None:
        if given:
            raise CallError(
                f"attention: {diagonal[0]} is a CausalBias, which counts queries and keys by order, but positions came.\n"
                'Fix: the mask "causal", which compares positions.'
            )
        by_order = as_mask_by_order(f"attention: {diagonal[0]}", diagonal[1], nq, nk)
        mask = by_order if mask == full() else mask & by_order
        given = nq > nk  # no other call takes these places unless they are given
    is_numpy = isinstance(q, np.ndarray)
    inputs = Inputs(q, k, v, bias, sinks)
    records = not is_numpy and _records_gradients()
    if records:
        check_recorded(inputs._asdict())
    call = Call(
        q=_info(q, records),
        k=_info(k, records),
        v=_info(v, records),
        bias=None if bias is None else _info(bias, records),
        sinks=None if sinks is None else _info(sinks, records),
        is_numpy=is_numpy,
        device="cpu" if is_numpy or q.is_cpu else str(q.device.type),
        mask=mask,
        scale=1 / math.sqrt(size) if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        dropout=float(dropout),
        q_positions=queries,
        k_positions=keys,
        positions_given=given,
        return_weights=return_weights,
        return_lse=return_lse,
        threads=thread_count(is_numpy),
        opaque=None if is_numpy else _opaque(inputs),
        transformation=None if is_numpy else _transformation(),
        lead=lead,
        rank=rank,
    )
    return call, inputs


def arrange(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Inputs:
    """The arrays of a call with the signature of one that was described before, in four dimensions."""
    rank, lead = call.rank, call.lead
    if rank != 4:
        q, k, v = (_as_rows(x, rank, lead) for x in (q, k, v))
    bias = None if bias is None else bias_in_four(bias, lead)
    return Inputs(q, k, v, bias, None if sinks is None else packed(sinks))


def _as_rows(x: Any, rank: int, lead: tuple[int, ...]) -> Any:
    """(..., H, N, D), (H, N, D) or (N, D) as (B, H, N, D)."""
    if rank == 4:
        return x
    return x[None, None] if rank == 2 else x.reshape(math.prod(lead), *x.shape[-3:])


def seen_keys(visible: NDArray[np.bool_]) -> slice | None:
    """The keys from the first to the last that anybody sees in a table (B|1, Hq|1, Nq, Nk), where that leaves some out."""
    some = np.flatnonzero(visible.any(axis=(0, 1, 2)))
    if not 0 < len(some) < visible.shape[3]:
        return None
    return slice(int(some[0]), int(some[-1]) + 1)


def _records_gradients() -> bool:
    import torch

    return torch.is_grad_enabled()


def _info(x: Any, records: bool) -> ArrayInfo:
    if isinstance(x, np.ndarray):
        return ArrayInfo(x.shape, tuple(n // x.itemsize for n in x.strides), dtype_name(x.dtype), False)
    return ArrayInfo(tuple(x.shape), tuple(x.stride()), dtype_name(x.dtype), records and x.requires_grad)


def _transformation() -> str | None:
    from lowtri.ops.guards import transformation

    return transformation()


def _opaque(inputs: Inputs) -> str | None:
    """Why a kernel may not read the tensors' memory by itself, or None."""
    from lowtri.compat.torch_private import why_unreadable
    from lowtri.ops.guards import active_mode, is_plain

    if why_unreadable is not None:
        return why_unreadable
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is not None and not is_plain(x):
            return f"{name} is a {type(x).__name__}, or a view, whose numbers do not lie in memory as they are"
    return active_mode()


def _counted(start: int, stop: int) -> NDArray[np.int64]:
    """start .. stop - 1 as positions, (1, N)."""
    positions = np.arange(start, stop)[None]
    positions.setflags(write=False)
    return positions
