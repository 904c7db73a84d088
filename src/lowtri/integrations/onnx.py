"""The ``Attention`` operator of the ONNX standard, opsets 23 to 25, on :func:`lowtri.attention`.

The standard uses indices where lowtri uses positions, so most of this file is a translation:

    is_causal, left_window_size, right_window_size    a mask over positions: causal, or a band
    past_key, past_value, nonpad_kv_seqlen            the positions of the queries: after the past
    nonpad_kv_seqlen, a mask for the keys             keys at position -1, which no query sees
    a boolean attn_mask, -inf in an additive one      a table of pairs
    an additive attn_mask                             a bias

:mod:`~lowtri.integrations.onnx_positions` computes positions, :mod:`~lowtri.integrations.onnx_arrays` handles shapes and dtypes;
this file holds the function and its checks. The ``onnx`` package is not needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowtri.dispatch.attend import attention as attend
from lowtri.errors import CallError
from lowtri.integrations.onnx_arrays import append_to_past, cast, hide_scores, scores_of, split_heads, work_dtype
from lowtri.integrations.onnx_positions import band_mask, bools_and_bias, four_dimensions, positions_of
from lowtri.masks import POSITION_MAX
from lowtri.ops.arguments import dtype_name, plain_array

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
    """The operator, with the inputs and attributes of the standard as arguments.

    >>> import numpy as np
    >>> from lowtri.integrations import onnx
    >>> x = np.eye(3, dtype=np.float32)[None, None]  # (B, H, N, D)
    >>> first = onnx.attention(x[:, :, :2], x[:, :, :2], x[:, :, :2], is_causal=1)
    >>> past = {"past_key": first.present_key, "past_value": first.present_value}
    >>> last = onnx.attention(x[:, :, 2:], x[:, :, 2:], x[:, :, 2:], **past, is_causal=1)
    >>> last.Y.round(2)
    array([[[[0.26, 0.26, 0.47]]]], dtype=float32)

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
        engine: as in :func:`lowtri.attention`.

    Returns:
        Y in the dtype and rank of Q; present_key and present_value, which are None with ``nonpad_kv_seqlen``; qk_matmul_output in
        the dtype of Q, or None without ``return_qk_matmul``. A query that sees no key has a row of zeros in Y and in mode 3.

    Raises:
        CallError: if inputs and attributes do not fit together.

    Source: the ONNX operator schemas, Attention, versions 23, 24 and 25, with the errata of ONNX 1.23.
    """
    Q, K, V, attn_mask, past_key, past_value = _checked_inputs(
        Q=Q, K=K, V=V, attn_mask=attn_mask, past_key=past_key, past_value=past_value
    )
    _check_attributes(
        is_causal=is_causal,
        return_qk_matmul=return_qk_matmul,
        scale=scale,
        softcap=softcap,
        q_num_heads=q_num_heads,
        kv_num_heads=kv_num_heads,
        left_window_size=left_window_size,
        right_window_size=right_window_size,
        qk_matmul_output_mode=qk_matmul_output_mode,
        softmax_precision=softmax_precision,
    )
    q, k, v = split_heads(Q, K, V, q_num_heads, kv_num_heads)
    past, k, v = append_to_past(past_key, past_value, nonpad_kv_seqlen, k, v)  # k (B, Hkv, P + Nk, D)
    present_key, present_value = (k, v) if nonpad_kv_seqlen is None else (None, None)
    positioned = positions_of(q, k, past, nonpad_kv_seqlen, band_mask(is_causal, left_window_size, right_window_size))
    bias = None
    if attn_mask is not None:
        allowed, bias = bools_and_bias(four_dimensions(attn_mask, q, k.shape[2]))
        positioned = positioned.restricted(allowed)
    compute_dtype = work_dtype(q, v, softmax_precision)
    q, k, v = (cast(x, compute_dtype) for x in (q, k, v))
    bias = None if bias is None else cast(bias, compute_dtype)
    cap = None if softcap == 0 else softcap
    return_weights = return_qk_matmul and qk_matmul_output_mode == 3
    options: dict[str, Any] = {"scale": scale, "softcap": cap, "bias": bias, "engine": engine}
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


# Checks of the inputs.


def _checked_inputs(**inputs: Any) -> list[Any]:
    """Arrays of one library, in the standard's two types: that of Q, K and past_key, and that of V and past_value."""
    inputs = {name: plain_array(name, x, "onnx.attention") for name, x in inputs.items()}
    given = {name: x for name, x in inputs.items() if x is not None or name in ("Q", "K", "V")}
    libraries = {type(x).__module__.split(".")[0] for x in given.values()}
    if len(libraries) > 1 or not libraries <= {"numpy", "torch"} or not all(hasattr(x, "ndim") for x in given.values()):
        listed = ", ".join(f"{name} {type(x).__name__}" for name, x in given.items())
        raise CallError(f"onnx.attention: {listed}; it takes NumPy arrays or torch tensors, all of one kind.")
    types = {name: dtype_name(x.dtype) for name, x in given.items()}
    for name in ("Q", "V"):
        if "float" not in types[name]:
            raise CallError(f"onnx.attention: {name} is {types[name]}, but it holds floats. Fix: cast it.")
    for name, like in (("K", "Q"), ("past_key", "Q"), ("past_value", "V")):
        if types.get(name, types[like]) != types[like]:
            raise CallError(
                f"onnx.attention: {name} is {types[name]} and {like} is {types[like]}. Fix: cast them to one dtype."
            )
    return list(inputs.values())


# For each attribute: the values that it may have, or its type where any number will do; whether None is one; and the same in words.
_FLAG = ((0, 1), False, "is 0 or 1")
_HEADS = (range(1, POSITION_MAX), True, "is a whole number of heads, at least 1")
_WINDOW = (range(-1, POSITION_MAX), False, "counts keys, and -1 is for all of them")
_ATTRIBUTES: dict[str, tuple[Any, bool, str]] = {
    "is_causal": _FLAG,
    "return_qk_matmul": _FLAG,
    "scale": (float, True, "is one plain number. Fix: float(scale)"),
    "softcap": (float, True, "is one plain number. Fix: float(softcap)"),
    "q_num_heads": _HEADS,
    "kv_num_heads": _HEADS,
    "left_window_size": _WINDOW,
    "right_window_size": _WINDOW,
    "qk_matmul_output_mode": (range(4), False, "is 0, 1, 2 or 3"),
    "softmax_precision": ((1, 10, 11, 16), True, "is 1 (float32), 10 (float16), 11 (float64) or 16 (bfloat16)"),
}


def _check_attributes(**attributes: Any) -> None:
    for name, value in attributes.items():
        choices, optional, words = _ATTRIBUTES[name]
        if choices is float:
            fits = isinstance(value, float | int | np.floating | np.integer)
        elif choices == (0, 1):
            fits = isinstance(value, int | np.integer | np.bool_) and value in choices
        else:
            fits = isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) in choices
        if not fits and not (value is None and optional):
            shown = isinstance(value, str | int | float | np.generic) or value is None
            raise CallError(f"onnx.attention: {name} is {repr(value) if shown else type(value).__name__}; it {words}.")
