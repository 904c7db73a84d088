"""The kernels, launched: room for their results, their descriptor, and the team of threads.

Each function takes the call and its arrays in the dtype that the kernel reads, and gives back what it wrote.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from functools import cache
from typing import Any

import numpy as np

from lowtri.engines.descriptor import Fields, Table, address, broadcast, of_call, strided
from lowtri.engines.plans import plan_of
from lowtri.engines.worth import FEW_QUERIES
from lowtri.masks.mask import FULL
from lowtri.ops.call import Call, dtype_name

__all__ = ["backward", "decode", "forward", "in_pairs", "is_decoding"]


def forward(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output (B, Hq, Nq, Dv) in the dtype of q, and log-sum-exp (B, Hq, Nq) where it is wanted: float32 beside bf16."""
    kernel, code, room = _forward(dtype_name(q.dtype))
    rows, heads, nq, d = q.shape
    output, lse = _empty(q, (rows, heads, nq, v.shape[3])), _lse(q) if want_lse else None
    found = plan_of(call, kernel.KEYS)
    fields = of_call(call, q, k, v, bias, sinks) | found.fields | strided("q", q) | strided("o", output, "bhn")
    fields["tasks"] = rows * heads * found.plan.rows
    fields["lse"] = 0 if lse is None else address(lse)
    _launch(code, kernel.FIELDS, fields, room(d, v.shape[3]), _threads(q))
    return output, lse


def in_pairs(q: Any, k: Any, v: Any) -> bool:
    """Whether bf16 can be read in pairs: the CPU has the instruction, rows are packed, sizes whole vectors."""
    if not _is_half(q):
        return False
    from lowtri.kernels.target import BF16

    sizes = q.shape[3] % 16 == 0 and q.shape[3] >= 32 and v.shape[3] % 16 == 0
    return BF16 and sizes and _even(q) and _even(k) and _even(v)


def _even(x: Any) -> bool:
    b, h, n, d = x.stride()
    return bool(d == 1 and (b | h | n) % 2 == 0)


def is_decoding(q: Any, k: Any, v: Any) -> bool:
    """Whether there are so few queries that reading the cache is the work: and rows that can be read a vector at a time."""
    if dtype_name(q.dtype) == "float64":
        return False
    whole = 32 if _is_half(q) else 16
    if q.shape[2] >= FEW_QUERIES or q.shape[3] % whole or v.shape[3] % whole:
        return False
    return bool(
        k.strides[3] == v.strides[3] == k.itemsize if isinstance(k, np.ndarray) else k.stride(3) == v.stride(3) == 1
    )


def decode(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output and log-sum-exp as of :func:`forward`, for few queries; no plan: one question, or a table of few rows."""
    kernel = _kernel("decode")
    visible = None if _all_seen(call) else call.visible()  # (B|1, Hq|1, Nq, Nk)
    if visible is not None:
        visible, k, v, bias = _between(visible, k, v, bias)
    (rows, heads, nq, _), (_, kv_heads, nk, dv) = q.shape, v.shape
    q = np.ascontiguousarray(q) if isinstance(q, np.ndarray) else q.contiguous()
    output, lse = _empty(q, (rows, heads, nq, dv)), _lse(q) if want_lse else None
    threads, groups, stacked = _threads(q), rows * kv_heads, heads // kv_heads * nq
    parts = max(1, min(2 * threads // groups, -(-nk // kernel.KEYS)))
    fields = of_call(call, q, k, v, bias, sinks, "bhn")
    fields |= {"q": address(q), "o": address(output), "tasks": groups * parts, "parts": parts}
    if visible is not None:
        by_row, by_head, *_ = (step if n > 1 else 0 for n, step in zip(visible.shape, visible.strides, strict=True))
        fields |= {"visible": address(visible), "visible_b": by_row, "visible_h": by_head}
    scratch = {"joined": 8 * groups, "results": 4 * groups * parts * kernel.part_floats(stacked, dv)}
    if lse is None:  # the kernel writes it in any case
        scratch["lse"] = 4 * rows * heads * nq
    else:
        fields["lse"] = address(lse)
    code = kernel.decode_half if _is_half(q) else kernel.decode
    _launch(code, kernel.FIELDS, fields, kernel.room(stacked, q.shape[3], dv), threads, scratch, zeros="joined")
    return output, lse


def _between(visible: Any, k: Any, v: Any, bias: Any) -> tuple[Any, ...]:
    """Only the keys between the first and the last that anybody sees, and no table where all of these are seen: a window."""
    some = np.flatnonzero(visible.any(axis=(0, 1, 2)))
    if len(some) and len(some) < visible.shape[3]:
        here = slice(int(some[0]), int(some[-1]) + 1)
        visible, k, v = visible[..., here], k[:, :, here], v[:, :, here]
        bias = bias[..., here] if bias is not None and bias.shape[3] > 1 else bias
    return None if visible.all() else np.ascontiguousarray(visible), k, v, bias


def _all_seen(call: Call) -> bool:
    """Whether every query sees every key, by one question about the box of positions around them."""
    if call.mask.batch:
        return False
    if not call.positions_given:
        nq, nk = call.q.shape[2], call.k.shape[2]
        start = max(nk - nq, 0)
        return call.mask.tile(start, start + nq, 0, nk) is FULL
    q, k = call.q_positions, call.k_positions
    if q.min() < 0 or k.min() < 0:
        return False
    return bool(call.mask.tile(int(q.min()), int(q.max()) + 1, int(k.min()), int(k.max()) + 1) == FULL)


def backward(call: Call, q: Any, k: Any, v: Any, bias: Any, lse: Any, d_output: Any, delta: Any) -> tuple[Any, ...]:
    """dq, dk, dv and d bias (or None), in the dtype of ``lse``, from the output's gradient and delta = sum of dO * O (B, Hq, Nq)."""
    kernel, code, room, padded = _backward(dtype_name(q.dtype))
    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    found, threads = plan_of(call, _kernel("forward").KEYS), _threads(q)
    # One task owns a key/value head; where that leaves threads idle its queries are dealt out, each part with sums of its own.
    parts = min(1 if rows * kv_heads % threads == 0 or rows * kv_heads >= 4 * threads else threads, found.plan.rows)
    if _is_half(q) and not _even(d_output):
        d_output = d_output.contiguous()
    dq = lse.new_empty((rows, heads, nq, d))
    dk, dvalue = (lse.new_zeros((parts, rows, kv_heads, nk, padded(size))) for size in (d, dv))
    fields = of_call(call, q, k, v, bias) | found.fields | strided("q", q) | strided("do", d_output)
    fields |= {"tasks": parts * rows * kv_heads, "parts": parts, "lse": address(lse), "delta": address(delta)}
    fields |= {"dq": address(dq), "dk": address(dk), "dvalue": address(dvalue)}
    d_bias = None
    if bias is not None and call.bias.requires_grad:
        d_bias = lse.new_zeros((parts, rows, heads, *bias.shape[2:]))
        fields |= broadcast("dbias", d_bias, "pbhqk")
    _launch(code, kernel.FIELDS, fields, room(d, dv), threads)
    dk, dvalue = dk.sum(0)[..., :d] * call.scale, dvalue.sum(0)[..., :dv]
    return dq, dk, dvalue, None if d_bias is None else d_bias.sum(0).sum_to_size(bias.shape)


@cache
def _forward(dtype: str) -> tuple[Any, Any, Any]:
    """The table of fields, the kernel for a dtype, and what room it takes."""
    table = _kernel("forward")
    if dtype == "float64":
        return table, _kernel("double").forward_double, _kernel("double").room
    return table, table.forward_half if dtype == "bfloat16" else table.forward, table.room


@cache
def _backward(dtype: str) -> tuple[Any, Any, Any, Any]:
    """The same for the gradients, and how long a row of dK or dV is."""
    table = _kernel("backward")
    if dtype == "float64":
        double = _kernel("double_backward")
        return table, double.backward_double, double.room, double.padded
    return table, table.backward_half if dtype == "bfloat16" else table.backward, table.room, table.padded


@cache
def _kernel(name: str) -> Any:
    """A file of the kernels: loaded late, since Numba is."""
    return importlib.import_module(f"lowtri.kernels.{name}")


def _launch(
    kernel: Any,
    names: tuple[str, ...],
    fields: Fields,
    room: int,
    threads: int,
    scratch: dict[str, int] | None = None,
    zeros: str = "",
) -> None:
    """Run a kernel. room: bytes for each thread; scratch: bytes for all together, by field; zeros: the field that begins as 0."""
    threads, room = min(threads, fields["tasks"]), _whole(room)
    try:
        desk = _desks.pop()
    except IndexError:  # the first call, or one beside another
        desk = _Desk()
    shared = {name: _whole(size) for name, size in (scratch or {}).items()}
    at = desk.reserve(threads * room + sum(shared.values()))
    fields["room"], fields["room_bytes"] = at, room
    at += threads * room
    for name, size in shared.items():
        fields[name] = at
        if name == zeros:
            ctypes.memset(at, 0, size)
        at += size
    desk.table.fill(names, fields)
    _kernel("workers").run_team(kernel, desk.table.address, threads)
    if desk.size <= _KEPT:
        _desks.append(desk)


class _Desk:
    """Memory that one launch works in and a later one can use again: the descriptor, and rooms."""

    def __init__(self) -> None:
        self.table, self.size = Table(), 0

    def reserve(self, size: int) -> int:
        """The address of at least ``size`` bytes, a multiple of 64."""
        if size > self.size:
            self._memory, self.size = np.empty(size + 64, np.uint8), size
            self._address = _whole(address(self._memory))
        return self._address


_KEPT = 2**24  # bytes of a desk that is worth keeping
_desks: list[_Desk] = []  # as many as ever worked at once; each is in one launch at a time


def _whole(size: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size // 64) * 64


def _threads(q: Any) -> int:
    if isinstance(q, np.ndarray):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import torch

    return torch.get_num_threads()


def _is_half(x: Any) -> bool:
    return dtype_name(x.dtype) == "bfloat16"


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


def _lse(q: Any) -> Any:
    """Room for the log-sum-exp (B, Hq, Nq), float32 beside half types."""
    if not _is_half(q):
        return _empty(q, q.shape[:3])
    import torch

    return q.new_empty(q.shape[:3], dtype=torch.float32)
