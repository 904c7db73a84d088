"""One call of attention, checked once and frozen: what every engine reads.

Whatever the user passed, here ``q`` is (B, Hq, Nq, D), ``k`` (B, Hkv, Nk, D), ``v`` (B, Hkv, Nk, Dv), ``bias`` is None or has four
dimensions that broadcast against (B, Hq, Nq, Nk), and the positions are NumPy integers, (1, N) or (B, N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.atoms import full
from lowtri.masks.mask import Mask, default_positions
from lowtri.masks.plan import Plan, plan
from lowtri.masks.text import as_mask
from lowtri.ops.arguments import (
    check_arrays,
    check_batch,
    check_bias,
    check_numbers,
    check_positions,
    check_sinks,
    dtype_name,
    plain_array,
)
from lowtri.ops.diagonal import as_mask_by_order, is_causal_bias

__all__ = ["Call", "Result", "describe", "dtype_name"]


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call. Arrays are NumPy arrays or torch tensors, all of one kind, dtype and device."""

    q: Any  # (B, Hq, Nq, D)
    k: Any  # (B, Hkv, Nk, D)
    v: Any  # (B, Hkv, Nk, Dv)
    mask: Mask
    scale: float
    softcap: float | None
    bias: Any  # None or (B|1, Hq|1, Nq|1, Nk|1)
    sinks: Any  # None or (Hq,)
    dropout: float
    q_positions: NDArray[np.int64]  # (B|1, Nq)
    k_positions: NDArray[np.int64]  # (B|1, Nk)
    positions_given: bool
    return_weights: bool
    return_lse: bool
    lead: tuple[int, ...]  # the dimensions that the user had before (Hq, Nq, D); what restores the rank
    rank: int

    @property
    def is_numpy(self) -> bool:
        return isinstance(self.q, np.ndarray)

    @property
    def dtype(self) -> str:
        return dtype_name(self.q.dtype)

    @property
    def device(self) -> str:
        return "cpu" if self.is_numpy or self.q.is_cpu else str(self.q.device.type)

    @property
    def group(self) -> int:
        """How many neighbouring query heads one key/value head serves."""
        return int(self.q.shape[1] // self.k.shape[1])

    @property
    def needs_grad(self) -> bool:
        if self.is_numpy:
            return False
        import torch

        if not torch.is_grad_enabled():
            return False
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        return any(x is not None and x.requires_grad for x in (self.bias, self.sinks))

    @cached_property
    def plan(self) -> Plan:
        return plan(self.mask, self.q_positions, self.k_positions)

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

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """Indices of the first key and one past the last that any query in ``start .. stop`` may see, to the tile."""
        found = self.plan
        first, last = found.nk, 0
        for sheet in range(len(found.sheet_pairs)):
            top, bottom = sheet * found.rows + start // 64, sheet * found.rows + -(-stop // 64)
            runs = found.runs[found.row_start[top] : found.row_start[bottom]]
            if len(runs):
                first = min(first, int(runs[:, 0].min()) * found.tile_k)
                last = max(last, int(runs[:, 1].max()) * found.tile_k)
        return (first, min(last, found.nk)) if last else (0, 0)

    def restore(self, x: Any) -> Any:
        """A result (B, Hq, ...) in the rank that the user's q had."""
        if self.rank == 4:
            return x
        if self.rank == 2:
            return x[0, 0]
        return x.reshape(*self.lead, *x.shape[1:])

    def __str__(self) -> str:
        shapes = f"q {tuple(self.q.shape)}   k {tuple(self.k.shape)}   {self.dtype}   {self.device}"
        text = repr(self.mask)
        return f"{shapes}   mask {text if len(text) <= 80 else text[:77] + '...'}"


@dataclass(frozen=True, eq=False)
class Result:
    """What an engine gives back, in four dimensions; ``weights`` and ``lse`` where they were asked for."""

    output: Any  # (B, Hq, Nq, Dv), the dtype of q
    weights: Any = None  # (B, Hq, Nq, Nk), the dtype of q, before dropout
    lse: Any = None  # (B, Hq, Nq), at least float32


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
) -> Call:
    """Check the arguments of a call and freeze them.

    Raises:
        CallError: where they do not fit together; the message names the argument, what came, and the fix.
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
    if rank == 2:
        q, k, v = q[None, None], k[None, None], v[None, None]
    elif rank != 4:
        q, k, v = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in (q, k, v))
    (rows, heads, nq, size), nk = q.shape, k.shape[2]
    check_batch(mask, rank, rows, heads)
    if bias is not None:
        bias = check_bias(plain_array("bias", bias), q, (rows, heads, nq, nk), lead)
    if sinks is not None:
        sinks = check_sinks(plain_array("sinks", sinks), q, heads)
    check_numbers(scale, softcap, dropout)
    given = q_positions is not None or k_positions is not None
    keys = _counted(0, nk) if k_positions is None else check_positions("k_positions", k_positions, rows, nk)
    start = max(nk - nq, 0)
    if q_positions is not None:
        places = check_positions("q_positions", q_positions, rows, nq)
    elif nq > nk and mask.asks_query:
        default_positions(mask, nq, nk)  # raises with the fix
    elif k_positions is not None and mask.asks_query:
        places = keys[:, start:]  # where the last nq keys stand, be they shifted, padded or a batch of both
    else:
        places = _counted(start, start + nq)
    if diagonal is not None:
        if given:
            raise CallError(
                f"attention: {diagonal[0]} is a CausalBias, which counts queries and keys by order, but positions came.\n"
                'Fix: the mask "causal", which compares positions.'
            )
        by_order = as_mask_by_order(f"attention: {diagonal[0]}", diagonal[1], nq, nk)
        mask = by_order if mask == full() else mask & by_order
        given = nq > nk  # no other call takes these places unless they are given
    return Call(
        q=q,
        k=k,
        v=v,
        mask=mask,
        scale=1 / math.sqrt(size) if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        bias=bias,
        sinks=sinks,
        dropout=float(dropout),
        q_positions=places,
        k_positions=keys,
        positions_given=given,
        return_weights=return_weights,
        return_lse=return_lse,
        lead=lead,
        rank=rank,
    )


def _counted(start: int, stop: int) -> NDArray[np.int64]:
    """start .. stop - 1 as positions, (1, N): a view of one array that grows with the longest call."""
    global _count
    count = _count
    if stop > count.shape[1]:
        count = np.arange(2 * stop)[None]
        count.setflags(write=False)
        _count = count
    return count[:, start:stop]


_count = np.arange(0)[None]
