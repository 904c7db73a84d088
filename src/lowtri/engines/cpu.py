"""The engine ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba and NumPy are loaded late, and where Numba is missing ``why_not`` says so. A plan is made once for a mask and its positions
and kept, bounded in bytes.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np

from lowtri.masks.plan import Plan, plan
from lowtri.ops.call import Call, Result

__all__ = ["name", "run", "why_not"]

name = "cpu"

_PLAN_BYTES = 64 * 2**20
_plans: OrderedDict[Any, Plan] = OrderedDict()
_lock = Lock()


def why_not(call: Call) -> str | None:
    """What the kernels cannot do."""
    if call.device != "cpu":
        return f"the tensors are on {call.device}"
    if find_spec("numba") is None:
        return "numba is not installed"
    missing = {
        "it does not drop weights": bool(call.dropout),
        "it does not return weights": call.return_weights,
        "it has no float64": call.dtype == "float64",
        "it has no gradient": call.needs_grad,
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def run(call: Call) -> Result:
    """Run the kernels; half types are computed in float32 and rounded once."""
    from lowtri.kernels import forward as kernel
    from lowtri.kernels.workers import run_team

    q, k, v, bias, sinks = (_float32(x) for x in (call.q, call.k, call.v, call.bias, call.sinks))
    rows, heads, nq, _ = q.shape
    dv = v.shape[3]
    output, lse = _empty(q, (rows, heads, nq, dv)), _empty(q, (rows, heads, nq))
    found = _plan(call, kernel.KEYS)
    threads = min(_threads(call), rows * heads * found.rows)
    room = -(-kernel.room(q.shape[3], dv) // 64) * 64
    rooms = np.empty(threads * room + 64, np.uint8)
    sheet = found.sheet
    fields = {
        "tasks": rows * heads * found.rows,
        "room": -(-rooms.ctypes.data // 64) * 64,
        "room_bytes": room,
        **{"batch": rows, "heads": heads, "group": call.group, "nq": nq, "nk": k.shape[2], "d": q.shape[3], "dv": dv},
        "rows": found.rows,
        **_strided("q", q),
        **_strided("k", k),
        **_strided("v", v),
        **{name: value for name, value in _strided("o", output).items() if name != "o_d"},
        "lse": _address(lse) if call.return_lse else 0,
        **_bias_fields(bias),
        "sinks": 0 if sinks is None else _address(sinks),
        "sheet": sheet.ctypes.data,
        "sheet_b": sheet.shape[1] if sheet.shape[0] > 1 else 0,
        "sheet_h": 1 if sheet.shape[1] > 1 else 0,
        "row_start": found.row_start.ctypes.data,
        "runs": found.runs.ctypes.data,
        "tile_bits": found.tile_bits.ctypes.data,
        "bits": found.bits.ctypes.data,
        "scale": _bits(call.scale),
        "softcap": _bits(call.softcap or 0.0),
    }
    descriptor = np.array([fields.get(field, 0) for field in kernel.FIELDS], np.int64)
    descriptor[0] = descriptor.ctypes.data
    run_team(kernel.forward, descriptor.ctypes.data, threads)
    return Result(_as(output, call.q), None, lse)


def _plan(call: Call, tile_k: int) -> Plan:
    """The plan of a call, from the cache where the same mask and positions came before."""
    places: Any = (call.q.shape[2], call.k.shape[2])
    if call.positions_given:
        places = (
            call.q_positions.shape,
            call.q_positions.tobytes(),
            call.k_positions.shape,
            call.k_positions.tobytes(),
        )
    key = (call.mask, places, tile_k)
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    found = plan(call.mask, call.q_positions, call.k_positions, tile_k=tile_k)
    with _lock:
        _plans[key] = found
        while len(_plans) > 1 and sum(one.nbytes for one in _plans.values()) > _PLAN_BYTES:
            _plans.popitem(last=False)
    return found


def _threads(call: Call) -> int:
    if call.is_numpy:
        import os

        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import torch

    return torch.get_num_threads()


def _float32(x: Any) -> Any:
    if x is None:
        return None
    return np.asarray(x, np.float32) if isinstance(x, np.ndarray) else x.detach().float()


def _as(x: Any, like: Any) -> Any:
    return x.astype(like.dtype, copy=False) if isinstance(x, np.ndarray) else x.to(like.dtype)


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, np.float32) if isinstance(like, np.ndarray) else like.new_empty(shape)


def _address(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


def _strides(x: Any) -> tuple[int, ...]:
    return tuple(step // 4 for step in x.strides) if isinstance(x, np.ndarray) else tuple(x.stride())


def _strided(letter: str, x: Any) -> dict[str, int]:
    return {letter: _address(x), **{f"{letter}_{axis}": step for axis, step in zip("bhnd", _strides(x), strict=True)}}


def _bias_fields(bias: Any) -> dict[str, int]:
    if bias is None:
        return {"bias": 0}
    steps = (step if size > 1 else 0 for size, step in zip(bias.shape, _strides(bias), strict=True))
    return {"bias": _address(bias), **{f"bias_{axis}": step for axis, step in zip("bhqk", steps, strict=True)}}


def _bits(value: float) -> int:
    assert math.isfinite(value)
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
