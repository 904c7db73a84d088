"""A call prepared for the kernels: how they read its arrays, the plan, and the launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from lowtri.backends.base import Prepared
from lowtri.backends.cpu.backward import CpuBackward
from lowtri.backends.cpu.launch import LARGE, Launch, ask_for_large_pages
from lowtri.backends.cpu.layout import (
    ArrayLayout,
    Selection,
    Strides,
    address,
    empty,
    like_array,
    of_plan,
    packed,
    select,
    strides,
    to_dtype,
    torch_dtype,
)
from lowtri.kernels.abi import KEYS
from lowtri.ops.call import Call, Inputs, Result

_MOST_LAYOUTS = 8  # of which a call keeps the prepared gradients

# The strides of q, k, v, the output, its gradient, and the bias.
Layout: TypeAlias = tuple[Strides, Strides, Strides, Strides, Strides, Strides | None]


class CpuForward(Prepared):
    """One launch for the output, and one for the gradients in each layout of what they read.

    The output has the memory layout of q: heads before tokens, or tokens before heads as projections leave them, so that no copy is
    needed on either side.
    """

    computes_gradients = True
    from_output = True

    def __init__(self, call: Call, selection: Selection) -> None:
        self.call, self.reading = call, ArrayLayout(call, selection)
        self.plan = call.plan(KEYS)
        self.output_shape = (*call.q.shape[:3], call.v.shape[3])
        like_q = like_array(self.reading.arrays[0], call.v.shape[3])
        self.output_strides = packed(self.output_shape) if call.is_numpy else like_q
        # The log-sum-exp and what it loses to rounding, if gradients need them; the former alone if it is only returned.
        self.lse_planes = 2 if call.needs_grad else 1 if call.return_lse else 0
        self.sums_shape = (self.lse_planes, *call.q.shape[:3])
        self.sums_strides = packed(self.sums_shape)
        self.sums_dtype = None if call.is_numpy else torch_dtype(self.reading.compute_dtype)
        self.launch = self._prepare_forward(self.plan)
        self.sums_in_dtype = call.dtype == self.reading.compute_dtype  # so are the gradients
        self.qkv_only = self.reading.unchanged and self.lse_planes == 2 and not call.return_lse
        self._gradients: dict[Layout, CpuBackward] = {}
        self.nbytes = 8192 + self.plan.nbytes

    def run(self, inputs: Inputs) -> Result:
        output, sums = self._forward(inputs)
        return Result(output, None, sums[0] if self.call.return_lse else None)

    def record(self, inputs: Inputs) -> tuple[Result, Any]:
        """The result; and the log-sum-exp with what it loses to rounding, (2, B, Hq, Nq)."""
        output, sums = self._forward(inputs)
        # What the user gets may be changed in place.
        return Result(output, None, sums[0].clone() if self.call.return_lse else None), sums

    def _forward(self, inputs: Inputs) -> tuple[Any, Any]:
        """Output (B, Hq, Nq, Dv) in the dtype of q, and the sums."""
        reading = self.reading
        if reading.unchanged:
            return self.record_qkv(*inputs[:3])
        q, k, v, bias, sinks = reading.inputs(inputs)
        output = empty(q, self.output_shape, self.output_strides, reading.dtype)
        if output.nbytes >= LARGE:
            ask_for_large_pages(address(output), output.nbytes)
        sums: Any = empty(q, self.sums_shape, self.sums_strides, reading.compute_dtype) if self.lse_planes else None
        lse = address(sums)
        lse_low = lse + sums.nbytes // 2 if self.lse_planes == 2 else 0
        first = reading.bias_address(bias, reading.bias_strides)
        self.launch.run_at(*map(address, (q, k, v, output)), lse, lse_low, first, address(sinks))
        return (to_dtype(output, self.call.dtype) if reading.cast else output), sums

    def record_qkv(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Output and sums from tensors that the kernels read as they are: the shortest way, since small calls take microseconds."""
        output = q.new_empty_strided(self.output_shape, self.output_strides)
        where, sums, lse, lse_low = output.data_ptr(), None, 0, 0
        if output.nbytes >= LARGE:
            ask_for_large_pages(where, output.nbytes)
        if self.lse_planes:
            sums = q.new_empty_strided(self.sums_shape, self.sums_strides, dtype=self.sums_dtype)
            lse = sums.data_ptr()
            if self.lse_planes == 2:
                lse_low = lse + sums.nbytes // 2
        self.launch.run_at(q.data_ptr(), k.data_ptr(), v.data_ptr(), where, lse, lse_low, 0, 0)
        return output, sums

    def gradients_qkv(self, q: Any, k: Any, v: Any, output: Any, recorded: Any, d_output: Any) -> tuple[Any, Any, Any]:
        """:meth:`gradients` of q, k and v where there is nothing else."""
        layout = q.stride(), k.stride(), v.stride(), output.stride(), d_output.stride(), None
        prepared = self._gradients.get(layout) or self._prepare_gradients(layout)
        if not prepared.is_kernel_alone:
            return self.gradients(Inputs(q, k, v), Result(output), recorded, Result(d_output))[:3]
        lse_low = recorded.data_ptr() + recorded.nbytes // 2
        dq, dk, dv = prepared.run_kernel(q, k, v, output, recorded, lse_low, d_output)
        if self.sums_in_dtype:
            return dq, dk, dv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result, wide: bool = False) -> Inputs:
        """The gradients of the inputs from those of the output and the log-sum-exp."""
        q, k, v, bias, _ = inputs
        bias_strides = None if bias is None else bias.stride()
        layout = q.stride(), k.stride(), v.stride(), result.output.stride(), d_result.output.stride(), bias_strides
        prepared = self._gradients.get(layout) or self._prepare_gradients(layout)
        sums = prepared.run(inputs, result, recorded, d_result)
        if wide or (self.reading.unchanged and self.sums_in_dtype):
            return sums
        return Inputs(*(None if d is None else d.to(x.dtype) for d, x in zip(sums, inputs, strict=True)))

    def _prepare_gradients(self, layout: Layout) -> CpuBackward:
        q, k, v, output, d_output, bias = layout
        call, reading = self.call, self.reading
        given = call.q.strides, call.k.strides, call.v.strides, None if call.bias is None else call.bias.strides
        if given != (q, k, v, bias):  # hooks of saved tensors (offloading, compression) may return other strides
            moved = replace(
                call,
                q=call.q._replace(strides=q),
                k=call.k._replace(strides=k),
                v=call.v._replace(strides=v),
                bias=None if call.bias is None else call.bias._replace(strides=bias or ()),
            )
            reading = ArrayLayout(moved, select(moved))
        if len(self._gradients) >= _MOST_LAYOUTS:
            self._gradients.clear()
        prepared = self._gradients[layout] = CpuBackward(reading, self.plan, output, d_output)
        return prepared

    def _prepare_forward(self, plan: Any) -> Launch:
        batch, heads, *_ = self.call.sizes
        fields = self.reading.fields() | {"plan": of_plan(plan), "o_strides": strides(self.output_strides)}
        return self.reading.launch("forward", fields | {"tasks": batch * heads * plan.rows}, plan)
