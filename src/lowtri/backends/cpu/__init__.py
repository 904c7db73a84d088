"""The backend ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba is loaded late, and where it is missing ``supports`` says so.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from lowtri.backends.cpu.decode import FEW_QUERIES, decode, is_decoding
from lowtri.backends.cpu.launch import forward, in_pairs, kernel_file
from lowtri.masks.formulas import causal
from lowtri.ops.call import Call, Inputs, Result

__all__ = ["PreparedKernels", "cost", "name", "prepare", "supports"]

name = "cpu"

_FIRST_COMPILE = 5e6  # a call that is over in a millisecond anywhere must not wait seconds for a compiler
_MULTIPLICATIONS = 2**25  # about a millisecond on one core
_LARGE_CAST = (
    2**24
)  # of keys and values in a half type: 64 MB in float32, more than is written and read again in a cache
_NUMBERS = 2**20  # of keys and values, for few queries: 4 MB in float32


def supports(call: Call) -> str | None:
    """What the kernels cannot do."""
    if call.device != "cpu":
        return f"the tensors are on {call.device}"
    reason = _numba_missing() or call.opaque
    if reason:
        return reason
    if call.dropout:
        return "it does not drop weights"
    if call.return_weights:
        return "it does not return weights"
    if 0 in call.q.shape or 0 in call.v.shape:
        return "there is nothing to attend to"
    return None


def cost(call: Call) -> float:
    """Of the keys and values that few queries read, or of multiplications; small calls are left to backends without a compiler."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    if nq < FEW_QUERIES:
        numbers = batch * kv_heads * nk * (d + dv)
        whole = d % 32 == 0 and dv % 16 == 0
        small = not whole or numbers < _NUMBERS
        if small:
            return 50 + _FIRST_COMPILE
        return 50 + numbers / (500 if _torch_is_faster(call, numbers) else 3_000)
    multiplications = batch * heads * nq * nk * (d + dv)
    if multiplications < _MULTIPLICATIONS:
        return 100 + _FIRST_COMPILE
    return 100 + multiplications / (10_000 if _torch_is_faster(call, 0) else 50_000)


def _torch_is_faster(call: Call, numbers: int) -> bool:
    """Where torch's function beat the kernel on tensors: dense bf16 on AMX, and caches in a half type that is not read as it is.

    Windows, documents and other masks that hide much stay with the kernel, since torch computes what they hide.
    """
    if call.is_numpy or call.dtype not in ("bfloat16", "float16") or _numba_missing():
        return False
    from lowtri.kernels import target

    if call.q.shape[2] >= FEW_QUERIES:
        dense = call.shows_all or (call.mask == causal() and not call.positions_given)
        return target.AMX and call.dtype == "bfloat16" and dense
    if call.dtype == "bfloat16" and target.BF16:
        return False
    if call.dtype == "float16" and (target.FLOAT16 or target.AMX):
        return True
    return call.group == 1 and numbers >= _LARGE_CAST  # a large cache would be copied to float32


def prepare(call: Call) -> PreparedKernels:
    return PreparedKernels(call)


class PreparedKernels:
    """The plan of the call, in the keys of a kernel's tile."""

    formula_dtype = None
    from_output = True

    def __init__(self, call: Call) -> None:
        self.call = call
        self.plan = None if is_decoding(call) and not call.needs_grad else call.plan(kernel_file("forward").KEYS)
        self.nbytes = 1024 + (0 if self.plan is None else self.plan.nbytes)

    def run(self, inputs: Inputs) -> Result:
        output, lse = self._forward(inputs, self.call.return_lse)
        return Result(output, None, lse)

    def record(self, inputs: Inputs) -> tuple[Result, None]:
        """The gradients begin at the output and the log-sum-exp, and need nothing else."""
        output, lse = self._forward(inputs, True)
        return Result(output, None, lse), None

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        from lowtri.backends.cpu.gradients import gradients

        plan = self.plan or self.call.plan(kernel_file("forward").KEYS)
        return gradients(self.call, plan, inputs, result, d_result)

    def _forward(self, inputs: Inputs, want_lse: bool) -> tuple[Any, Any]:
        """Output and log-sum-exp. bf16 has a kernel of its own where the CPU multiplies it; float16 is computed in float32."""
        call, (q, k, v, bias, sinks) = self.call, inputs
        compute_dtype = call.dtype if call.dtype == "float64" else "float32"
        cast = call.dtype != compute_dtype and not in_pairs(q, k, v)
        bias, sinks = _cast(bias, compute_dtype), _cast(sinks, compute_dtype)
        q = _cast(q, compute_dtype) if cast else q
        if self.plan is None:  # few queries: only the keys that are seen are cast
            output, lse = decode(call, q, k, v, bias, sinks, want_lse)
        else:
            k, v = (_cast(k, compute_dtype), _cast(v, compute_dtype)) if cast else (k, v)
            output, lse = forward(call, self.plan, q, k, v, bias, sinks, want_lse)
        return (_cast(output, call.dtype) if cast else output), lse


@cache
def _numba_missing() -> str | None:
    """Numba trails new Pythons and NumPys: it may be missing, or refuse the NumPy that is here."""
    if find_spec("numba") is None:
        return "numba is not installed"
    try:
        import numba  # noqa: F401
    except Exception as error:  # whatever it raises, another backend can run
        return f"numba cannot be loaded: {error}"
    return None


def _cast(x: Any, dtype: str) -> Any:
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x.astype(dtype, copy=False)
    import torch

    return x.detach().to(getattr(torch, dtype))
