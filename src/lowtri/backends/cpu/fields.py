"""Fills the fields of a kernel's record, named as in :mod:`lowtri.kernels.abi`, from a call and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from lowtri.masks.plan import Plan
from lowtri.ops.call import ArrayInfo, Call

__all__ = [
    "Fields",
    "Strides",
    "address",
    "broadcast",
    "like_array",
    "of_bias",
    "of_call",
    "of_plan",
    "packed",
    "strides",
]

Fields: TypeAlias = dict[str, Any]
Strides: TypeAlias = tuple[int, ...]  # in elements


def of_call(call: Call, q: Strides, k: Strides, v: Strides, bias: Strides) -> Fields:
    """The fields that every kernel reads: sizes, strides, options."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    return {
        **{"batch": batch, "heads": heads, "group": heads // kv_heads, "nq": nq, "nk": nk, "d": d, "dv": dv},
        **{"q_strides": strides(q), "k_strides": strides(k), "v_strides": strides(v)},
        "bias_strides": of_bias(call, None if call.bias is None else call.bias.shape, bias),
        "options": {"scale": call.scale, "softcap": call.softcap or 0.0},
    }


def of_plan(plan: Plan) -> Fields:
    """The fields of the plan."""
    masks_b, masks_h = plan.mask_index.shape
    return {
        "rows": plan.rows,
        "mask_index": address(plan.mask_index),
        "mask_index_b": masks_h if masks_b > 1 else 0,
        "mask_index_h": 1 if masks_h > 1 else 0,
        "row_start": address(plan.row_start),
        "runs": address(plan.runs),
        "tile_bits": address(plan.tile_bits),
        "bits": address(plan.bits),
    }


def strides(of: Strides) -> Fields:
    """The strides of an array (B, H, N, D)."""
    return dict(zip("bhnd", of, strict=True))


def packed(shape: tuple[int, ...]) -> Strides:
    """The strides of a contiguous array of this shape."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps))


def like_array(x: ArrayInfo, size: int) -> Strides:
    """The strides of an array without gaps that has the sizes of x (B, H, N, D) but for D, and the order of x in memory."""
    (_, heads, n, _), (_, h_step, n_step, _) = x.shape, x.strides
    if h_step < n_step and heads > 1:  # tokens before heads
        return heads * n * size, size, heads * size, 1
    return heads * n * size, n * size, size, 1


def broadcast(shape: Sequence[int] | None, of: Strides, axes: Sequence[str] = "bhqk") -> Fields:
    """The strides of a bias, 0 along broadcast axes; all 0 without a bias."""
    if shape is None:
        return dict.fromkeys(axes, 0)
    return {axis: step if size > 1 else 0 for axis, size, step in zip(axes, shape, of, strict=True)}


def of_bias(call: Call, shape: Sequence[int] | None, of: Strides, axes: Sequence[str] = "bhqk") -> Fields:
    """The strides of a bias of this call, or of its gradient; one over distances q - k ascends with q and descends with k."""
    fields = broadcast(shape, of, axes)
    if shape is not None and call.distance_low is not None:
        fields |= {"q": of[-1], "k": -of[-1]}
    return fields


def address(x: Any) -> int:
    """The address of an array's first element, 0 for None."""
    if x is None:
        return 0
    pointer: int = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
    return pointer
