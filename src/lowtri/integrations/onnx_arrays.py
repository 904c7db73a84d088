"""The arrays of ONNX's Attention: splitting heads, appending to the past, computing scores; for NumPy and torch alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError

__all__ = ["append_to_past", "cast", "split_heads", "hide_scores", "scores_of", "work_dtype"]


def split_heads(Q: Any, K: Any, V: Any, q_heads: int | None, kv_heads: int | None) -> list[Any]:
    """Q, K and V as (B, H, N, D)."""
    named = list(zip("QKV", (Q, K, V), (q_heads, kv_heads, kv_heads), strict=True))
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x, _ in named)
    if not Q.ndim == K.ndim == V.ndim or Q.ndim not in (3, 4):
        raise CallError(f"onnx.attention: {shapes}; all have 4 dimensions, (B, H, N, D), or 3, (B, N, H * D).")
    if Q.ndim == 3 and (q_heads is None or kv_heads is None):
        raise CallError(f"onnx.attention: {shapes}.\nFix: for 3-D inputs, q_num_heads= and kv_num_heads=.")
    split = []
    for name, x, heads in named:
        if heads is not None and (x.shape[1] != heads if x.ndim == 4 else x.shape[2] % heads):
            raise CallError(f"onnx.attention: {name} is {tuple(x.shape)}, which is not {heads} heads.")
        split.append(x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2))
    return split


def append_to_past(past_key: Any, past_value: Any, nonpad: Any, k: Any, v: Any) -> tuple[int, Any, Any]:
    """How long the past is, and keys and values with it in front."""
    if past_key is None and past_value is None:
        return 0, k, v
    if past_key is None or past_value is None or nonpad is not None:
        inputs = {"past_key": past_key, "past_value": past_value, "nonpad_kv_seqlen": nonpad}
        given = [name for name, x in inputs.items() if x is not None]
        raise CallError(
            f"onnx.attention: {' and '.join(given)} came; a past is past_key and past_value, and nonpad_kv_seqlen says that "
            "K and V are the whole cache already.\nFix: the one or the other."
        )
    for name, x, new in (("past_key", past_key, k), ("past_value", past_value, v)):
        if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != (*new.shape[:2], new.shape[3]):
            expected = f"({new.shape[0]}, {new.shape[1]}, past, {new.shape[3]})"
            raise CallError(f"onnx.attention: {name} is {tuple(x.shape)}; expected {expected}.")
    if past_key.shape[2] != past_value.shape[2]:
        raise CallError(
            f"onnx.attention: past_key {tuple(past_key.shape)} and past_value {tuple(past_value.shape)} differ in length."
        )
    return int(past_key.shape[2]), _concatenate(past_key, k), _concatenate(past_value, v)


def scores_of(q: Any, k: Any, scale: float | None, softcap: float | None) -> Any:
    """The scaled scores, capped where there is a softcap: (B, Hq, Nq, Nk), in at least float32."""
    (rows, heads, nq, size), (kv_heads, nk) = q.shape, k.shape[1:3]
    if isinstance(q, np.ndarray):
        q, k = (x.astype(np.promote_types(x.dtype, np.float32), copy=False) for x in (q, k))
    else:
        q, k = (x.float() if x.element_size() < 4 else x for x in (q, k))
    grouped = q.reshape(rows, kv_heads, heads // kv_heads * nq, size)  # the queries of all heads of a group
    scores = (grouped @ k.swapaxes(2, 3)).reshape(rows, heads, nq, nk)
    scores = scores * (1 / math.sqrt(size) if scale is None else scale)
    if softcap is None:
        return scores
    return softcap * (np.tanh(scores / softcap) if isinstance(scores, np.ndarray) else (scores / softcap).tanh())


def hide_scores(scores: Any, visible: NDArray[np.bool_]) -> Any:
    if isinstance(scores, np.ndarray):
        return np.where(visible, scores, -np.inf)
    import torch

    return scores.masked_fill(~torch.from_numpy(visible).to(scores.device), -math.inf)


def _concatenate(past: Any, new: Any) -> Any:
    if isinstance(past, np.ndarray):
        return np.concatenate([past, new], 2)
    import torch

    return torch.cat([past, new], 2)


def work_dtype(q: Any, v: Any, precision: int | None) -> Any:
    """The dtype to compute in; NumPy's bfloat16 is a foreign type, and computed in float32."""
    if isinstance(q, np.ndarray):
        kind = np.promote_types(q.dtype, v.dtype)
        return np.dtype(np.float64 if precision == 11 else np.float32 if kind.name == "bfloat16" else kind)
    import torch

    return torch.float64 if precision == 11 else torch.promote_types(q.dtype, v.dtype)


def cast(x: Any, kind: Any) -> Any:
    return x.astype(kind, copy=False) if isinstance(x, np.ndarray) else x.to(kind)
