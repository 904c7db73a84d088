"""The ``Attention`` operator of the ONNX standard, opsets 23 to 25, on :func:`lowtri.attention`.

The standard says in indices what lowtri says in places, so most of it is a translation:

    is_causal, left_window_size, right_window_size    one mask over places: causal, or a band
    past_key, past_value, nonpad_kv_seqlen            where the queries stand: behind what was there before
    nonpad_kv_seqlen, a mask for the keys             keys without a place, which nobody sees
    attn_mask of bools, -inf in one of floats         a table of pairs
    attn_mask of floats                               a bias

Nothing here needs the ``onnx`` package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.engines.attend import attention as attend
from lowtri.errors import CallError
from lowtri.masks import END, Mask, band, causal, full, table

__all__ = ["Outputs", "attention"]


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
    engine: str = "auto",
) -> Outputs:
    """Attention with the inputs, attributes and meanings of the standard.

    >>> import numpy as np
    >>> from lowtri.integrations import onnx
    >>> x = np.eye(3, dtype=np.float32)[None, None]  # (B, H, N, D)
    >>> first = onnx.attention(x[:, :, :2], x[:, :, :2], x[:, :, :2], is_causal=1)
    >>> past = {"past_key": first.present_key, "past_value": first.present_value}
    >>> last = onnx.attention(x[:, :, 2:], x[:, :, 2:], x[:, :, 2:], **past, is_causal=1)
    >>> last.Y.round(2)
    array([[[[0.26, 0.26, 0.47]]]], dtype=float32)

    Args:
        Q: (B, Hq, Nq, D), or (B, Nq, Hq * D) with the numbers of heads said. NumPy arrays or torch tensors, all of one kind.
        K: (B, Hkv, Nk, D) or (B, Nk, Hkv * D); Hq is a multiple of Hkv.  V: the same with its own head size Dv.
        attn_mask: bools, True = may see, or floats to add to the scores, where -inf hides. Broadcasts against
            (B, Hq, Nq, P + Nk); a last dimension that is shorter hides the keys behind it.
        past_key, past_value: (B, Hkv, P, D) and (B, Hkv, P, Dv), what the last call gave as present.
        nonpad_kv_seqlen: (B,), how many keys of each row are real, where K and V are a whole cache; not with a past.
        is_causal: whether query i sees key j only for j <= i + offset: offset is P with a past, ``nonpad_kv_seqlen - Nq``
            with that, else 0, so that more keys than queries start at the top left.
        scale: factor on the scores; 1 / sqrt(D) by default.
        softcap: c > 0 caps the scaled scores at c * tanh(score / c); 0 does not.
        q_num_heads, kv_num_heads: for 3-D inputs.
        left_window_size, right_window_size: how many keys each query sees back and ahead besides its own place; -1 for all.
        qk_matmul_output_mode: what the fourth output holds: 0 the scaled scores, 1 after the softcap, 2 with attn_mask added
            and -inf where hidden, 3 the weights.
        softmax_precision: 1, 10, 11 or 16 (float32, float16, float64, bfloat16). lowtri's softmax has at least float32,
            so that only 11 changes anything: then everything is computed in float64.
        return_qk_matmul: whether the fourth output is wanted; it is as large as all pairs.
        engine: as in :func:`lowtri.attention`.

    Returns:
        Y in the dtype and rank of Q; present_key and present_value, None with ``nonpad_kv_seqlen``; qk_matmul_output in the
        dtype of Q, None unless asked for. A query that sees nothing has a row of zeros, in Y and in mode 3.

    Raises:
        CallError: if inputs and attributes do not fit together.

    Source: the ONNX operator schemas, Attention, versions 23, 24 and 25, with the errata of ONNX 1.23.
    """
    inputs = {"Q": Q, "K": K, "V": V, "attn_mask": attn_mask, "past_key": past_key, "past_value": past_value}
    _check(qk_matmul_output_mode, softmax_precision, left_window_size, right_window_size, **inputs)
    q, k, v = _heads_apart(Q, K, V, q_num_heads, kv_num_heads)
    past, k, v = _behind(past_key, past_value, nonpad_kv_seqlen, k, v)  # k (B, Hkv, P + Nk, D)
    present_key, present_value = (k, v) if nonpad_kv_seqlen is None else (None, None)
    places = _places(q, k, past, nonpad_kv_seqlen, _band(is_causal, left_window_size, right_window_size))
    bias = None
    if attn_mask is not None:
        allowed, bias = _bools_and_bias(_whole(attn_mask, q, k.shape[2]))
        places = places.restricted(allowed)
    work = _work_dtype(q, v, softmax_precision)
    q, k, v, bias = (None if x is None else _cast(x, work) for x in (q, k, v, bias))
    capped = None if softcap == 0 else softcap
    weighed = return_qk_matmul and qk_matmul_output_mode == 3
    options: dict[str, Any] = {"scale": scale, "softcap": capped, "bias": bias, "engine": engine}
    found = attend(q, k, v, places.mask, **options, **places.stated(), return_weights=weighed)
    output, scores = found if weighed else (found, None)
    if return_qk_matmul and not weighed:
        scores = _scores(q, k, scale, capped if qk_matmul_output_mode else None)
        if qk_matmul_output_mode == 2:
            scores = _hide(scores if bias is None else scores + bias, places.visible())
    if Q.ndim == 3:
        output = output.swapaxes(1, 2).reshape(*Q.shape[:2], -1)  # (B, Nq, Hq * Dv)
    scores = None if scores is None else _cast(scores, Q.dtype)
    return Outputs(_cast(output, Q.dtype), present_key, present_value, scores)


# Who may see whom.


@dataclass(frozen=True)
class _Places:
    """A mask and the places it is asked about; a key without a place (-1) is seen by nobody."""

    mask: Mask
    q: NDArray[np.int64]  # (B|1, Nq)
    k: NDArray[np.int64]  # (B|1, Nk)

    def visible(self) -> NDArray[np.bool_]:
        """All pairs, (B|1, H|1, Nq, Nk)."""
        if not self.mask.batch:
            return np.asarray(self.mask(self.q[:, :, None], self.k[:, None, :]))[:, None]
        return np.asarray(self.mask(self.q[0, :, None], self.k[0]))  # a table, which carries its batch in front

    def stated(self) -> dict[str, Any]:
        """The places as a call takes them; none where they are its own default, which more engines run without a table."""
        nq, nk = self.q.shape[1], self.k.shape[1]
        usual = np.array_equal(self.k, np.arange(nk)[None]) and np.array_equal(self.q, np.arange(nk - nq, nk)[None])
        return {} if usual and nq <= nk else {"q_positions": self.q, "k_positions": self.k}

    def restricted(self, allowed: NDArray[np.bool_]) -> _Places:
        """With a table (B|1, H|1, Nq|1, Nk) of pairs that may see each other: a row for all queries takes keys away,
        anything else becomes a table of indices, with all that was said before written into it."""
        if allowed.all():
            return self
        nq, nk = self.q.shape[1], allowed.shape[3]
        if allowed.shape[1:3] == (1, 1):
            return _Places(self.mask, self.q, np.where(allowed[:, 0, 0], self.k, -1))
        pairs = self.visible() & allowed  # (B|1, H|1, Nq, Nk)
        last = max(nk - nq, 0) + np.arange(nq)  # where a table has its rows
        return _Places(table(pairs), last[None], np.arange(nk)[None])


def _band(is_causal: bool | int, left: int, right: int) -> Mask:
    after = 0 if is_causal else right
    if left < 0:
        return full() if after < 0 else causal() if after == 0 else band(END, after)
    return band(left, END if after < 0 else after)


def _places(q: Any, k: Any, past: int, nonpad: Any, mask: Mask) -> _Places:
    rows, nq, nk = q.shape[0], q.shape[2], k.shape[2]
    keys = np.arange(nk)[None]
    if nonpad is None:
        return _Places(mask, past + np.arange(nq)[None], keys)
    lengths = np.asarray(nonpad.detach().cpu() if hasattr(nonpad, "detach") else nonpad)
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu" or np.any((lengths < 0) | (lengths > nk)):
        raise CallError(
            f"onnx.attention: nonpad_kv_seqlen is {lengths.dtype} {lengths.tolist()}, but it counts the real keys of each "
            f"row: ({rows},) whole numbers in 0 .. {nk}."
        )
    first = lengths[:, None].astype(np.int64) - nq  # of queries before any key this is negative, and places are not,
    ahead = max(0, -int(first.min(initial=0)))  # so that all places move along
    return _Places(mask, first + ahead + np.arange(nq), np.where(keys < lengths[:, None], keys + ahead, -1))


def _whole(attn_mask: Any, q: Any, nk: int) -> Any:
    """attn_mask with four dimensions, its last as long as the keys: (B|1, H|1, Nq|1, Nk)."""
    shape, name = tuple(attn_mask.shape), str(attn_mask.dtype).removeprefix("torch.")
    if name != "bool" and "float" not in name:
        raise CallError(
            f"onnx.attention: attn_mask is {name} {shape}; it holds bools (True = may see) or floats to add.\n"
            "Fix: attn_mask != 0, after you made sure which way round it is."
        )
    fits = 1 <= len(shape) <= 4 and shape[-1] <= nk
    if not fits or any(n not in (1, m) for n, m in zip(shape[-2::-1], q.shape[2::-1], strict=False)):
        raise CallError(
            f"onnx.attention: attn_mask is {shape}, which does not broadcast against "
            f"(B, Hq, Nq, keys) = {(*q.shape[:3], nk)}."
        )
    attn_mask = attn_mask.reshape((1,) * (4 - len(shape)) + shape)
    missing = nk - shape[-1]
    if not missing:
        return attn_mask
    hidden = False if name == "bool" else -math.inf
    if isinstance(attn_mask, np.ndarray):
        return np.pad(attn_mask, [(0, 0)] * 3 + [(0, missing)], constant_values=hidden)
    return _join(attn_mask, attn_mask.new_full((*attn_mask.shape[:3], missing), hidden), -1)


def _bools_and_bias(attn_mask: Any) -> tuple[NDArray[np.bool_], Any]:
    """Who is allowed, and what is added: -inf allows nobody, and the bias is not read there."""
    is_bool = str(attn_mask.dtype).endswith("bool")
    allowed = attn_mask if is_bool else attn_mask != -math.inf
    return np.asarray(allowed.cpu() if hasattr(allowed, "cpu") else allowed), None if is_bool else attn_mask


# Shapes and dtypes, for NumPy and torch alike.


def _heads_apart(Q: Any, K: Any, V: Any, q_heads: int | None, kv_heads: int | None) -> list[Any]:
    """Q, K and V as (B, H, N, D)."""
    named = list(zip("QKV", (Q, K, V), (q_heads, kv_heads, kv_heads), strict=True))
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x, _ in named)
    if not Q.ndim == K.ndim == V.ndim or Q.ndim not in (3, 4):
        raise CallError(f"onnx.attention: {shapes}; all have 4 dimensions, (B, H, N, D), or 3, (B, N, H * D).")
    if Q.ndim == 3 and (q_heads is None or kv_heads is None):
        raise CallError(f"onnx.attention: {shapes}.\nFix: for 3-D inputs, q_num_heads= and kv_num_heads=.")
    out = []
    for name, x, heads in named:
        if heads is not None and (heads < 1 or (x.shape[1] != heads if x.ndim == 4 else x.shape[2] % heads)):
            raise CallError(f"onnx.attention: {name} is {tuple(x.shape)}, which is not {heads} heads.")
        out.append(x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2))
    return out


def _behind(past_key: Any, past_value: Any, nonpad: Any, k: Any, v: Any) -> tuple[int, Any, Any]:
    """How long the past is, and keys and values with it in front."""
    if past_key is None and past_value is None:
        return 0, k, v
    if past_key is None or past_value is None or nonpad is not None:
        came = [name for name, x in (("past_key", past_key), ("past_value", past_value)) if x is not None]
        came += ["nonpad_kv_seqlen"] * (nonpad is not None)
        raise CallError(
            f"onnx.attention: {' and '.join(came)} came; a past is past_key and past_value, and nonpad_kv_seqlen says that "
            "K and V are the whole cache already.\nFix: the one or the other."
        )
    for name, x, new in (("past_key", past_key, k), ("past_value", past_value, v)):
        if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != (*new.shape[:2], new.shape[3]):
            wanted = f"({new.shape[0]}, {new.shape[1]}, past, {new.shape[3]})"
            raise CallError(f"onnx.attention: {name} is {tuple(x.shape)}; expected {wanted}.")
    if past_key.shape[2] != past_value.shape[2]:
        raise CallError(
            f"onnx.attention: past_key {tuple(past_key.shape)} and past_value {tuple(past_value.shape)} differ in length."
        )
    return int(past_key.shape[2]), _join(past_key, k), _join(past_value, v)


def _scores(q: Any, k: Any, scale: float | None, softcap: float | None) -> Any:
    """What attention works out on its way and does not keep: (B, Hq, Nq, Nk), in at least float32."""
    (rows, heads, nq, size), (kv_heads, nk) = q.shape, k.shape[1:3]
    if isinstance(q, np.ndarray):
        q, k = (x.astype(np.promote_types(x.dtype, np.float32), copy=False) for x in (q, k))
    else:
        q, k = (x.float() if x.element_size() < 4 else x for x in (q, k))
    together = q.reshape(rows, kv_heads, heads // kv_heads * nq, size)  # the query heads of a group below one another
    found = (together @ k.swapaxes(2, 3)).reshape(rows, heads, nq, nk)
    found = found * (1 / math.sqrt(size) if scale is None else scale)
    if softcap is None:
        return found
    return softcap * (np.tanh(found / softcap) if isinstance(found, np.ndarray) else (found / softcap).tanh())


def _hide(scores: Any, visible: NDArray[np.bool_]) -> Any:
    if isinstance(scores, np.ndarray):
        return np.where(visible, scores, -np.inf)
    return scores.masked_fill(~_like(visible, scores), -math.inf)


def _like(array: NDArray[Any], tensor: Any) -> Any:
    import torch

    return torch.from_numpy(array).to(tensor.device)


def _join(one: Any, two: Any, axis: int = 2) -> Any:
    if isinstance(one, np.ndarray):
        return np.concatenate([one, two], axis)
    import torch

    return torch.cat([one, two], axis)


def _work_dtype(q: Any, v: Any, precision: int | None) -> Any:
    """The dtype to compute in; NumPy's bfloat16 is a foreign type, which float32 holds exactly."""
    if isinstance(q, np.ndarray):
        kind = np.promote_types(q.dtype, v.dtype)
        return np.dtype(np.float64 if precision == 11 else np.float32 if kind.name == "bfloat16" else kind)
    import torch

    return torch.float64 if precision == 11 else torch.promote_types(q.dtype, v.dtype)


def _cast(x: Any, kind: Any) -> Any:
    return x.astype(kind, copy=False) if isinstance(x, np.ndarray) else x.to(kind)


def _check(mode: int, precision: int | None, left: int, right: int, **inputs: Any) -> None:
    if mode not in (0, 1, 2, 3):
        raise CallError(f"onnx.attention: qk_matmul_output_mode is {mode}; it is 0, 1, 2 or 3.")
    if precision not in (None, 1, 10, 11, 16):
        raise CallError(
            f"onnx.attention: softmax_precision is {precision}; it is 1 (float32), 10 (float16), 11 (float64) "
            "or 16 (bfloat16)."
        )
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            raise CallError(f"onnx.attention: {name} is {size}; it counts keys, and -1 is for all of them.")
    kinds = {type(x).__module__.split(".")[0] for x in inputs.values() if x is not None}
    if len(kinds) > 1 or not kinds <= {"numpy", "torch"}:
        came = ", ".join(f"{name} {type(x).__name__}" for name, x in inputs.items() if x is not None)
        raise CallError(f"onnx.attention: {came}; it takes NumPy arrays or torch tensors, all of one kind.")
