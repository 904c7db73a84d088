"""Few queries against a cache, launched."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.backends.cpu.descriptor import address, of_call
from lowtri.backends.cpu.launch import Launch, empty, is_half, kernel_file, room_for_lse
from lowtri.ops.call import Call, seen_keys

__all__ = ["FEW_QUERIES", "decode", "is_decoding"]

FEW_QUERIES = 16  # below, reading the keys and values is the work


def is_decoding(call: Call) -> bool:
    """Whether there are so few queries that reading the cache is the work: and rows that can be read a vector at a time."""
    if call.dtype == "float64":
        return False
    whole = 32 if call.dtype == "bfloat16" else 16
    *_, nq, _, d, dv = call.sizes
    return nq < FEW_QUERIES and d % whole == dv % whole == 0 and call.k.strides[3] == call.v.strides[3] == 1


def decode(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output and log-sum-exp as of ``forward``, for few queries; no plan: one question, or a table of few rows."""
    kernel = kernel_file("decode")
    visible = None if call.shows_all else call.visible()  # (B|1, Hq|1, Nq, Nk)
    if visible is not None:
        visible, k, v, bias = _between(visible, k, v, bias)
    if k.dtype != q.dtype:  # a half type that is not read as it is
        k, v = (x.astype(q.dtype) if isinstance(x, np.ndarray) else x.to(q.dtype) for x in (k, v))
    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    q = np.ascontiguousarray(q) if isinstance(q, np.ndarray) else q.contiguous()
    output, lse = empty(q, (rows, heads, nq, dv)), room_for_lse(q) if want_lse else None
    threads, groups, stacked = call.threads, rows * kv_heads, heads // kv_heads * nq
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
    code = kernel.decode_half if is_half(q) else kernel.decode
    launch = Launch(code, kernel.FIELDS, fields, kernel.room(stacked, d, dv), threads, scratch, zeros="joined")
    launch.run_once()
    return output, lse


def _between(visible: Any, k: Any, v: Any, bias: Any) -> tuple[Any, ...]:
    """Only the keys between the first and the last that anybody sees, and no table where all of these are seen: a window."""
    here = seen_keys(visible)
    if here is not None:
        visible, k, v = visible[..., here], k[:, :, here], v[:, :, here]
        bias = bias[..., here] if bias is not None and bias.shape[3] > 1 else bias
    return None if visible.all() else np.ascontiguousarray(visible), k, v, bias
