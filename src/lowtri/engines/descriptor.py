"""The fields of a kernel's record, by the names of :mod:`lowtri.kernels.abi`, from a checked call and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from lowtri.masks.plan import Plan
from lowtri.ops.call import Call

__all__ = ["Fields", "address", "broadcast", "of_call", "of_plan", "packed", "steps", "strides"]

Fields: TypeAlias = dict[str, Any]


def of_call(call: Call, q: Any, k: Any, v: Any, bias: Any) -> Fields:
    """What every kernel reads of a call: sizes, strides, options."""
    (batch, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    return {
        **{"batch": batch, "heads": heads, "group": heads // kv_heads, "nq": nq, "nk": nk, "d": d, "dv": dv},
        **{"q_strides": strides(q), "k_strides": strides(k), "v_strides": strides(v)},
        **{"bias_strides": broadcast(bias), "options": {"scale": call.scale, "softcap": call.softcap or 0.0}},
    }


def of_plan(plan: Plan) -> Fields:
    """What the kernels that follow a plan read of it."""
    masks_b, masks_h = plan.sheet.shape
    return {
        "rows": plan.rows,
        "mask_index": address(plan.sheet),
        "mask_index_b": masks_h if masks_b > 1 else 0,
        "mask_index_h": 1 if masks_h > 1 else 0,
        "row_start": address(plan.row_start),
        "runs": address(plan.runs),
        "tile_bits": address(plan.tile_bits),
        "bits": address(plan.bits),
    }


def strides(x: Any) -> Fields:
    """Those of an array (B, H, N, D), in numbers."""
    return dict(zip("bhnd", steps(x), strict=True))


def packed(shape: tuple[int, int, int, int]) -> Fields:
    """Those of an array of this shape without gaps."""
    _, heads, rows, size = shape
    return {"b": heads * rows * size, "h": rows * size, "n": size, "d": 1}


def broadcast(x: Any, axes: Sequence[str] = "bhqk") -> Fields:
    """Those of a bias, 0 along the axes where it has one entry for all; all 0 where there is none."""
    if x is None:
        return dict.fromkeys(axes, 0)
    return {axis: step if size > 1 else 0 for axis, size, step in zip(axes, x.shape, steps(x), strict=True)}


def address(x: Any) -> int:
    """Where an array's first number lies, 0 where there is none."""
    if x is None:
        return 0
    pointer: int = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
    return pointer


def steps(x: Any) -> tuple[int, ...]:
    """Strides in numbers."""
    return tuple(n // x.itemsize for n in x.strides) if isinstance(x, np.ndarray) else x.stride()
