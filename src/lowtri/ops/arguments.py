"""Checks the arguments of attention and describes the call: each error names the argument, what was passed, and the fix.

Small calls take microseconds, so valid arguments pass with few comparisons; messages are composed only for invalid ones.
"""

from __future__ import annotations

import math
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.arrays import is_fake, is_tensor, positions_in_numpy, why_not_plain
from lowtri.masks.label_masks import check_packed_totals
from lowtri.masks.mask import Mask
from lowtri.masks.positions import default_positions
from lowtri.masks.text import as_mask
from lowtri.masks.tile import check_flag, short_repr
from lowtri.ops.call import ArrayInfo, Call, CallOptions, Inputs, positions_of
from lowtri.ops.distance_bias import DistanceBias, distances_of
from lowtri.system import fast_cpus

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_DEFAULTS = CallOptions()
# Half types are computed in float32. Products of scores, caps and gradients stay finite up to these powers of 2.
_LARGEST = dict.fromkeys(("float16", "bfloat16", "float32"), 2.0**96) | {"float64": 2.0**960}


def describe(q: Any, k: Any, v: Any, mask: Any, options: CallOptions = _DEFAULTS) -> tuple[Call, Inputs]:
    """Check the arguments of a call; returns its description and its arrays in four dimensions.

    Raises:
        CallError: where they do not fit together, or the weights do not fit into memory; the message names the argument,
            what it got, and the fix.
        MaskError: where ``mask`` is not a mask.
    """
    for name in ("return_weights", "return_lse", "return_received"):
        flag = getattr(options, name)
        if type(flag) is not bool:
            check_flag("attention", name, flag)
    mask = as_mask(mask, "attention: mask")
    q, k, v = (plain_array(*named) for named in (("q", q), ("k", k), ("v", v)))
    batch_shape = _check_qkv(q, k, v)
    rank = q.ndim
    q, k, v = (_to_4d(x, rank, batch_shape) for x in (q, k, v))
    rows, heads = q.shape[:2]
    nq, nk = q.shape[2], k.shape[2]
    _check_batch(mask, rank, rows, heads)
    bias, sinks = options.bias, options.sinks
    if bias is not None and not isinstance(bias, DistanceBias):
        bias = _checked_bias(plain_array("bias", bias), q, (rows, heads, nq, nk), batch_shape)
    if sinks is not None:
        sinks = _checked_sinks(plain_array("sinks", sinks), q, heads)
    scale, softcap = options.scale, options.softcap
    if scale is not None and not math.isfinite(_number("scale", scale)):
        raise CallError(f"attention: scale is {scale}, but scores are multiplied by a finite number.")
    largest = _LARGEST[dtype_name(q.dtype)]
    if scale is not None and abs(scale) > largest:
        raise CallError(
            f"attention: scale is {float(scale):g}, but scores of {dtype_name(q.dtype)} times more than {largest:g} overflow. "
            "Fix: a smaller scale, or q, k and v in float64."
        )
    if softcap is not None and not 0 < _number("softcap", softcap) < math.inf:
        raise CallError(
            f"attention: softcap is {softcap}, but scores are capped at a positive number. Fix: softcap=None for no cap."
        )
    dropout = options.dropout
    if not 0 <= _number("dropout", dropout) <= 1:
        raise CallError(f"attention: dropout is {dropout}, but it is a probability, 0 .. 1.")
    is_numpy = isinstance(q, np.ndarray)
    if options.return_weights and (is_numpy or q.is_cpu):
        _check_memory((rows, heads, nq, nk), q.dtype.itemsize, dtype_name(q.dtype))
    q_positions, k_positions = options.q_positions, options.k_positions
    given = q_positions is not None or k_positions is not None
    if k_positions is not None:
        k_positions = _checked_positions("k_positions", k_positions, rows, nk)
    if q_positions is not None:
        q_positions = _checked_positions("q_positions", q_positions, rows, nq)
    elif nq > nk and mask.depends_on_query:
        default_positions(mask, nq, nk)  # raises with the fix
    queries, keys = positions_of(mask, nq, nk, q_positions, k_positions)
    if mask.packed_totals:
        end = 1 + max((int(x.max()) for x in (queries, keys) if x.size), default=-1)
        check_packed_totals("attention", mask, end, complete=not given)
    distance_low = None
    if isinstance(bias, DistanceBias):
        distance_low, bias = distances_of(bias, queries, keys)
        bias = _checked_bias(plain_array("bias", bias), q, (rows, heads, 1, bias.shape[3]), ())
    inputs = Inputs(q, k, v, bias, sinks)
    records = False
    unreadable = transformation = None
    if not is_numpy:
        import torch

        from lowtri.ops.tensors import transformation as current_transformation

        records = torch.is_grad_enabled()
        unreadable, transformation = _why_unreadable(inputs), current_transformation()
    if records:
        _check_recorded(inputs)
    infos: Any = {name: x if x is None else _info(x, records) for name, x in inputs._asdict().items()}
    call = Call(
        **infos,
        is_numpy=is_numpy,
        device="cpu" if is_numpy or q.is_cpu else str(q.device.type),
        mask=mask,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        softcap=_usable_cap(softcap, largest),
        dropout=float(dropout),
        q_positions=queries,
        k_positions=keys,
        positions_given=given,
        return_weights=options.return_weights,
        return_lse=options.return_lse,
        return_received=options.return_received,
        threads=thread_count(is_numpy),
        why_unreadable=unreadable,
        transformation=transformation,
        batch_shape=batch_shape,
        rank=rank,
        distance_low=distance_low,
    )
    return call, inputs


def _usable_cap(softcap: float | None, largest: float) -> float | None:
    """A cap whose inverse is finite, too. One so high changes no score, and all so low ones leave scores that count as 0."""
    if softcap is None or softcap > largest:
        return None
    return max(float(softcap), 1 / largest)


def arrange(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Inputs:
    """The arrays of another call with the same signature, in four dimensions."""
    rank, batch_shape = call.rank, call.batch_shape
    if rank != 4:
        q, k, v = (_to_4d(x, rank, batch_shape) for x in (q, k, v))
    if isinstance(bias, DistanceBias):
        assert call.bias is not None and call.distance_low is not None
        bias = bias.along(call.distance_low, call.bias.shape[3])
    elif bias is not None:
        bias = _bias_to_4d(bias, batch_shape)
    return Inputs(q, k, v, bias, None if sinks is None else _contiguous(sinks))


# Arrays.


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


def _check_qkv(q: Any, k: Any, v: Any) -> tuple[int, ...]:
    """Raise unless q, k and v fit together; returns their dimensions before (H, N, D)."""
    if not isinstance(q, np.ndarray) and not is_tensor(q):
        raise CallError(
            f"attention: q is {type(q).__name__}, but it takes NumPy arrays or torch tensors. Fix: np.asarray(q)."
        )
    is_numpy, rank = isinstance(q, np.ndarray), q.ndim
    dtype = dtype_name(q.dtype)
    if dtype not in _FLOATS:
        raise CallError(
            f"attention: q is {dtype}, but attention takes {', '.join(_FLOATS)}. Fix: q.astype(np.float32) or q.float()."
        )
    if is_numpy and dtype == "bfloat16":
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
            raise CallError(
                f"attention: q is {dtype} and {name} is {dtype_name(x.dtype)}. Fix: cast them to one dtype."
            )
        if x.ndim != rank:
            raise CallError(
                f"attention: q has {rank} dimensions, {tuple(q.shape)}, and {name} has {x.ndim}, {tuple(x.shape)}."
            )
    of_q, of_k, of_v = (tuple(x.shape) for x in (q, k, v))
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
        raise CallError("attention: " + problem.format(f"q {of_q}, k {of_k}, v {of_v}"))
    return of_q[:-3]


def _share(heads: int, kv_heads: int) -> bool:
    """Whether each key/value head serves a whole number of query heads; there may be none of either."""
    return heads == kv_heads or (0 not in (heads, kv_heads) and heads % kv_heads == 0)


def _check_kind(name: str, x: Any, q: Any) -> None:
    """Raise unless x comes from the same library as q and is on the same device."""
    is_numpy = isinstance(q, np.ndarray)
    if not (isinstance(x, np.ndarray) if is_numpy else type(x) is type(q) or is_tensor(x)):
        if name == "bias" and isinstance(x, (str, float, int)):
            fix = "lowtri.alibi(slopes), lowtri.distance_bias(table), or an array to add to the scores"
            raise CallError(f"attention: bias: got {short_repr(x)}; expected numbers for pairs. Fix: {fix}.")
        raise CallError(f"attention: q is {_kind(q)} and {name} is {_kind(x)}. Fix: pass all of one kind.")
    if not is_numpy and x.device != q.device:
        raise CallError(f"attention: q is on {q.device} and {name} on {x.device}. Fix: {name}.to(q.device).")
    if is_fake(x) != is_fake(q):
        mode = getattr(x if is_fake(x) else q, "fake_mode", None)
        if mode is not None and not mode.allow_non_fake_inputs:
            raise CallError(
                f"attention: q is a {type(q).__name__} and {name} a {type(x).__name__}. Fix: pass all of one kind."
            )


def _check_batch(mask: Mask, rank: int, rows: int, heads: int) -> None:
    """Raise unless the batch shape of the mask fits the rows and heads of q."""
    batch = mask.batch
    if batch and rank < 4 and batch[0] > 1:
        raise CallError(
            f"attention: mask has batch {batch}, but q, k and v have none. Fix: mask.for_row(row), for the row that q, k and v are."
        )
    if any(n not in (1, size) for n, size in zip(batch, (rows, heads), strict=False)):
        raise CallError(f"attention: mask has batch {batch}, but q has {rows} rows and {heads} heads.")


def _checked_bias(bias: Any, q: Any, shape: tuple[int, ...], batch_shape: tuple[int, ...]) -> Any:
    """The bias in four dimensions that broadcast against ``shape``, (B, Hq, Nq, Nk)."""
    _check_kind("bias", bias, q)
    dtype = dtype_name(bias.dtype)
    if dtype not in _FLOATS:
        fix = " Fix: a table of bools is a mask: lowtri.table(m) or lowtri.hidden(m)." if dtype == "bool" else ""
        raise CallError(f"attention: bias is {dtype}, but numbers are added to the scores.{fix}")
    given_shape = tuple(bias.shape)
    front = given_shape[:-3] if len(given_shape) > 4 else ()
    if not front or (len(front) == len(batch_shape) and _broadcasts(front, batch_shape)):
        bias = _bias_to_4d(bias, batch_shape)
    if bias.ndim != 4 or not _broadcasts(bias.shape, shape):
        raise CallError(
            f"attention: bias is {given_shape}, which does not broadcast against (B, Hq, Nq, Nk) = {shape}."
        )
    return bias


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return all(n in (1, full) for n, full in zip(shape, to, strict=True))


def _bias_to_4d(bias: Any, batch_shape: tuple[int, ...]) -> Any:
    """A bias in four dimensions: its leading dimensions are flattened as those of q are."""
    if bias.ndim <= 4:
        return bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    tail = tuple(bias.shape[-3:])
    if math.prod(bias.shape[:-3]) > 1:
        whole = (*batch_shape, *tail)
        bias = np.broadcast_to(bias, whole) if isinstance(bias, np.ndarray) else bias.expand(whole)
    return bias.reshape(math.prod(bias.shape[:-3]), *tail)


def _checked_sinks(sinks: Any, q: Any, heads: int) -> Any:
    """One logit for each query head, contiguous, since kernels read them so."""
    _check_kind("sinks", sinks, q)
    dtype = dtype_name(sinks.dtype)
    if tuple(sinks.shape) != (heads,) or dtype not in _FLOATS:
        raise CallError(
            f"attention: sinks is {dtype} {tuple(sinks.shape)}, but it holds one logit for each query head: "
            f"floats, ({heads},)."
        )
    return _contiguous(sinks)


def _check_recorded(inputs: Inputs) -> None:
    """Raise if gradients are recorded and a tensor was made in inference mode: torch cannot save it for the backward."""
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    if any(x.requires_grad for x in given.values()):
        for name, x in given.items():
            if x.is_inference():
                raise CallError(
                    f"attention: {name} was made under torch.inference_mode(), but gradients are recorded.\n"
                    f"Fix: {name}.clone(), or call attention under torch.no_grad()."
                )


def _why_unreadable(inputs: Inputs) -> str | None:
    """Why a kernel may not read the tensors' memory by itself, or None."""
    from lowtri.compat.torch_private import why_unreadable
    from lowtri.ops.tensors import active_mode, is_dense_cpu

    if why_unreadable is not None:
        return why_unreadable
    for name, x in inputs._asdict().items():
        if x is not None and not is_dense_cpu(x):
            return f"{name} is a {type(x).__name__} or a view whose data does not lie in memory as it is"
    return active_mode()


def _to_4d(x: Any, rank: int, batch_shape: tuple[int, ...]) -> Any:
    """(..., H, N, D), (H, N, D) or (N, D) as (B, H, N, D)."""
    if rank == 4:
        return x
    if rank == 3:
        return x[None]
    return x[None, None] if rank == 2 else x.reshape(math.prod(batch_shape), *x.shape[-3:])


def _contiguous(x: Any) -> Any:
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def _info(x: Any, records: bool) -> ArrayInfo:
    if isinstance(x, np.ndarray):
        return ArrayInfo(x.shape, tuple(n // x.itemsize for n in x.strides), dtype_name(x.dtype), False)
    return ArrayInfo(tuple(x.shape), tuple(x.stride()), dtype_name(x.dtype), records and x.requires_grad)


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype, NumPy's or torch's: float32."""
    return str(dtype).removeprefix("torch.")


def _kind(x: Any) -> str:
    if is_tensor(x):
        return "a torch tensor"
    return "a NumPy array" if isinstance(x, np.ndarray) else type(x).__name__


# Numbers and positions.


def _number(name: str, value: Any) -> float:
    """A Python number; a tensor is rejected, since its gradient would be lost in silence."""
    if isinstance(value, float | int | np.floating | np.integer):
        return float(value)
    raise CallError(f"attention: {name} is {_kind(value)}, but it takes one plain number. Fix: float({name}).")


def _checked_positions(name: str, positions: Any, rows: int, n: int) -> NDArray[np.int64]:
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


# The machine.


def _check_memory(shape: tuple[int, int, int, int], itemsize: int, dtype: str) -> None:
    """Raise a CallError if the weights (B, Hq, Nq, Nk) do not fit into this machine's memory."""
    size, available = math.prod(shape) * itemsize, _memory_bytes()
    if available is not None and size > available:
        raise CallError(
            f"attention: return_weights=True makes an array {shape} of {dtype}: {size / 2**30:,.0f} GiB, and this machine has "
            f"{available / 2**30:,.0f} GiB.\n"
            "Fix: a part of the queries at a time, attention(q[..., a:b, :], k, v, mask, q_positions=p[a:b], return_weights=True), "
            f"where p are the positions of all queries, by default range({shape[3] - shape[2]}, {shape[3]})."
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


def thread_count(is_numpy: bool) -> int:
    """The threads that a call may use: torch's own setting, or, without torch, :func:`available_threads`.

    >>> thread_count(is_numpy=True) >= 1
    True
    """
    torch = sys.modules.get("torch")
    return available_threads() if torch is None or is_numpy else int(torch.get_num_threads())


@cache
def available_threads() -> int:
    """``OMP_NUM_THREADS``, else the CPUs that this process may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return max(1, min(fast_cpus(), _quota()))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> int:
    """The CPUs that a container's quota allows (cgroup v2, then v1), rounded up; a large number where there is none."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in files).split()
            if int(quota) > 0:
                return -(-int(quota) // int(period))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return 2**16
