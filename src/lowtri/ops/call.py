"""One call of attention, checked once and frozen: what every engine reads.

Whatever the user passed, here ``q`` is (B, Hq, Nq, D), ``k`` (B, Hkv, Nk, D), ``v`` (B, Hkv, Nk, Dv), ``bias`` is None or has four
dimensions that broadcast against (B, Hq, Nq, Nk), and the positions are NumPy integers, (1, N) or (B, N).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.mask import Mask, default_positions
from lowtri.masks.plan import Plan, plan
from lowtri.masks.text import as_mask

__all__ = ["Call", "Result", "describe", "dtype_name"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")


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
    mask = as_mask(mask, "attention: mask")
    rank, lead = _check_arrays(q, k, v)
    if rank == 2:
        q, k, v = q[None, None], k[None, None], v[None, None]
    elif rank != 4:
        q, k, v = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in (q, k, v))
    (rows, heads, nq, size), nk = q.shape, k.shape[2]
    _check_batch(mask, rank, rows, heads)
    if bias is not None:
        bias = _check_bias(bias, q, (rows, heads, nq, nk), lead)
    if sinks is not None:
        _check_kind("sinks", sinks, q)
        kind = _dtype(sinks)
        if tuple(sinks.shape) != (heads,) or kind not in _FLOATS:
            raise CallError(
                f"attention: sinks is {kind} {tuple(sinks.shape)}, but it holds one logit for each query head: "
                f"floats, ({heads},)."
            )
    if scale is not None and not math.isfinite(_number("scale", scale)):
        raise CallError(f"attention: scale is {scale}, but scores are multiplied by a finite number.")
    if softcap is not None and not 0 < _number("softcap", softcap) < math.inf:
        raise CallError(
            f"attention: softcap is {softcap}, but scores are capped at a positive number. Fix: softcap=None for no cap."
        )
    if not 0 <= _number("dropout", dropout) <= 1:
        raise CallError(f"attention: dropout is {dropout}, but it is a probability, 0 .. 1.")
    given = q_positions is not None or k_positions is not None
    keys = _counted(0, nk) if k_positions is None else _check_positions("k_positions", k_positions, rows, nk)
    start = max(nk - nq, 0)
    if q_positions is not None:
        places = _check_positions("q_positions", q_positions, rows, nq)
    elif nq > nk and mask.asks_query:
        default_positions(mask, nq, nk)  # raises with the fix
    elif k_positions is not None and mask.asks_query:
        places = keys[:, start:]  # where the last nq keys stand, be they shifted, padded or a batch of both
    else:
        places = _counted(start, start + nq)
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


def _check_arrays(q: Any, k: Any, v: Any) -> tuple[int, tuple[int, ...]]:
    if not isinstance(q, np.ndarray) and not _is_tensor(q):
        raise CallError(
            f"attention: q is {type(q).__name__}, but it takes NumPy arrays or torch tensors. Fix: np.asarray(q)."
        )
    kind = _dtype(q)
    if kind not in _FLOATS:
        raise CallError(
            f"attention: q is {kind}, but attention takes {', '.join(_FLOATS)}. Fix: q.astype(np.float32) or q.float()."
        )
    rank, numpys = q.ndim, isinstance(q, np.ndarray)
    if numpys and kind == "bfloat16":  # another library's type, which NumPy multiplies one number at a time
        raise CallError("attention: q is NumPy's foreign bfloat16. Fix: a torch tensor, or q.astype(np.float32).")
    if rank < 2:
        raise CallError(f"attention: q is {tuple(q.shape)}, but it is (N, D), (H, N, D) or (..., H, N, D).")
    for name, x in (("k", k), ("v", v)):
        if type(x) is type(q) and x.dtype == q.dtype and x.ndim == rank and (numpys or x.device == q.device):
            continue
        _check_kind(name, x, q)
        if x.dtype != q.dtype:
            raise CallError(f"attention: q is {kind} and {name} is {_dtype(x)}. Fix: cast them to one dtype.")
        if x.ndim != rank:
            raise CallError(
                f"attention: q has {rank} dimensions, {tuple(q.shape)}, and {name} has {x.ndim}, {tuple(x.shape)}."
            )
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    problem = None
    if of_q[-1] != of_k[-1] or of_q[-1] == 0:
        problem = "q and k differ in head size D, or it is 0: {}."
    elif of_k[-2] != of_v[-2]:
        problem = "k and v differ in length Nk: {}."
    elif rank > 2 and (of_k[-3] != of_v[-3] or 0 in (of_q[-3], of_k[-3]) or of_q[-3] % of_k[-3]):
        problem = (
            "{}: each key/value head serves a whole number of query heads.\n"
            "Fix: the heads stand third from the end, (..., H, N, D); Hq is a multiple of Hkv."
        )
    elif not of_q[:-3] == of_k[:-3] == of_v[:-3]:
        problem = "the batch dimensions differ: {}. Fix: expand them to one size."
    if problem is not None:
        raise CallError("attention: " + problem.format(f"q {tuple(of_q)}, k {tuple(of_k)}, v {tuple(of_v)}"))
    return rank, tuple(of_q[:-3])


def _check_kind(name: str, x: Any, q: Any) -> None:
    """x is of the same library as q, and on the same device."""
    numpys = isinstance(q, np.ndarray)
    if not (isinstance(x, np.ndarray) if numpys else type(x) is type(q) or _is_tensor(x)):
        raise CallError(f"attention: q is {_kind(q)} and {name} is {_kind(x)}. Fix: pass all of one kind.")
    if not numpys and x.device != q.device:
        raise CallError(f"attention: q is on {q.device} and {name} on {x.device}. Fix: {name}.to(q.device).")


def _check_batch(mask: Mask, rank: int, rows: int, heads: int) -> None:
    if not mask.batch:
        return
    if rank < 4 and mask.batch[0] > 1:
        raise CallError(
            f"attention: mask has batch {mask.batch}, but q, k and v have none. Fix: x[None] for q, k and v, or mask.at(row)."
        )
    if mask.batch[0] not in (1, rows) or (len(mask.batch) == 2 and mask.batch[1] not in (1, heads)):
        raise CallError(f"attention: mask has batch {mask.batch}, but q has {rows} rows and {heads} heads.")


def _check_bias(bias: Any, q: Any, shape: tuple[int, ...], lead: tuple[int, ...]) -> Any:
    _check_kind("bias", bias, q)
    kind = _dtype(bias)
    if kind not in _FLOATS:
        fix = " Fix: a table of bools is a mask: lowtri.table(m) or lowtri.hidden(m)." if kind == "bool" else ""
        raise CallError(f"attention: bias is {kind}, but numbers are added to the scores.{fix}")
    came = tuple(bias.shape)
    if bias.ndim > 4:  # the user's own leading dimensions become rows here as they do for q
        front, tail = came[:-3], came[-3:]
        fits = len(front) == len(lead) and all(n in (1, full) for n, full in zip(front, lead, strict=True))
        if fits and math.prod(front) > 1:
            whole = (*lead, *tail)
            bias = np.broadcast_to(bias, whole) if isinstance(bias, np.ndarray) else bias.expand(whole)
        if fits:
            bias = bias.reshape(math.prod(bias.shape[:-3]), *tail)
    bias = bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    if bias.ndim != 4 or any(n not in (1, full) for n, full in zip(bias.shape, shape, strict=True)):
        raise CallError(f"attention: bias is {came}, which does not broadcast against (B, Hq, Nq, Nk) = {shape}.")
    return bias


def _check_positions(name: str, positions: Any, rows: int, n: int) -> NDArray[np.int64]:
    if _is_tensor(positions):
        positions = positions.detach().cpu().numpy()
    try:
        array = np.asarray(positions)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.size == 0 and n == 0:
        return np.zeros((1, 0), np.int64)
    if array.dtype.kind not in "iu" or array.shape not in ((n,), (rows, n), (1, n)):
        raise CallError(
            f"attention: {name} is {array.dtype} {array.shape}, but it holds whole numbers, ({n},) or ({rows}, {n}): "
            "the place of each in the sequence, -1 where there is no token."
        )
    return np.atleast_2d(array).astype(np.int64, copy=False)


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


def _number(name: str, value: Any) -> float:
    """A plain number; a tensor would lose its gradient here in silence."""
    if type(value) is float:
        return value
    if isinstance(value, float | int | np.floating | np.integer):
        return float(value)
    raise CallError(f"attention: {name} is {_kind(value)}, but it takes one plain number. Fix: float({name}).")


def _dtype(x: Any) -> str:
    return dtype_name(x.dtype)


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype, NumPy's or torch's: float32."""
    return str(dtype).removeprefix("torch.")


def _is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor, without loading torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _kind(x: Any) -> str:
    return "a torch tensor" if _is_tensor(x) else "a NumPy array" if isinstance(x, np.ndarray) else type(x).__name__
