"""The engine ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba is loaded late, and where it is missing ``why_not`` says so.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from lowtri.engines.launch import decode, forward, is_decoding
from lowtri.ops.call import Call, Result

__all__ = ["name", "run", "why_not"]

name = "cpu"


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
        from lowtri.engines.gradient import Kernels

        output, lse = Kernels.apply(call, call.q, call.k, call.v, call.bias, call.sinks)
        return Result(output, None, lse)
    bias, sinks = _float32(call.bias), _float32(call.sinks)
    q, k, v = call.q, call.k, call.v
    if not _in_pairs(q, k, v):
        q, k, v = _float32(q), _float32(k), _float32(v)
    if is_decoding(q, k, v):
        output, lse = decode(call, q, k, v, bias, sinks)
    else:
        output, lse = forward(call, q, k, v, bias, sinks, call.return_lse)
    return Result(_as(output, call.q), None, lse)


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
