"""How the kernels read the arrays of a call: their dtypes, strides and spec, and the launches made from them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from lowtri.backends.cpu.arrays import to_dtype
from lowtri.backends.cpu.fields import Fields, address, of_call, packed
from lowtri.backends.cpu.launch import Launch
from lowtri.backends.cpu.specs import pack, spec_for, spec_of
from lowtri.backends.cpu.team import tile_threads
from lowtri.kernels import abi
from lowtri.kernels.scratch import SCRATCH, packed_shared_scratch
from lowtri.ops.call import ArrayInfo, Call, Inputs
from lowtri.ops.distance_bias import first_pair

__all__ = ["ArrayLayout"]


class ArrayLayout:
    """The arrays of a call as the kernels read them.

    Half types are read directly, or cast to float32 if the CPU lacks the instructions.

    Attributes:
        cast: whether q, k and v are cast to float32.
        dtype, compute_dtype: of the arrays that the kernels read, and of sums, log-sum-exps, biases and gradients.
        arrays: q, k and v.
        unchanged: whether the kernels read the tensors as they are, and there are no others.
    """

    def __init__(self, call: Call, decodes: bool) -> None:
        self.call, self.decodes = call, decodes
        self.cast = spec_of("forward", call) is None
        self.compute_dtype = "float64" if call.dtype == "float64" else "float32"
        self.dtype = "float32" if self.cast else call.dtype
        self.arrays = [pack(x) for x in (call.q, call.k, call.v)] if self.cast else [call.q, call.k, call.v]
        bias = call.bias
        self.bias_strides = () if bias is None else pack(bias).strides if self._casts(bias) else bias.strides
        self.unchanged = not (call.is_numpy or self.cast or call.bias or call.sinks)
        self.unchanged &= not decodes or call.q.strides == packed(call.q.shape)  # few queries must be contiguous

    @cached_property
    def spec(self) -> Any:
        """The spec of the forward kernel and its gradients."""
        return spec_for("forward", self.dtype, self.arrays)

    def inputs(self, inputs: Inputs) -> Inputs:
        """The arrays in dtypes that the kernels read; ``inputs`` themselves where they are ``unchanged``, which callers ask first."""
        q, k, v, bias, sinks = inputs
        if self.cast:
            q, k, v = (to_dtype(x, "float32") for x in (q, k, v))
        elif self.decodes:
            q = np.ascontiguousarray(q) if self.call.is_numpy else q.contiguous()
        if bias is not None and self.call.bias is not None and self._casts(self.call.bias):
            bias = to_dtype(bias, self.compute_dtype)
        return Inputs(q, k, v, bias, None if sinks is None else to_dtype(sinks, self.compute_dtype))

    def first_pair(self, bias: Any, steps: tuple[int, ...]) -> int:
        """The address of the bias, or of its gradient, of the first query and the first key."""
        if bias is None or self.call.distance_low is None:
            return address(bias)
        start = first_pair(self.call)
        assert start is not None, "supports() has rejected other positions"
        return address(bias) + start * steps[-1] * (8 if self.compute_dtype == "float64" else 4)

    def fields(self) -> Fields:
        q, k, v = (x.strides for x in self.arrays)
        return of_call(self.call, q, k, v, self.bias_strides)

    def launch(self, family: str, fields: Fields, plan: Any) -> Launch:
        """The launch of the forward kernel or of its gradients."""
        call, spec = self.call, self.spec
        batch, _, kv_heads, _, nk, d, dv = call.sizes
        scratch, record = SCRATCH[family](spec, d, dv), getattr(abi, family.upper())
        threads = tile_threads(family, call, plan)
        # On tiles the forward transposes V, the backward K.
        shared = packed_shared_scratch(spec, batch * kv_heads, nk, dv if family == "forward" else d)
        zeros = "packed_states" if spec.on_tiles else None
        return Launch(record, spec, fields, threads, scratch, shared, zeros=zeros, keep=plan)

    def _casts(self, bias: ArrayInfo) -> bool:
        return bias.dtype != self.compute_dtype
