"""The gradients of a call, prepared: the launch of the backward kernel for one layout of what it reads."""

from __future__ import annotations

from typing import Any

from lowtri.backends.cpu.launch import LARGE, Launch, ask_for_large_pages, tile_threads
from lowtri.backends.cpu.layout import ArrayLayout, Strides, like_array, of_bias, of_plan, packed, strides, to_dtype
from lowtri.kernels.abi import key_rows, padded
from lowtri.kernels.spec import Array
from lowtri.ops.call import Inputs, Result


class CpuBackward:
    """The backward kernel of a call, for one layout of its inputs, of the output and of the output's gradient.

    A task owns a key/value head; if that leaves threads idle, its queries are split into parts with separate sums.
    """

    def __init__(self, reading: ArrayLayout, plan: Any, output: Strides, d_output: Strides) -> None:
        self.reading, call, spec = reading, reading.call, reading.spec
        self.call = call
        batch, heads, kv_heads, nq, nk, d, dv = call.sizes
        threads = tile_threads("backward", call, plan)
        whole = batch * kv_heads % threads == 0 or batch * kv_heads >= 4 * threads
        self.parts = min(1 if whole else threads, plan.rows)
        rows, sizes = key_rows(spec, nk), [padded(spec, size) for size in (d, dv)]
        # Without padding and parts the kernel writes dK and dV as they are returned, in the layout of k and v.
        self.is_exact = self.parts == 1 and rows == nk and sizes == [d, dv]
        self.q_shape, self.q_strides = call.q.shape, like_array(reading.arrays[0], d)
        if self.is_exact:
            self.shapes = [call.k.shape, call.v.shape]
            self.strides = [like_array(x, x.shape[3]) for x in reading.arrays[1:]]
        else:
            self.shapes = [(self.parts, batch, kv_heads, rows, size) for size in sizes]
            self.strides = [packed(shape) for shape in self.shapes]
        self.with_sinks = call.sinks is not None and call.sinks.requires_grad
        self.d_bias_shape = None
        if call.bias is not None and call.bias.requires_grad:
            self.d_bias_shape = (self.parts, batch, heads, *call.bias.shape[2:])
        self.copies_output = reading.cast or output[3] != 1
        even = Array(d_output, dv).even
        self.copies_d_output = reading.cast or (spec.operand == "pairs" and not even)
        # The kernel alone gives the gradients, in the dtype in which they are summed.
        self.is_kernel_alone = self.is_exact and not self.copies_output and not self.copies_d_output
        dense = packed((batch, heads, nq, dv))  # of a copy
        self.launch = self._prepare(
            plan,
            dense if self.copies_output else output,
            dense if self.copies_d_output else d_output,
            [
                dict(zip(("part", "b", "h", "n"), (0, *steps)[-5:-1], strict=True)) | {"rows": rows, "size": size}
                for steps, size in zip(self.strides, sizes, strict=True)
            ],
        )

    def _prepare(self, plan: Any, output: Strides, d_output: Strides, key_sums: list[Any]) -> Launch:
        batch, _, kv_heads, *_ = self.call.sizes
        shape = self.d_bias_shape
        fields = self.reading.fields() | {
            "plan": of_plan(plan),
            "parts": self.parts,
            "tasks": self.parts * batch * kv_heads,
            "output_strides": strides(output),
            "d_output_strides": strides(d_output),
            "dq_strides": strides(self.q_strides),
            "dk_layout": key_sums[0],
            "dv_layout": key_sums[1],
            "d_bias_strides": of_bias(
                self.call, shape, () if shape is None else packed(shape), ("part", "b", "h", "q", "k")
            ),
        }
        return self.reading.launch("backward", fields, plan)

    def run(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients in the dtype in which they are summed.

        Args:
            recorded: the log-sum-exp and what it loses to rounding, (2, B, Hq, Nq); None: the former is in the result.
        """
        q, k, v, bias, sinks = inputs if self.reading.unchanged else self.reading.inputs(inputs)
        lse = result.lse if recorded is None else recorded
        output, d_output, d_lse = result.output, d_result.output, d_result.lse
        if self.copies_output:
            output = to_dtype(output, self.reading.dtype).contiguous()
        if self.copies_d_output:
            d_output = to_dtype(d_output, self.reading.dtype).contiguous()
        if d_lse is not None:
            d_lse = to_dtype(d_lse, self.reading.compute_dtype).contiguous()
        delta = lse.new_empty(self.q_shape[:3]) if self.with_sinks else None
        d_bias = None if self.d_bias_shape is None else lse.new_zeros(self.d_bias_shape)
        lse_address = lse.data_ptr()
        dq, dk, grad_v = self.run_kernel(
            q,
            k,
            v,
            output,
            lse,
            0 if recorded is None else lse_address + lse.nbytes // 2,
            d_output,
            0 if bias is None else self.reading.bias_address(bias, self.reading.bias_strides),
            0 if d_lse is None else d_lse.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            0 if d_bias is None else self.reading.bias_address(d_bias, (1,)),
        )
        if not self.is_exact:
            *_, nk, d, dv = self.call.sizes
            dk, grad_v = ((x[0] if self.parts == 1 else x.sum(0))[:, :, :nk] for x in (dk, grad_v))
            dk, grad_v = dk[..., :d], grad_v[..., :dv]
        if d_bias is not None:
            d_bias = d_bias.sum(0).sum_to_size(bias.shape)
        d_sinks = None
        if self.with_sinks:
            lse = lse if recorded is None else recorded[0]
            d_sinks = _of_sinks(sinks, lse, delta, output, d_lse)
        return Inputs(dq, dk, grad_v, d_bias, d_sinks)

    def run_kernel(
        self,
        q: Any,
        k: Any,
        v: Any,
        output: Any,
        lse: Any,
        lse_low: int,
        d_output: Any,
        bias: int = 0,
        d_lse: int = 0,
        delta: int = 0,
        d_bias: int = 0,
    ) -> tuple[Any, Any, Any]:
        """The kernel alone: dQ, dK and dV, the latter two in padded parts unless they are exact; absent arrays are 0."""
        # One allocation with three views takes longer than three.
        dq = lse.new_empty_strided(self.q_shape, self.q_strides)
        dk = lse.new_empty_strided(self.shapes[0], self.strides[0])
        dv = lse.new_empty_strided(self.shapes[1], self.strides[1])
        dq_address, dk_address, dv_address = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        for where, x in ((dq_address, dq), (dk_address, dk), (dv_address, dv)):
            if x.nbytes >= LARGE:
                ask_for_large_pages(where, x.nbytes)
        self.launch.run_at(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            bias,
            output.data_ptr(),
            lse.data_ptr(),
            lse_low,
            d_output.data_ptr(),
            d_lse,
            delta,
            dq_address,
            dk_address,
            dv_address,
            d_bias,
        )
        return dq, dk, dv


def _of_sinks(sinks: Any, lse: Any, delta: Any, output: Any, d_lse: Any) -> Any:
    """The gradient of the sinks: minus the sum over queries of the sink's weight times delta, without queries that see nothing."""
    nothing = lse == -float("inf")
    # A query that sees the sink alone has an output of 0, so that the gradient of the output takes no part, whatever it is.
    blind = (output == 0).all(-1)
    delta = delta.masked_fill(blind, 0) if d_lse is None else delta.where(~blind, -d_lse)
    share = (sinks[None, :, None] - lse).exp().masked_fill(nothing, 0)
    return -(share * delta.masked_fill(nothing, 0)).sum((0, 2))
