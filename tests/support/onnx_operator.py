"""The ``Attention`` operator of the ONNX standard, opsets 23 to 25, on :func:`lowtri.attention`: an oracle.

The standard's own cases and its reference evaluator say what attention is, in words that are not lowtri's. The standard uses
indices where lowtri uses positions, so this file is a translation:

    is_causal, left_window_size, right_window_size    a mask over positions: causal, or a band
    past_key, past_value, nonpad_kv_seqlen            the positions of the queries: after the past
    nonpad_kv_seqlen, a mask for the keys             keys at position -1, which no query sees
    a boolean attn_mask, -inf in an additive one      a table of pairs
    an additive attn_mask                             a bias
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lowtri.dispatch.attend import attention as attend
from lowtri.masks import POSITION_MAX, Mask, band, causal, full, table


class Outputs(NamedTuple):
    """The four outputs, under the standard's names; None where the standard has none."""

    Y: Any  # (B, Hq, Nq, Dv), or (B, Nq, Hq * Dv) for 3-D inputs
    present_key: Any  # (B, Hkv, P + Nk, D)
    present_value: Any  # (B, Hkv, P + Nk, Dv)
    qk_matmul_output: Any  # (B, Hq, Nq, P + Nk)


def attention(
    Q: Any,
    K: Any,
    V: Any,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    *,
    is_causal: bool | int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int | None = None,
    return_qk_matmul: bool = False,
) -> Outputs:
    """The operator, with the inputs and attributes of the standard as arguments.

    Args:
        Q: (B, Hq, Nq, D), or (B, Nq, Hq * D) with the numbers of heads given. All inputs are NumPy
            arrays, or all are torch tensors.
        K: (B, Hkv, Nk, D) or (B, Nk, Hkv * D); Hq is a multiple of Hkv.  V: the same with its own head size Dv.
        attn_mask: bools, True = may see, or floats to add to the scores, where -inf hides. Broadcasts against
            (B, Hq, Nq, P + Nk); keys past a shorter last dimension are hidden.
        past_key, past_value: (B, Hkv, P, D) and (B, Hkv, P, Dv), the present_key and present_value of the previous call.
        nonpad_kv_seqlen: (B,), how many keys of each row are real, if K and V are a whole cache; not together with a past.
        is_causal: whether query i sees key j only for j <= i + offset. The offset is P with a past, ``nonpad_kv_seqlen - Nq`` with
            ``nonpad_kv_seqlen``, else 0 (upper-left alignment).
        scale: factor on the scores; 1 / sqrt(D) by default.
        softcap: c > 0 caps the scaled scores at c * tanh(score / c); 0: no cap.
        q_num_heads, kv_num_heads: the numbers of heads, for 3-D inputs.
        left_window_size, right_window_size: how many keys each query sees before and after its own position; -1 for all.
        qk_matmul_output_mode: the content of the fourth output. 0: the scaled scores; 1: the scores after the softcap; 2: the
            scores with attn_mask added and -inf where hidden; 3: the weights.
        softmax_precision: 1, 10, 11 or 16 (float32, float16, float64, bfloat16). lowtri's softmax is computed in float32
            or better, so only 11 has an effect: everything is then computed in float64.
        return_qk_matmul: whether to compute the fourth output, one number for each pair.

    Returns:
        Y in the dtype and rank of Q; present_key and present_value, which are None with ``nonpad_kv_seqlen``; qk_matmul_output in
        the dtype of Q, or None without ``return_qk_matmul``. A query that sees no key has a row of zeros in Y and in mode 3.

    Source: the ONNX operator schemas, Attention, versions 23, 24 and 25, with the errata of ONNX 1.23.
    """
    q, k, v = split_heads(Q, K, V, q_num_heads, kv_num_heads)
    past, k, v = append_to_past(past_key, past_value, k, v)  # k (B, Hkv, P + Nk, D)
    present_key, present_value = (k, v) if nonpad_kv_seqlen is None else (None, None)
    positioned = positions_of(q, k, past, nonpad_kv_seqlen, band_mask(is_causal, left_window_size, right_window_size))
    bias = None
    if attn_mask is not None:
        allowed, bias = bools_and_bias(four_dimensions(attn_mask, k.shape[2]))
        positioned = positioned.restricted(allowed)
    compute_dtype = work_dtype(q, v, softmax_precision)
    q, k, v = (cast(x, compute_dtype) for x in (q, k, v))
    bias = None if bias is None else cast(bias, compute_dtype)
    cap = None if softcap == 0 else softcap
    return_weights = return_qk_matmul and qk_matmul_output_mode == 3
    options: dict[str, Any] = {"scale": scale, "softcap": cap, "bias": bias}
    result: Any = attend(q, k, v, positioned.mask, **options, **positioned.arguments(), return_weights=return_weights)
    output, scores = result if return_weights else (result, None)
    if return_qk_matmul and not return_weights:
        scores = scores_of(q, k, scale, cap if qk_matmul_output_mode else None)
        if qk_matmul_output_mode == 2:
            scores = hide_scores(scores if bias is None else scores + bias, positioned.visible())
    if Q.ndim == 3:
        output = output.swapaxes(1, 2).reshape(*Q.shape[:2], -1)  # (B, Nq, Hq * Dv)
    scores = None if scores is None else cast(scores, Q.dtype)
    return Outputs(cast(output, Q.dtype), present_key, present_value, scores)


@dataclass(frozen=True)
class PositionedMask:
    """A mask and the positions of queries and keys; no query sees a key at position -1."""

    mask: Mask
    q: NDArray[np.int64]  # (B|1, Nq)
    k: NDArray[np.int64]  # (B|1, Nk)

    def visible(self) -> NDArray[np.bool_]:
        """All pairs, (B|1, H|1, Nq, Nk)."""
        if not self.mask.batch:
            return np.asarray(self.mask(self.q[:, :, None], self.k[:, None, :]))[:, None]
        return np.asarray(self.mask(self.q[0, :, None], self.k[0]))  # a table, which carries its batch in front

    def arguments(self) -> dict[str, Any]:
        """The positions as arguments of `attention`; empty where they are its default, which more backends run without a table."""
        nq = self.q.shape[1]
        nk = self.k.shape[1]
        default = np.array_equal(self.k, np.arange(nk)[None]) and np.array_equal(self.q, np.arange(nk - nq, nk)[None])
        return {} if default and nq <= nk else {"q_positions": self.q, "k_positions": self.k}

    def restricted(self, allowed: NDArray[np.bool_]) -> PositionedMask:
        """Intersect with a table (B|1, H|1, Nq|1, Nk), True = may see.

        Where the table is the same for all queries, hidden keys get position -1; else all becomes one table.
        """
        if allowed.all():
            return self
        nq = self.q.shape[1]
        nk = allowed.shape[3]
        if allowed.shape[1:3] == (1, 1):
            return PositionedMask(self.mask, self.q, np.where(allowed[:, 0, 0], self.k, -1))
        pairs = self.visible() & allowed  # (B|1, H|1, Nq, Nk)
        rows = max(nk - nq, 0) + np.arange(nq)  # a table's last row is its newest position
        return PositionedMask(table(pairs), rows[None], np.arange(nk)[None])


def band_mask(is_causal: bool | int, left: int, right: int) -> Mask:
    """The mask over positions that the three attributes describe."""
    after = 0 if is_causal else right
    if left < 0:
        if after < 0:
            return full()
        return causal() if after == 0 else band(POSITION_MAX, after)
    return band(left, POSITION_MAX if after < 0 else after)


def positions_of(q: Any, k: Any, past: int, nonpad: Any, mask: Mask) -> PositionedMask:
    """The positions of queries and keys: after the past, or at the end of each row's real keys."""
    nq = q.shape[2]
    nk = k.shape[2]
    keys = np.arange(nk)[None]
    if nonpad is None:
        return PositionedMask(mask, past + np.arange(nq)[None], keys)
    lengths = np.asarray(nonpad)
    first = lengths[:, None].astype(np.int64) - nq  # negative for queries before any key; positions are not,
    shift = max(0, -int(first.min(initial=0)))  # so all positions are shifted
    return PositionedMask(mask, first + shift + np.arange(nq), np.where(keys < lengths[:, None], keys + shift, -1))


def four_dimensions(attn_mask: Any, nk: int) -> Any:
    """attn_mask with four dimensions, its last as long as the keys: (B|1, H|1, Nq|1, Nk)."""
    shape = tuple(attn_mask.shape)
    name = str(attn_mask.dtype).removeprefix("torch.")
    attn_mask = attn_mask.reshape((1,) * (4 - len(shape)) + shape)
    missing = nk - shape[-1]
    if not missing:
        return attn_mask
    hidden = False if name == "bool" else -math.inf
    if isinstance(attn_mask, np.ndarray):
        return np.pad(attn_mask, [(0, 0)] * 3 + [(0, missing)], constant_values=hidden)
    return torch.nn.functional.pad(attn_mask, (0, missing), value=hidden)


def bools_and_bias(attn_mask: Any) -> tuple[NDArray[np.bool_], Any]:
    """The visible pairs, and the bias; -inf hides a pair, and the bias is not read there."""
    is_bool = str(attn_mask.dtype).endswith("bool")
    allowed = attn_mask if is_bool else attn_mask != -math.inf
    return np.asarray(allowed.cpu() if hasattr(allowed, "cpu") else allowed), None if is_bool else attn_mask


def split_heads(Q: Any, K: Any, V: Any, q_heads: int | None, kv_heads: int | None) -> list[Any]:
    """Q, K and V as (B, H, N, D)."""
    split = []
    for x, heads in ((Q, q_heads), (K, kv_heads), (V, kv_heads)):
        split.append(x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2))
    return split


def append_to_past(past_key: Any, past_value: Any, k: Any, v: Any) -> tuple[int, Any, Any]:
    """How long the past is, and keys and values with it in front."""
    if past_key is None:
        return 0, k, v
    return int(past_key.shape[2]), _concatenate(past_key, k), _concatenate(past_value, v)


def scores_of(q: Any, k: Any, scale: float | None, softcap: float | None) -> Any:
    """The scaled scores, capped where there is a softcap: (B, Hq, Nq, Nk), in at least float32."""
    rows, heads, nq = q.shape[:3]
    kv_heads, nk, size = k.shape[1:]
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
    return scores.masked_fill(~torch.from_numpy(visible).to(scores.device), -math.inf)


def _concatenate(past: Any, new: Any) -> Any:
    if isinstance(past, np.ndarray):
        return np.concatenate([past, new], 2)
    return torch.cat([past, new], 2)


def work_dtype(q: Any, v: Any, precision: int | None) -> Any:
    """The dtype to compute in; NumPy's bfloat16 is a foreign type, and computed in float32."""
    if isinstance(q, np.ndarray):
        kind = np.promote_types(q.dtype, v.dtype)
        if precision == 11:
            return np.dtype(np.float64)
        return np.dtype(np.float32) if kind.name == "bfloat16" else kind
    return torch.float64 if precision == 11 else torch.promote_types(q.dtype, v.dtype)


def cast(x: Any, kind: Any) -> Any:
    return x.astype(kind, copy=False) if isinstance(x, np.ndarray) else x.to(kind)
