"""The kernels, launched: room for their results, their descriptor, and the team of threads.

Each function takes the call and its arrays in the dtype that the kernel reads, and gives back what it wrote.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from lowtri.engines.descriptor import Fields, Table, address, broadcast, of_call, of_plan, strided
from lowtri.engines.plans import plan_of
from lowtri.engines.worth import FEW_QUERIES
from lowtri.masks.mask import FULL
from lowtri.ops.call import Call

__all__ = ["backward", "decode", "forward", "is_decoding"]


def forward(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output (B, Hq, Nq, Dv) in the dtype of q, float32 or bf16, and log-sum-exp (B, Hq, Nq), float32."""
    from lowtri.kernels import forward as kernel

    rows, heads, nq, d = q.shape
    dv = v.shape[3]
    output, lse = _empty(q, (rows, heads, nq, dv)), _empty_float32(q, (rows, heads, nq))
    found = plan_of(call, kernel.KEYS)
    fields = {**of_call(call, q, k, v, bias), **of_plan(found), **strided("q", q), **strided("o", output, "bhn")}
    fields |= {"tasks": rows * heads * found.rows, "lse": address(lse) if want_lse else 0}
    fields |= {"sinks": 0 if sinks is None else address(sinks)}
    code = kernel.forward_half if _is_half(q) else kernel.forward
    _launch(code, kernel.FIELDS, fields, kernel.room(d, dv), _threads(call))
    return output, lse


def is_decoding(q: Any, k: Any, v: Any) -> bool:
    """Whether there are so few queries that reading the cache is the work: and rows that can be read a vector at a time."""
    whole = 32 if _is_half(q) else 16
    if q.shape[2] >= FEW_QUERIES or q.shape[3] % whole or v.shape[3] % 16:
        return False
    return bool(k.strides[3] == v.strides[3] == 4 if isinstance(k, np.ndarray) else k.stride(3) == v.stride(3) == 1)


def decode(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp as of :func:`forward`, for few queries; no plan: one question, or a table of few rows."""
    from lowtri.kernels import decode as kernel

    (rows, heads, nq, _), (_, kv_heads, nk, dv) = q.shape, v.shape
    q = np.ascontiguousarray(q) if isinstance(q, np.ndarray) else q.contiguous()
    output, lse = _empty(q, (rows, heads, nq, dv)), _empty_float32(q, (rows, heads, nq))
    threads, stacked = _threads(call), heads // kv_heads * nq
    parts = max(1, min(2 * threads // (rows * kv_heads), -(-nk // kernel.KEYS)))
    results = np.empty(rows * kv_heads * parts * kernel.part_floats(stacked, dv), np.float32)
    joined = np.zeros(rows * kv_heads, np.int64)
    fields = of_call(call, q, k, v, bias, "bhn")
    fields |= {"q": address(q), "o": address(output), "lse": address(lse)}
    fields |= {"tasks": rows * kv_heads * parts, "parts": parts, "joined": address(joined), "results": address(results)}
    fields |= {"sinks": 0 if sinks is None else address(sinks)}
    visible = None
    if not _all_seen(call):
        visible = np.ascontiguousarray(call.visible())  # (B|1, Hq|1, Nq, Nk)
        by_row, by_head, *_ = (
            step if size > 1 else 0 for size, step in zip(visible.shape, visible.strides, strict=True)
        )
        fields |= {"visible": address(visible), "visible_b": by_row, "visible_h": by_head}
    code = kernel.decode_half if _is_half(q) else kernel.decode
    _launch(code, kernel.FIELDS, fields, kernel.room(stacked, dv), threads)
    return output, lse


def _all_seen(call: Call) -> bool:
    """Whether every query sees every key, by one question about the box of positions around them."""
    if call.mask.batch:
        return False
    q, k = call.q_positions, call.k_positions
    if not call.positions_given:
        return bool(call.mask.tile(int(q[0, 0]), int(q[0, -1]) + 1, 0, k.shape[1]) == FULL)
    if q.min() < 0 or k.min() < 0:
        return False
    return bool(call.mask.tile(int(q.min()), int(q.max()) + 1, int(k.min()), int(k.max()) + 1) == FULL)


def backward(call: Call, q: Any, k: Any, v: Any, bias: Any, lse: Any, d_output: Any, delta: Any) -> tuple[Any, ...]:
    """dq, dk, dv and d bias (or None), float32, from the gradient of the output and delta = sum of dO * O (B, Hq, Nq)."""
    import torch

    from lowtri.kernels import backward as kernel
    from lowtri.kernels.forward import KEYS

    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    found, threads = plan_of(call, KEYS), _threads(call)
    # One task owns a key/value head; where that leaves threads idle its queries are dealt out, each part with sums of its own.
    parts = min(1 if rows * kv_heads % threads == 0 or rows * kv_heads >= 4 * threads else threads, found.rows)
    dq = torch.empty((rows, heads, nq, d))
    dk, dvalue = (torch.zeros((parts, rows, kv_heads, nk, kernel.padded(size))) for size in (d, dv))
    fields = {**of_call(call, q, k, v, bias), **of_plan(found), **strided("q", q), **strided("do", d_output)}
    fields |= {"tasks": parts * rows * kv_heads, "parts": parts, "lse": address(lse), "delta": address(delta)}
    fields |= {"dq": address(dq), "dk": address(dk), "dvalue": address(dvalue)}
    d_bias = None
    if bias is not None and call.bias.requires_grad:
        d_bias = torch.zeros((parts, rows, heads, *bias.shape[2:]))
        fields |= broadcast("dbias", d_bias, "pbhqk")
    _launch(kernel.backward, kernel.FIELDS, fields, kernel.room(d, dv), threads)
    dk, dvalue = dk.sum(0)[..., :d] * call.scale, dvalue.sum(0)[..., :dv]
    return dq, dk, dvalue, None if d_bias is None else d_bias.sum(0).sum_to_size(bias.shape)


def _launch(kernel: Any, names: tuple[str, ...], fields: Fields, room: int, threads: int) -> None:
    from lowtri.kernels.workers import run_team

    threads = min(threads, fields["tasks"])
    room = -(-room // 64) * 64
    rooms = np.empty(threads * room + 64, np.uint8)
    table = Table()
    table.fill(names, fields | {"room": -(-address(rooms) // 64) * 64, "room_bytes": room})
    run_team(kernel, table.address, threads)


def _threads(call: Call) -> int:
    if call.is_numpy:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import torch

    return torch.get_num_threads()


def _is_half(x: Any) -> bool:
    return "bfloat16" in str(x.dtype)


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, np.float32) if isinstance(like, np.ndarray) else like.new_empty(shape)


def _empty_float32(like: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(like, np.ndarray):
        return np.empty(shape, np.float32)
    import torch

    return torch.empty(shape, dtype=torch.float32)
