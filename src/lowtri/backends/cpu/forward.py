"""A call prepared for the kernels of tiles: one launch for the output, and one for the gradients in each layout of what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from lowtri.backends import Drawn, GradientSource, PreparedWithGradients
from lowtri.backends.cpu.launch import (
    ArrayLayout,
    Selection,
    Strides,
    like_array,
    of_bias,
    packed,
    select,
    strides,
    tile_threads,
    to_dtype,
)
from lowtri.backends.cpu.parts import choose_parts, table
from lowtri.backends.cpu.weights import CpuWeights, check_sums
from lowtri.kernels import abi
from lowtri.kernels.abi import KEYS, key_rows, padded
from lowtri.kernels.spec import Array
from lowtri.masks.plan import Plan
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.dropout import new_seed

_MOST_LAYOUTS = 8  # of which a call keeps the prepared gradients

# The strides of q, k, v, the output, its gradient, and the bias.
Layout: TypeAlias = tuple[Strides, Strides, Strides, Strides, Strides, Strides | None]


class CpuForward(PreparedWithGradients):
    """The output has the memory layout of q: heads before tokens, or tokens before heads as projections leave them.

    No copy is then needed on either side. Gradients need the log-sum-exp and what it loses to rounding, (2, B, Hq, Nq).
    """

    def __init__(self, call: Call, selection: Selection) -> None:
        layout = ArrayLayout(call, selection)
        self.call, self.layout, self.plan = call, layout, call.plan(KEYS)
        batch, heads, _, _, _, _, dv = call.sizes
        shape = (*call.q.shape[:3], dv)
        output = packed(shape) if call.is_numpy else like_array(layout.arrays[0], dv)
        self.new_output, self.output = layout.new(shape, output, layout.dtype), (shape, output)
        again = call.return_weights or call.return_received  # the scores are computed
        # Of the log-sum-exp, and of what it loses to rounding.
        self.planes = 2 if call.needs_grad or again else int(bool(call.return_lse))
        self.new_lse = layout.new((self.planes, *shape[:3])) if self.planes else None
        fields = layout.tile_fields(self.plan) | {"o_strides": strides(output)}
        self.launch = layout.launch("forward", fields | {"tasks": batch * heads * self.plan.rows}, self.plan)
        self.weights = CpuWeights(layout, self.plan) if again else None
        self._gradients: dict[Layout, _Backward] = {}
        self.nbytes = 8192 + self.plan.nbytes + layout.q_positions.nbytes + layout.key_words.nbytes

    def gradient_source(self) -> GradientSource:
        return GradientSource.LSE

    def checks_values(self) -> bool:
        return False

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        layout = self.layout
        q, k, v, bias, sinks = inputs if layout.unchanged else layout.inputs(inputs)
        output, sums, lse, lse_low = self.new_output(q), None, 0, 0
        address = layout.address
        if self.new_lse is not None:
            sums = self.new_lse(q)
            lse = address(sums)
            lse_low = lse + sums.nbytes // 2 if self.planes == 2 else 0
        of_bias = 0 if bias is None else layout.bias_address(bias, layout.bias_strides)
        of_sinks = 0 if sinks is None else address(sinks)
        number = 0
        if self.call.dropout:
            number = int(new_seed(self.call.is_numpy) if seed is None else seed)
        launch = self.launch
        launch.run_at(
            launch.prepared,
            address(q),
            address(k),
            address(v),
            address(output),
            lse,
            lse_low,
            of_bias,
            of_sinks,
            number,
        )
        if layout.cast:
            output = to_dtype(output, self.call.dtype)
        weights = received = None
        if self.weights is not None:
            if bias is not None:
                check_sums(sums)
            weights, received = self.weights.run(Inputs(q, k, v, bias, sinks), lse, lse_low)
        returned: Any = None
        if self.call.return_lse and sums is not None:  # the user may change what is returned in place
            returned = sums[0].clone() if self.call.needs_grad else sums[0]
        return Result(output, weights, returned, Drawn(number, sums) if self.call.dropout else sums, received)

    def plain(self) -> Callable[[Any, Any, Any], Any] | None:
        if not self.layout.is_plain or self.call.return_lse or self.weights is not None:
            return None
        return self.launch.of_three(self.launch.prepared, *self.output, self.new_lse)

    def gradients(self, inputs: Inputs, output: Any, state: Any, d_output: Any, d_lse: Any = None) -> Inputs:
        """``state`` is the log-sum-exp, with or without what it loses to rounding: (1 or 2, B, Hq, Nq)."""
        sums, seed = (state.state, state.seed) if self.call.dropout else (state, 0)
        q, k, v, bias, _ = inputs
        if bias is not None:
            check_sums(sums)
        of_bias = None if bias is None else bias.stride()
        layout = q.stride(), k.stride(), v.stride(), output.stride(), d_output.stride(), of_bias
        prepared = self._gradients.get(layout) or self._prepare_gradients(layout)
        return prepared.run(inputs, output, sums, seed, d_output, d_lse)

    def _prepare_gradients(self, layout: Layout) -> _Backward:
        q, k, v, output, d_output, bias = layout
        call, arrays = self.call, self.layout
        if (call.q.strides, call.k.strides, call.v.strides, call.bias and call.bias.strides) != (q, k, v, bias):
            # Hooks of saved tensors (offloading, compression) may return other strides.
            moved: Any = {
                name: x and x._replace(strides=now or ())
                for name, x, now in (("q", call.q, q), ("k", call.k, k), ("v", call.v, v), ("bias", call.bias, bias))
            }
            call = replace(call, **moved)
            arrays = ArrayLayout(call, select(call))
        if len(self._gradients) >= _MOST_LAYOUTS:
            self._gradients.clear()
        prepared = self._gradients[layout] = _Backward(arrays, self.plan, output, d_output)
        return prepared


class _Backward:
    """The backward kernel of a call, for one layout of its inputs, of the output and of the output's gradient.

    A task owns a key/value head; if that leaves threads idle, its keys are cut into parts (:mod:`lowtri.backends.cpu.parts`).
    """

    def __init__(self, layout: ArrayLayout, plan: Plan, output: Strides, d_output: Strides) -> None:
        self.layout, call, spec = layout, layout.call, layout.spec
        self.call = call
        batch, heads, kv_heads, nq, nk, d, dv = call.sizes
        threads = tile_threads("backward", call, plan)
        rows, sizes = key_rows(spec, nk), [padded(spec, size) for size in (d, dv)]
        whole = batch * (heads * nq * d + kv_heads * rows * sum(sizes)) * spec.number_bytes
        of_thread = abi.BACKWARD.layout(spec, layout.tile_fields(plan), 1)[0]["thread_bytes"]
        of_query = batch * heads * d * spec.number_bytes
        self.parts = choose_parts(plan, batch * kv_heads, threads, whole, of_query, of_thread)
        parts = len(self.parts)
        # Without padding the kernel writes dK and dV as they are returned, in the layout of k and v.
        self.is_exact = rows == nk and sizes == [d, dv]
        if self.is_exact:
            shapes: list[tuple[int, ...]] = [call.k.shape, call.v.shape]
            steps = [like_array(x, x.shape[3]) for x in layout.arrays[1:]]
        else:
            shapes = [(batch, kv_heads, rows, size) for size in sizes]
            steps = [packed(shape) for shape in shapes]
        # Of the log-sum-exp, and of what it loses to rounding.
        self.plane_bytes = batch * heads * nq * spec.number_bytes
        dq = like_array(layout.arrays[0], d)
        self.new_dq = layout.new(call.q.shape, dq)
        self.ranges, numbers = table(self.parts, plan, dq, (batch, heads, d))
        self.new_dq_sums = layout.new((numbers,)) if numbers else None
        self.new_dk, self.new_dv = (layout.new(*x) for x in zip(shapes, steps, strict=True))
        self.new_delta = layout.new(call.q.shape[:3]) if call.sinks is not None and call.sinks.requires_grad else None
        self.d_bias_shape = None
        if call.bias is not None and call.bias.requires_grad:
            self.d_bias_shape = (parts, batch, heads, *call.bias.shape[2:])
        self.copies_output = layout.cast or output[3] != 1
        self.copies_d_output = layout.cast or (spec.operand == "pairs" and not Array(d_output, dv).even)
        dense = packed((batch, heads, nq, dv))  # of a copy
        key_sums = [
            dict(zip("bhn", step[:3], strict=True)) | {"rows": rows, "size": size}
            for step, size in zip(steps, sizes, strict=True)
        ]
        d_bias = () if self.d_bias_shape is None else packed(self.d_bias_shape)
        fields = layout.tile_fields(plan) | {
            "parts": parts,
            "ranges": self.ranges.ctypes.data,
            "tasks": parts * batch * kv_heads,
            "output_strides": strides(dense if self.copies_output else output),
            "d_output_strides": strides(dense if self.copies_d_output else d_output),
            "dk_layout": key_sums[0],
            "dv_layout": key_sums[1],
            "d_bias_strides": of_bias(call, self.d_bias_shape, d_bias, ("part", "b", "h", "q", "k")),
        }
        self.launch = layout.launch("backward", fields, plan)

    def run(self, inputs: Inputs, output: Any, sums: Any, seed: int, d_output: Any, d_lse: Any) -> Inputs:
        """The gradients in the dtype in which they are summed."""
        layout = self.layout
        q, k, v, bias, sinks = inputs if layout.unchanged else layout.inputs(inputs)
        if self.copies_output:
            output = to_dtype(output, layout.dtype).contiguous()
        if self.copies_d_output:
            d_output = to_dtype(d_output, layout.dtype).contiguous()
        if d_lse is not None:
            d_lse = to_dtype(d_lse, layout.compute_dtype).contiguous()
        dq, dk, dv = self.new_dq(q), self.new_dk(q), self.new_dv(q)
        dq_sums = None if self.new_dq_sums is None else self.new_dq_sums(q)
        delta = None if self.new_delta is None else self.new_delta(q)
        d_bias = None if self.d_bias_shape is None else sums.new_zeros(self.d_bias_shape)
        lse = sums.data_ptr()
        # A tensor's shape takes a microsecond, its bytes less.
        lse_low = lse + self.plane_bytes if sums.nbytes > self.plane_bytes else 0
        self.launch.run_at(
            self.launch.prepared,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            0 if bias is None else layout.bias_address(bias, layout.bias_strides),
            output.data_ptr(),
            lse,
            lse_low,
            d_output.data_ptr(),
            0 if d_lse is None else d_lse.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            dq.data_ptr(),
            0 if dq_sums is None else dq_sums.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            0 if d_bias is None else layout.bias_address(d_bias, (1,)),
            seed,
        )
        if dq_sums is not None:
            self._add_parts(dq, dq_sums)
        if not self.is_exact:
            *_, nk, d, size_v = self.call.sizes
            dk, dv = dk[:, :, :nk, :d], dv[:, :, :nk, :size_v]
        if d_bias is not None:
            d_bias = d_bias.sum(0).sum_to_size(bias.shape)
        d_sinks = None if delta is None else _of_sinks(sinks, sums[0], delta, output, d_lse)
        return Inputs(dq, dk, dv, d_bias, d_sinks)

    def _add_parts(self, dq: Any, dq_sums: Any) -> None:
        """Add the sums of all parts but the first, in their order."""
        batch, heads, nq, d = self.call.q.shape
        done = 0
        for part in self.parts[1:]:
            start, stop = part.queries(nq)
            numbers = batch * heads * (stop - start) * d
            dq[:, :, start:stop] += dq_sums[done : done + numbers].view(batch, heads, stop - start, d)
            done += numbers


def _of_sinks(sinks: Any, lse: Any, delta: Any, output: Any, d_lse: Any) -> Any:
    """The gradient of the sinks: minus the sum over queries of the sink's weight times delta, without queries that see nothing."""
    nothing = lse == -float("inf")
    # A query that sees the sink alone has an output of 0, so that the gradient of the output takes no part, whatever it is.
    sink_alone = (output == 0).all(-1)
    delta = delta.masked_fill(sink_alone, 0) if d_lse is None else delta.where(~sink_alone, -d_lse)
    share = (sinks[None, :, None] - lse).exp().masked_fill(nothing, 0)
    return -(share * delta.masked_fill(nothing, 0)).sum((0, 2))
