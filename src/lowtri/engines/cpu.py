"""The engine ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba is loaded late, and where it is missing ``why_not`` says so. A plan is made once for a mask and its positions and kept,
bounded in bytes.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtri.engines.worth import FEW_QUERIES
from lowtri.masks.mask import FULL
from lowtri.masks.plan import Plan, plan
from lowtri.ops.call import Call, Result

if TYPE_CHECKING:
    import torch

__all__ = ["name", "run", "why_not"]

name = "cpu"

_PLAN_BYTES = 64 * 2**20
_plans: OrderedDict[Any, Plan] = OrderedDict()
_lock = Lock()


def why_not(call: Call) -> str | None:
    """What the kernels cannot do."""
    if call.device != "cpu":
        return f"the tensors are on {call.device}"
    trouble = _trouble_with_numba() or _trouble_with_tensors(call)
    if trouble:
        return trouble
    missing = {
        "it does not drop weights": bool(call.dropout),
        "it does not return weights": call.return_weights,
        "it has no float64": call.dtype == "float64",
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def run(call: Call) -> Result:
    """Run the kernels. bf16 has one of its own where the CPU multiplies it; other half types are computed in float32."""
    if call.needs_grad:
        output, lse = _function().apply(call, call.q, call.k, call.v, call.bias, call.sinks)
        return Result(output, None, lse)
    bias, sinks = _float32(call.bias), _float32(call.sinks)
    q, k, v = call.q, call.k, call.v
    if not _in_pairs(q, k, v):
        q, k, v = _float32(q), _float32(k), _float32(v)
    if _is_decoding(q, k, v):
        output, lse = _decode(call, q, k, v, bias, sinks)
    else:
        output, lse = _forward(call, q, k, v, bias, sinks, call.return_lse)
    return Result(_as(output, call.q), None, lse)


def _forward(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output (B, Hq, Nq, Dv) in the dtype of q, float32 or bf16, and log-sum-exp (B, Hq, Nq), float32."""
    from lowtri.kernels import forward as kernel

    rows, heads, nq, d = q.shape
    output, lse = _empty(q, (rows, heads, nq, v.shape[3])), _empty_float32(q, (rows, heads, nq))
    found = _plan(call, kernel.KEYS)
    fields = _common_fields(call, found, q, k, v, bias)
    fields |= {"tasks": rows * heads * found.rows, **_strided("o", output)}
    fields |= {"lse": _address(lse) if want_lse else 0, "sinks": 0 if sinks is None else _address(sinks)}
    half = "bfloat16" in str(q.dtype)
    _launch(
        kernel.forward_half if half else kernel.forward,
        kernel.FIELDS,
        fields,
        kernel.room(d, v.shape[3]),
        _threads(call),
    )
    return output, lse


def _is_decoding(q: Any, k: Any, v: Any) -> bool:
    """Whether there are so few queries that reading the cache is the work: and rows that can be read a vector at a time."""
    whole = 32 if "bfloat16" in str(q.dtype) else 16
    packed = _strides(k)[3] == 1 and _strides(v)[3] == 1
    return q.shape[2] < FEW_QUERIES and packed and q.shape[3] % whole == 0 and v.shape[3] % 16 == 0


def _decode(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp as of :func:`_forward`, for few queries; no plan: one question, or a table of few rows."""
    from lowtri.kernels import decode as kernel

    (rows, heads, nq, _), (_, kv_heads, nk, dv) = q.shape, v.shape
    q = np.ascontiguousarray(q) if isinstance(q, np.ndarray) else q.contiguous()
    output, lse = _empty(q, (rows, heads, nq, dv)), _empty_float32(q, (rows, heads, nq))
    threads = _threads(call)
    parts = max(1, min(2 * threads // (rows * kv_heads), -(-nk // kernel.KEYS)))
    results = np.empty(rows * kv_heads * parts * kernel.part_floats(call.group * nq, dv), np.float32)
    joined = np.zeros(rows * kv_heads, np.int64)
    fields = {**_sizes(call, q, k, v, bias), "q": _address(q), "o": _address(output), "lse": _address(lse)}
    fields |= {"tasks": rows * kv_heads * parts, "parts": parts, "joined": joined.ctypes.data}
    fields |= {"results": results.ctypes.data, "sinks": 0 if sinks is None else _address(sinks)}
    visible = None
    if not _all_seen(call):
        visible = np.ascontiguousarray(call.visible())  # (B|1, Hq|1, Nq, Nk)
        steps = [step if size > 1 else 0 for size, step in zip(visible.shape, visible.strides, strict=True)]
        fields |= {"visible": visible.ctypes.data, "visible_b": steps[0], "visible_h": steps[1]}
    code = kernel.decode_half if "bfloat16" in str(q.dtype) else kernel.decode
    _launch(code, kernel.FIELDS, fields, kernel.room(call.group * nq, dv), threads)
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


def _backward(call: Call, q: Any, k: Any, v: Any, bias: Any, lse: Any, d_output: Any, delta: Any) -> tuple[Any, ...]:
    """dq, dk, dv and d bias (or None), float32, from the gradient of the output and delta = sum of dO * O (B, Hq, Nq)."""
    import torch

    from lowtri.kernels import backward as kernel
    from lowtri.kernels.forward import KEYS

    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    found, threads = _plan(call, KEYS), _threads(call)
    # One task owns a key/value head; where that leaves threads idle its queries are dealt out, each part with sums of its own.
    parts = min(1 if rows * kv_heads % threads == 0 or rows * kv_heads >= 4 * threads else threads, found.rows)
    dq = torch.empty((rows, heads, nq, d))
    dk, dvalue = (torch.zeros((parts, rows, kv_heads, nk, kernel.padded(size))) for size in (d, dv))
    fields = _common_fields(call, found, q, k, v, bias)
    fields |= {"tasks": parts * rows * kv_heads, "parts": parts, **_strided("do", d_output), "lse": _address(lse)}
    fields |= {"delta": _address(delta), "dq": _address(dq), "dk": _address(dk), "dvalue": _address(dvalue)}
    d_bias = None
    if bias is not None and call.bias.requires_grad:
        d_bias = torch.zeros((parts, rows, heads, *bias.shape[2:]))
        steps = [step if size > 1 else 0 for size, step in zip(d_bias.shape, d_bias.stride(), strict=True)]
        fields |= {
            "dbias": _address(d_bias),
            **{f"dbias_{axis}": step for axis, step in zip("pbhqk", steps, strict=True)},
        }
    _launch(kernel.backward, kernel.FIELDS, fields, kernel.room(d, dv), threads)
    dk, dvalue = dk.sum(0)[..., :d] * call.scale, dvalue.sum(0)[..., :dv]
    return dq, dk, dvalue, None if d_bias is None else d_bias.sum(0).sum_to_size(bias.shape)


@cache
def _function() -> type[torch.autograd.Function]:
    """The kernels as a differentiable torch function; made late, since torch is loaded late."""
    import torch

    class Kernels(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, *inputs: torch.Tensor | None) -> Any:
            q, k, v, bias, sinks = (_float32(x) for x in inputs)
            output, lse = _forward(call, q, k, v, bias, sinks, True)
            ctx.call = call
            ctx.save_for_backward(*inputs, output, lse)
            return output.to(call.q.dtype), lse

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, d_output: torch.Tensor, d_lse: torch.Tensor) -> Any:
            *inputs, output, lse = ctx.saved_tensors
            q, k, v, bias, sinks = (_float32(x) for x in inputs)
            d_output = d_output.float()
            nothing = lse == -torch.inf
            delta = ((d_output * output).sum(-1) - d_lse).masked_fill(nothing, 0)
            dq, dk, dv, d_bias = _backward(ctx.call, q, k, v, bias, lse, d_output, delta)
            found = [d.to(x.dtype) for d, x in zip((dq, dk, dv), inputs, strict=False)]
            to_bias = None if d_bias is None else d_bias.to(inputs[3].dtype)
            to_sinks = None
            if sinks is not None:  # a sink takes its share of what every row must give up
                share = torch.exp(sinks[None, :, None] - lse).masked_fill(nothing, 0)
                to_sinks = -(share * delta).sum((0, 2)).to(inputs[4].dtype)
            return (None, *found, to_bias, to_sinks)

    return Kernels


def _sizes(call: Call, q: Any, k: Any, v: Any, bias: Any) -> dict[str, int]:
    """What every kernel reads of a call: sizes, keys and values, options."""
    fields = {"batch": q.shape[0], "heads": q.shape[1], "group": call.group, "nq": q.shape[2], "nk": k.shape[2]}
    fields |= {"d": q.shape[3], "dv": v.shape[3], **_strided("k", k), **_strided("v", v)}
    if bias is not None:
        steps = [step if size > 1 else 0 for size, step in zip(bias.shape, _strides(bias), strict=True)]
        fields |= {"bias": _address(bias), **{f"bias_{axis}": step for axis, step in zip("bhqk", steps, strict=True)}}
    return fields | {"scale": _bits(call.scale), "softcap": _bits(call.softcap or 0.0)}


def _common_fields(call: Call, found: Plan, q: Any, k: Any, v: Any, bias: Any) -> dict[str, int]:
    """What the kernels that follow a plan read: sizes, queries, and the plan."""
    sheet = found.sheet
    fields = {**_sizes(call, q, k, v, bias), **_strided("q", q), "rows": found.rows}
    fields |= {"sheet": sheet.ctypes.data, "sheet_b": sheet.shape[1] if sheet.shape[0] > 1 else 0}
    fields |= {"sheet_h": 1 if sheet.shape[1] > 1 else 0, "row_start": found.row_start.ctypes.data}
    return fields | {
        "runs": found.runs.ctypes.data,
        "tile_bits": found.tile_bits.ctypes.data,
        "bits": found.bits.ctypes.data,
    }


def _launch(kernel: Any, names: tuple[str, ...], fields: dict[str, int], room: int, threads: int) -> None:
    from lowtri.kernels.workers import run_team

    threads = min(threads, fields["tasks"])
    room = -(-room // 64) * 64
    rooms = np.empty(threads * room + 64, np.uint8)
    fields |= {"room": -(-rooms.ctypes.data // 64) * 64, "room_bytes": room}
    descriptor = np.array([fields.get(field, 0) for field in names], np.int64)
    descriptor[0] = descriptor.ctypes.data
    run_team(kernel, descriptor.ctypes.data, threads)


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


@cache
def _trouble_with_numba() -> str | None:
    """Numba trails new Pythons and NumPys: it may be missing, or refuse the NumPy that is here."""
    if find_spec("numba") is None:
        return "numba is not installed"
    try:
        import numba  # noqa: F401
    except Exception as error:  # whatever it raises, another engine can run
        return f"numba cannot be loaded: {error}"
    return None


def _trouble_with_tensors(call: Call) -> str | None:
    """A kernel reads memory: what has none (fake tensors, those inside torch.func) must take another road."""
    if call.is_numpy:
        return None
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    if not all(type(x) in plain for x in (call.q, call.k, call.v)):
        return f"q, k or v is a {type(call.q).__name__}, not a plain tensor"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a transform of torch.func"
    return None


def _threads(call: Call) -> int:
    if call.is_numpy:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import torch

    return torch.get_num_threads()


def _in_pairs(q: Any, k: Any, v: Any) -> bool:
    """Whether bf16 can be read in pairs: the CPU has the instruction, rows are packed, sizes whole vectors."""
    if "bfloat16" not in str(q.dtype):
        return False
    from lowtri.kernels.target import BF16

    sizes = q.shape[3] % 16 == 0 and q.shape[3] >= 32 and v.shape[3] % 16 == 0
    steps = all(x.stride(3) == 1 and all(step % 2 == 0 for step in x.stride()[:3]) for x in (q, k, v))
    return BF16 and sizes and steps


def _float32(x: Any) -> Any:
    if x is None:
        return None
    return np.asarray(x, np.float32) if isinstance(x, np.ndarray) else x.detach().float()


def _as(x: Any, like: Any) -> Any:
    return x.astype(like.dtype, copy=False) if isinstance(x, np.ndarray) else x.to(like.dtype)


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, np.float32) if isinstance(like, np.ndarray) else like.new_empty(shape)


def _empty_float32(like: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(like, np.ndarray):
        return np.empty(shape, np.float32)
    import torch

    return torch.empty(shape, dtype=torch.float32)


def _address(x: Any) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


def _strides(x: Any) -> tuple[int, ...]:
    return tuple(step // 4 for step in x.strides) if isinstance(x, np.ndarray) else tuple(x.stride())


def _strided(name: str, x: Any) -> dict[str, int]:
    return {name: _address(x), **{f"{name}_{axis}": step for axis, step in zip("bhnd", _strides(x), strict=True)}}


def _bits(value: float) -> int:
    """A float64 as the int64 that a descriptor holds."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
