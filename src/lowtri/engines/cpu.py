"""The engine ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba is loaded late, and where it is missing ``why_not`` says so.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from lowtri.engines.decode import decode, is_decoding
from lowtri.engines.launch import forward, readable
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
    if call.dropout:
        return "it does not drop weights"
    if 0 in call.q.shape or 0 in call.v.shape:
        return "there is nothing to attend to"
    return None


def run(call: Call) -> Result:
    """Run the kernels. Half types are read as they are, or cast where this CPU has no instructions for them."""
    if call.needs_grad:
        from lowtri.engines.gradient import Kernels

        output, lse = Kernels.apply(call, None, call.q, call.k, call.v, call.bias, call.sinks)
        return Result(output, _weights(call), lse)
    q, k, v, bias, sinks = call.q, call.k, call.v, call.bias, call.sinks
    beside = call.dtype if call.dtype == "float64" else "float32"
    if call.dtype != beside and not readable(q, k, v):
        q, k, v = (_cast(x, beside) for x in (q, k, v))
    kernel = decode if is_decoding(q, k, v) else forward
    output, lse = kernel(call, q, k, v, _cast(bias, beside), _cast(sinks, beside), call.return_lse)
    if q is not call.q:
        output = _cast(output, call.dtype)
    return Result(output, _weights(call), lse)


def _weights(call: Call) -> Any:
    """The weights, where they are asked for."""
    if not call.return_weights:
        return None
    from lowtri.engines.weights import weights_of

    return weights_of(call)


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
    from lowtri.engines.memory import is_plain, why_not_now

    for name in ("q", "k", "v", "bias", "sinks"):
        x = getattr(call, name)
        if x is not None and not is_plain(x):
            return f"{name} is a {type(x).__name__}, or a view, whose numbers do not lie in memory as they are"
    return why_not_now()


def _cast(x: Any, dtype: str) -> Any:
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x.astype(dtype, copy=False)
    import torch

    return x.detach().to(getattr(torch, dtype))
