"""The gradients of a call, prepared: the buffers of the backward kernel, and a launch for each layout of what it reads."""

from __future__ import annotations

from typing import Any

from lowtri.backends.cpu.arrays import to_dtype
from lowtri.backends.cpu.fields import Strides, address, like_array, of_bias, of_plan, packed, strides
from lowtri.backends.cpu.launch import PreparedLaunch, kernel_file
from lowtri.backends.cpu.reading import Reading
from lowtri.ops.call import Inputs, Result

__all__ = ["PreparedGradients"]


class PreparedGradients:
    """The backward kernel of a call.

    A task owns a key/value head; if that leaves threads idle, its queries are split into parts with separate sums.
    """

    def __init__(self, reading: Reading, plan: Any) -> None:
        self.reading, self.plan, call = reading, plan, reading.call
        self.call, self.spec = call, reading.spec
        batch, _, kv_heads, _, nk, d, dv = call.sizes
        whole = batch * kv_heads % call.threads == 0 or batch * kv_heads >= 4 * call.threads
        self.parts = min(1 if whole else call.threads, plan.rows)
        kernel = reading.kernel("backward")
        self.rows, sizes = kernel.key_rows(self.spec, nk), [kernel.padded(self.spec, size) for size in (d, dv)]
        # Without padding and parts the kernel writes dK and dV as they are returned, in the layout of k and v.
        self.is_exact = self.parts == 1 and self.rows == nk and sizes == [d, dv]
        self.q_shape, self.q_strides = call.q.shape, like_array(reading.arrays[0], d)
        if self.is_exact:
            self.shapes = [call.k.shape, call.v.shape]
            # Products on tile registers write packed rows.
            self.strides = [
                packed(x.shape) if self.spec.rows == "tiles" else like_array(x, x.shape[3]) for x in reading.arrays[1:]
            ]
        else:
            self.shapes = [(self.parts, batch, kv_heads, self.rows, size) for size in sizes]
            self.strides = [packed(shape) for shape in self.shapes]
        self.key_sums = [
            dict(zip(("part", "b", "h", "n"), (0, *steps)[-5:-1], strict=True)) | {"rows": self.rows, "size": size}
            for steps, size in zip(self.strides, sizes, strict=True)
        ]
        self.with_bias = call.bias is not None and call.bias.requires_grad
        self.with_sinks = call.sinks is not None and call.sinks.requires_grad
        self._launches: dict[tuple[Strides, Strides], PreparedLaunch] = {}

    def run(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients in the dtype in which they are summed.

        Args:
            recorded: the log-sum-exp and what it loses to rounding, (2, B, Hq, Nq); None: the former is in the result.
        """
        q, k, v, bias, sinks = self.reading.inputs(inputs)
        lse = result.lse if recorded is None else recorded
        output, d_output, d_lse = self._readable(result.output, d_result)
        dq = lse.new_empty_strided(self.q_shape, self.q_strides)
        dk = lse.new_empty_strided(self.shapes[0], self.strides[0])
        dv_sums = lse.new_empty_strided(self.shapes[1], self.strides[1])
        delta = lse.new_empty(self.q_shape[:3]) if self.with_sinks else None
        d_bias = None
        if self.with_bias:
            d_bias = lse.new_zeros((self.parts, *self.q_shape[:2], *bias.shape[2:]))
        layout = output.stride(), d_output.stride()
        launch = self._launches.get(layout) or self._prepare(layout, d_bias)
        lse_address = lse.data_ptr()
        launch.run_at(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            self.reading.first_pair(bias, self.reading.bias_strides),
            output.data_ptr(),
            lse_address,
            0 if recorded is None else lse_address + lse.nbytes // 2,  # lse_low
            d_output.data_ptr(),
            address(d_lse),
            address(delta),
            dq.data_ptr(),
            dk.data_ptr(),
            dv_sums.data_ptr(),
            self.reading.first_pair(d_bias, (1,)),
        )
        if not self.is_exact:
            *_, nk, d, dv = self.call.sizes
            dk, dv_sums = ((x[0] if self.parts == 1 else x.sum(0))[:, :, :nk] for x in (dk, dv_sums))
            dk, dv_sums = dk[..., :d], dv_sums[..., :dv]
        if d_bias is not None:
            d_bias = d_bias.sum(0).sum_to_size(bias.shape)
        d_sinks = None
        if self.with_sinks:
            lse = lse if recorded is None else recorded[0]
            d_sinks = _of_sinks(sinks, lse, delta, output, d_lse)
        return Inputs(dq, dk, dv_sums, d_bias, d_sinks)

    def _readable(self, output: Any, d_result: Result) -> tuple[Any, Any, Any]:
        """The output, its gradient and that of the log-sum-exp, as the kernel reads them."""
        d_output, d_lse, dtype = d_result.output, d_result.lse, self.reading.dtype
        if self.reading.cast:
            output, d_output = to_dtype(output, dtype), to_dtype(d_output, dtype)
        if output.stride(3) != 1:
            output = output.contiguous()
        if self.spec.rows == "pairs" and not kernel_file("select").Array(d_output.stride(), d_output.shape[3]).even:
            d_output = d_output.contiguous()
        return output, d_output, None if d_lse is None else to_dtype(d_lse, self.reading.compute_dtype).contiguous()

    def _prepare(self, layout: tuple[Strides, Strides], d_bias: Any) -> PreparedLaunch:
        batch, _, kv_heads, *_ = self.call.sizes
        names = ("output_strides", "d_output_strides", "dq_strides")
        shape, steps = (None, ()) if d_bias is None else (d_bias.shape, d_bias.stride())
        fields = self.reading.fields() | {
            "plan": of_plan(self.plan),
            "parts": self.parts,
            "tasks": self.parts * batch * kv_heads,
            **{name: strides(of) for name, of in zip(names, (*layout, self.q_strides), strict=True)},
            **dict(zip(("dk_layout", "dv_layout"), self.key_sums, strict=True)),
            "d_bias_strides": of_bias(self.call, shape, steps, ("part", "b", "h", "q", "k")),
        }
        launch = self.reading.launch("backward", fields, self.plan)
        if len(self._launches) >= _MOST_LAYOUTS:
            self._launches.clear()
        self._launches[layout] = launch
        return launch


def _of_sinks(sinks: Any, lse: Any, delta: Any, output: Any, d_lse: Any) -> Any:
    """The gradient of the sinks: minus the sum over queries of the sink's weight times delta, without queries that see nothing."""
    nothing = lse == -float("inf")
    # A query that sees the sink alone has an output of 0, so that the gradient of the output takes no part, whatever it is.
    blind = (output == 0).all(-1)
    delta = delta.masked_fill(blind, 0) if d_lse is None else delta.where(~blind, -d_lse)
    share = (sinks[None, :, None] - lse).exp().masked_fill(nothing, 0)
    return -(share * delta.masked_fill(nothing, 0)).sum((0, 2))


_MOST_LAYOUTS = 8  # launches kept, one for each pattern of strides
