"""Checks of the arguments of attention. Each error names the argument, what was passed, what was expected, and the fix.

Small calls take microseconds, so valid arguments pass with few comparisons; messages are composed only for invalid ones.
"""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.arrays import is_fake, is_tensor, positions_in_numpy, why_not_plain
from lowtri.masks.mask import Mask
from lowtri.masks.tile import shown

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def whole_strides(x: NDArray[Any]) -> bool:
    """Whether the data is aligned and the strides are multiples of the item size."""
    return x.flags.aligned and not any(step % x.itemsize for step in x.strides)


def plain_array(name: str, x: Any, where: str = "attention") -> Any:
    """An array or tensor whose memory holds its numbers, as it is; NumPy's views across the bytes of numbers are copied."""
    if type(x) is np.ndarray:
        return x if whole_strides(x) else x.copy()
    reason = why_not_plain(name, x)
    if reason is not None:
        raise CallError(f"{where}: {reason}")
    if isinstance(x, np.ndarray):  # a memory-mapped file
        return plain_array(name, np.asarray(x), where)
    if is_tensor(x):
        from lowtri.compat.torch_private import is_zero_tensor

        # Zero tensors without memory are materialised: some of torch's own kernels read the memory that they do not have.
        return x.clone() if is_zero_tensor(x) else x
    return x


def check_arrays(q: Any, k: Any, v: Any) -> tuple[int, tuple[int, ...]]:
    """The common rank of q, k and v, and their dimensions before (H, N, D)."""
    if not isinstance(q, np.ndarray) and not is_tensor(q):
        raise CallError(
            f"attention: q is {type(q).__name__}, but it takes NumPy arrays or torch tensors. Fix: np.asarray(q)."
        )
    kind = _dtype(q)
    if kind not in _FLOATS:
        raise CallError(
            f"attention: q is {kind}, but attention takes {', '.join(_FLOATS)}. Fix: q.astype(np.float32) or q.float()."
        )
    is_numpy = isinstance(q, np.ndarray)
    rank = q.ndim
    if is_numpy and kind == "bfloat16":
        raise CallError(
            "attention: q is bfloat16 in NumPy, which is slow there. Fix: a torch tensor, or q.astype(np.float32)."
        )
    if rank < 2:
        raise CallError(f"attention: q is {tuple(q.shape)}, but it is (N, D), (H, N, D) or (..., H, N, D).")
    for name, x in (("k", k), ("v", v)):
        if type(x) is type(q) and x.dtype == q.dtype and x.ndim == rank and (is_numpy or x.device == q.device):
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
    elif rank > 2 and (of_k[-3] != of_v[-3] or not _share(of_q[-3], of_k[-3])):
        problem = (
            "{}: each key/value head serves a whole number of query heads.\n"
            "Fix: the heads stand third from the end, (..., H, N, D); Hq is a multiple of Hkv."
        )
    elif not of_q[:-3] == of_k[:-3] == of_v[:-3]:
        problem = "the batch dimensions differ: {}. Fix: expand them to one size."
    if problem is not None:
        raise CallError("attention: " + problem.format(f"q {tuple(of_q)}, k {tuple(of_k)}, v {tuple(of_v)}"))
    return rank, tuple(of_q[:-3])


def _share(heads: int, kv_heads: int) -> bool:
    """Whether each key/value head serves a whole number of query heads; there may be none of either."""
    return heads == kv_heads or (0 not in (heads, kv_heads) and heads % kv_heads == 0)


def _check_kind(name: str, x: Any, q: Any) -> None:
    """Raise unless x comes from the same library as q and is on the same device."""
    is_numpy = isinstance(q, np.ndarray)
    if not (isinstance(x, np.ndarray) if is_numpy else type(x) is type(q) or is_tensor(x)):
        if name == "bias" and isinstance(x, (str, float, int)):
            fix = "lowtri.alibi(slopes), lowtri.distance_bias(table), or an array to add to the scores"
            raise CallError(f"attention: bias: got {shown(x)}; expected numbers for pairs. Fix: {fix}.")
        raise CallError(f"attention: q is {_kind(q)} and {name} is {_kind(x)}. Fix: pass all of one kind.")
    if not is_numpy and x.device != q.device:
        raise CallError(f"attention: q is on {q.device} and {name} on {x.device}. Fix: {name}.to(q.device).")
    if is_fake(x) != is_fake(q):
        mode = getattr(x if is_fake(x) else q, "fake_mode", None)
        if mode is not None and not mode.allow_non_fake_inputs:
            raise CallError(
                f"attention: q is a {type(q).__name__} and {name} a {type(x).__name__}. Fix: pass all of one kind."
            )


def check_batch(mask: Mask, rank: int, rows: int, heads: int) -> None:
    """Raise unless the batch shape of the mask fits the rows and heads of q."""
    if not mask.batch:
        return
    if rank < 4 and mask.batch[0] > 1:
        raise CallError(
            f"attention: mask has batch {mask.batch}, but q, k and v have none. Fix: x[None] for q, k and v, or mask.at(row)."
        )
    if mask.batch[0] not in (1, rows) or (len(mask.batch) == 2 and mask.batch[1] not in (1, heads)):
        raise CallError(f"attention: mask has batch {mask.batch}, but q has {rows} rows and {heads} heads.")


def check_bias(bias: Any, q: Any, shape: tuple[int, ...], lead: tuple[int, ...]) -> Any:
    """The bias in four dimensions that broadcast against ``shape``, (B, Hq, Nq, Nk)."""
    _check_kind("bias", bias, q)
    kind = _dtype(bias)
    if kind not in _FLOATS:
        fix = " Fix: a table of bools is a mask: lowtri.table(m) or lowtri.hidden(m)." if kind == "bool" else ""
        raise CallError(f"attention: bias is {kind}, but numbers are added to the scores.{fix}")
    given_shape = tuple(bias.shape)
    front = given_shape[:-3] if len(given_shape) > 4 else ()
    if not front or (len(front) == len(lead) and all(n in (1, full) for n, full in zip(front, lead, strict=True))):
        bias = bias_in_four(bias, lead)
    if bias.ndim != 4 or any(n not in (1, full) for n, full in zip(bias.shape, shape, strict=True)):
        raise CallError(
            f"attention: bias is {given_shape}, which does not broadcast against (B, Hq, Nq, Nk) = {shape}."
        )
    return bias


def bias_in_four(bias: Any, lead: tuple[int, ...]) -> Any:
    """A bias in four dimensions: its leading dimensions are flattened as those of q are."""
    if bias.ndim <= 4:
        return bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    tail = tuple(bias.shape[-3:])
    if math.prod(bias.shape[:-3]) > 1:
        whole = (*lead, *tail)
        bias = np.broadcast_to(bias, whole) if isinstance(bias, np.ndarray) else bias.expand(whole)
    return bias.reshape(math.prod(bias.shape[:-3]), *tail)


def check_sinks(sinks: Any, q: Any, heads: int) -> Any:
    """One logit for each query head, contiguous, since kernels read them so."""
    _check_kind("sinks", sinks, q)
    kind = _dtype(sinks)
    if tuple(sinks.shape) != (heads,) or kind not in _FLOATS:
        raise CallError(
            f"attention: sinks is {kind} {tuple(sinks.shape)}, but it holds one logit for each query head: "
            f"floats, ({heads},)."
        )
    return packed(sinks)


def check_recorded(tensors: dict[str, Any]) -> None:
    """Raise if gradients are recorded and a tensor was made in inference mode: torch cannot save it for the backward."""
    given = {name: x for name, x in tensors.items() if x is not None}
    if any(x.requires_grad for x in given.values()):
        for name, x in given.items():
            if x.is_inference():
                raise CallError(
                    f"attention: {name} was made under torch.inference_mode(), but gradients are recorded.\n"
                    f"Fix: {name}.clone(), or call attention under torch.no_grad()."
                )


def packed(x: Any) -> Any:
    """The array, contiguous."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def check_numbers(scale: Any, softcap: Any, dropout: Any) -> None:
    """Check the options that are one number each."""
    if scale is not None and not math.isfinite(_number("scale", scale)):
        raise CallError(f"attention: scale is {scale}, but scores are multiplied by a finite number.")
    if softcap is not None and not 0 < _number("softcap", softcap) < math.inf:
        raise CallError(
            f"attention: softcap is {softcap}, but scores are capped at a positive number. Fix: softcap=None for no cap."
        )
    if not 0 <= _number("dropout", dropout) <= 1:
        raise CallError(f"attention: dropout is {dropout}, but it is a probability, 0 .. 1.")


def check_weights(shape: tuple[int, int, int, int], itemsize: int, dtype: str) -> None:
    """Raise a CallError if the weights (B, Hq, Nq, Nk) do not fit into this machine's memory."""
    size, available = math.prod(shape) * itemsize, _memory_bytes()
    if available is not None and size > available:
        raise CallError(
            f"attention: return_weights=True makes an array {shape} of {dtype}: {size / 2**30:,.0f} GiB, and this machine has "
            f"{available / 2**30:,.0f} GiB.\n"
            "Fix: a part of the queries at a time, attention(q[..., a:b, :], k, v, mask, q_positions=range(a, b), return_weights=True)."
        )


@cache
def _memory_bytes() -> int | None:
    """The memory that this process may use at most; None where the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a Unix
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:  # no control groups
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def check_positions(name: str, positions: Any, rows: int, n: int) -> NDArray[np.int64]:
    """Positions as NumPy integers, (1, N) or (B, N)."""
    array = positions_in_numpy(f"attention: {name}", positions, f"({n},) or ({rows}, {n})")
    if array.size == 0 and n == 0:
        return np.zeros((1, 0), np.int64)
    if array.shape not in ((n,), (rows, n), (1, n)):
        raise CallError(
            f"attention: {name} is {array.dtype} {array.shape}, but it holds whole numbers, ({n},) or ({rows}, {n}): "
            "the position of each token in the sequence, -1 for padding."
        )
    array = np.array(array, ndmin=2)  # a copy: a prepared call outlives the caller's array
    array.setflags(write=False)
    return array


def _number(name: str, value: Any) -> float:
    """A Python number; a tensor is rejected, since its gradient would be lost in silence."""
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


def _kind(x: Any) -> str:
    return "a torch tensor" if is_tensor(x) else "a NumPy array" if isinstance(x, np.ndarray) else type(x).__name__
