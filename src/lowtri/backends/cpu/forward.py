"""A call prepared for the kernels of tiles: one launch for the output, and one for the gradients in each layout of what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from lowtri.backends import Drawn, GradientSource, PreparedWithGradients
from lowtri.backends.cpu.launch import (
    KernelArrays,
    Selection,
    Strides,
    bias_fields,
    contiguous_strides,
    like_array,
    select,
    stride_fields,
    tile_threads,
    to_dtype,
)
from lowtri.backends.cpu.parts import Memory, Rows, choose_cut, table
from lowtri.backends.cpu.weights import CpuWeights, check_sums
from lowtri.kernels import abi
from lowtri.kernels.abi import KEYS, key_rows, padded
from lowtri.kernels.isa import BF16X2
from lowtri.kernels.spec import is_even
from lowtri.masks.plan import Plan
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.dropout import new_seed

_MOST_LAYOUTS = 8  # of which a call keeps the prepared gradients


class GradientStrides(NamedTuple):
    """The strides of the arrays that gradients are computed from."""

    q: Strides
    k: Strides
    v: Strides
    bias: Strides | None
    output: Strides
    d_output: Strides


class CpuForward(PreparedWithGradients):
    """The output has the memory layout of q: heads before tokens, or tokens before heads as projections leave them.

    No copy is then needed on either side. Gradients need the log-sum-exp and what it loses to rounding, (2, B, Hq, Nq).
    """

    def __init__(self, call: Call, selection: Selection) -> None:
        layout = KernelArrays(call, selection)
        self.call = call
        self.layout = layout
        self.plan = call.plan(KEYS)
        batch, heads, _, _, _, _, dv = call.sizes
        shape = (*call.q.shape[:3], dv)
        output = contiguous_strides(shape) if call.is_numpy else like_array(layout.arrays[0], dv)
        self.new_output, self.output = layout.new(shape, output, layout.dtype), (shape, output)
        again = call.return_weights or call.return_received  # the scores are computed
        # Of the log-sum-exp, and of what it loses to rounding.
        self.lse_parts = 2 if call.needs_grad or again else int(bool(call.return_lse))
        self.new_lse = layout.new((self.lse_parts, *shape[:3])) if self.lse_parts else None
        fields = layout.tile_fields(self.plan) | {"o_strides": stride_fields(output)}
        self.launch = layout.launch("forward", fields | {"tasks": batch * heads * self.plan.rows}, self.plan)
        self.weights = CpuWeights(layout, self.plan) if again else None
        self._gradients: dict[GradientStrides, _Backward] = {}
        self.nbytes = 8192 + self.plan.nbytes + layout.q_positions.nbytes + layout.key_words.nbytes

    def gradient_source(self) -> GradientSource:
        return GradientSource.LSE

    def checks_values(self) -> bool:
        return False

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        layout = self.layout
        arrays = inputs if layout.unchanged else layout.inputs(inputs)
        output, sums = self.new_output(arrays.q), None
        lse = lse_residual = 0
        address = layout.address
        if self.new_lse is not None:
            sums = self.new_lse(arrays.q)
            lse = address(sums)
            lse_residual = lse + sums.nbytes // 2 if self.lse_parts == 2 else 0
        bias = 0 if arrays.bias is None else layout.bias_address(arrays.bias, layout.bias_strides)
        sinks = 0 if arrays.sinks is None else address(arrays.sinks)
        number = 0
        if self.call.dropout:
            number = int(new_seed(self.call.is_numpy) if seed is None else seed)
        launch = self.launch
        launch.run_at(
            launch.prepared,
            address(arrays.q),
            address(arrays.k),
            address(arrays.v),
            address(output),
            lse,
            lse_residual,
            bias,
            sinks,
            number,
        )
        if layout.cast:
            output = to_dtype(output, self.call.dtype)
        weights = received = None
        if self.weights is not None:
            if arrays.bias is not None:
                check_sums(sums)
            weights, received = self.weights.run(arrays, lse, lse_residual)
        returned: Any = None
        if self.call.return_lse and sums is not None:  # the user may change what is returned in place
            returned = sums[0].clone() if self.call.needs_grad else sums[0]
        return Result(output, weights, returned, Drawn(number, sums) if self.call.dropout else sums, received)

    def plain(self) -> Callable[[Any, Any, Any], Any] | None:
        if not self.layout.is_plain or self.call.return_lse or self.weights is not None:
            return None
        shape, steps = map(self.call.of_user_rank, self.output)
        return self.launch.on_three_tensors(self.launch.prepared, shape, steps, self.new_lse)

    def gradients(self, inputs: Inputs, output: Any, state: Any, d_output: Any, d_lse: Any = None) -> Inputs:
        """``state`` is the log-sum-exp, with or without what it loses to rounding: (1 or 2, B, Hq, Nq)."""
        sums, seed = (state.state, state.seed) if self.call.dropout else (state, 0)
        bias = inputs.bias
        if bias is not None:
            check_sums(sums)
        strides = GradientStrides(
            inputs.q.stride(),
            inputs.k.stride(),
            inputs.v.stride(),
            None if bias is None else bias.stride(),
            output.stride(),
            d_output.stride(),
        )
        prepared = self._gradients.get(strides) or self._prepare_gradients(strides)
        return prepared.run(inputs, output, sums, seed, d_output, d_lse)

    def _prepare_gradients(self, strides: GradientStrides) -> _Backward:
        call, arrays = self.call, self.layout
        before = {"q": call.q, "k": call.k, "v": call.v, "bias": call.bias}
        if any((x and x.strides) != getattr(strides, name) for name, x in before.items()):
            # Hooks of saved tensors (offloading, compression) may return other strides.
            moved: Any = {name: x and x._replace(strides=getattr(strides, name)) for name, x in before.items()}
            call = replace(call, **moved)
            arrays = KernelArrays(call, select(call))
        if len(self._gradients) >= _MOST_LAYOUTS:
            self._gradients.clear()
        prepared = self._gradients[strides] = _Backward(arrays, self.plan, strides)
        return prepared


class _Backward:
    """The backward kernel of a call, for one layout of its inputs, of the output and of the output's gradient.

    A task owns a key/value head; if that leaves threads idle, its queries are cut into parts (:mod:`lowtri.backends.cpu.parts`).
    """

    def __init__(self, layout: KernelArrays, plan: Plan, strides: GradientStrides) -> None:
        call, spec = layout.call, layout.spec
        self.layout, self.call = layout, call
        sizes = call.sizes
        queries = sizes.batch * sizes.heads * sizes.nq
        rows = key_rows(spec, sizes.nk)
        head_dims = [sizes.head_dim, sizes.value_dim]
        padded_dims = [padded(spec, size) for size in head_dims]
        key_numbers = sizes.batch * sizes.kv_heads * rows * sum(padded_dims)
        whole = (queries * sizes.head_dim + key_numbers) * spec.number_bytes
        heads = sizes.batch * sizes.kv_heads
        memory = Memory(
            whole,
            key=heads * sum(padded_dims) * spec.number_bytes,
            thread=abi.BACKWARD.layout(spec, layout.tile_fields(plan), 1)[0]["thread_bytes"],
        )
        tile_rows = Rows(plan, sizes.heads // sizes.kv_heads)
        cut = choose_cut(tile_rows, heads, tile_threads("backward", call, plan), memory)
        self.copies = cut.copies[1:]
        self.ranges, self.offsets = table(cut, rows, heads, padded_dims)
        self.order = cut.order
        numbers = self.offsets[-1][0]
        self.new_copies = layout.new((numbers,)) if numbers else None
        # Without padding the kernel writes dK and dV as they are returned, in the layout of k and v.
        self.is_exact = rows == sizes.nk and padded_dims == head_dims
        if self.is_exact:
            shapes: list[tuple[int, ...]] = [call.k.shape, call.v.shape]
            steps = [like_array(x, x.shape[3]) for x in layout.arrays[1:]]
        else:
            shapes = [(sizes.batch, sizes.kv_heads, rows, size) for size in padded_dims]
            steps = [contiguous_strides(shape) for shape in shapes]
        self.lse_bytes = queries * spec.number_bytes  # of the log-sum-exp, and of what it loses to rounding
        dq = like_array(layout.arrays[0], sizes.head_dim)
        self.new_dq = layout.new(call.q.shape, dq)
        self.new_dk, self.new_dv = (layout.new(*x) for x in zip(shapes, steps, strict=True))
        self.new_delta = layout.new(call.q.shape[:3]) if call.sinks is not None and call.sinks.requires_grad else None
        self.d_bias_shape = None
        if call.bias is not None and call.bias.requires_grad:
            # Each part sums its own; a bias of pairs has rows, which one part alone adds to.
            shares_rows = call.bias.shape[2] == 1 or call.distance_low is not None
            parts = cut.parts if shares_rows else 1
            self.d_bias_shape = (parts, sizes.batch, sizes.heads, *call.bias.shape[2:])
        self.copies_output = layout.cast or strides.output[3] != 1
        reads_pairs = spec.operand == BF16X2 and not is_even(strides.d_output)
        self.copies_d_output = layout.cast or reads_pairs
        dense = contiguous_strides((sizes.batch, sizes.heads, sizes.nq, sizes.value_dim))  # of a copy
        key_sums = [
            dict(zip("bhn", step[:3], strict=True)) | {"rows": rows, "size": size}
            for step, size in zip(steps, padded_dims, strict=True)
        ]
        d_bias = () if self.d_bias_shape is None else contiguous_strides(self.d_bias_shape)
        fields = layout.tile_fields(plan) | {
            "parts": cut.parts,
            "rounds": cut.rounds,
            "round": 0,
            "ranges": self.ranges.ctypes.data,
            "order": self.order.ctypes.data,
            "tasks": cut.parts * heads,
            "dq_strides": stride_fields(dq),
            "output_strides": stride_fields(dense if self.copies_output else strides.output),
            "d_output_strides": stride_fields(dense if self.copies_d_output else strides.d_output),
            "dk_layout": key_sums[0],
            "dv_layout": key_sums[1],
            "d_bias_strides": bias_fields(call, self.d_bias_shape, d_bias, ("part", "b", "h", "q", "k")),
        }
        self.launch = layout.launch("backward", fields, plan, ("round",))
        self.rounds = [self.launch.fields_with([number]) for number in range(cut.rounds)]

    def run(self, inputs: Inputs, output: Any, sums: Any, seed: int, d_output: Any, d_lse: Any) -> Inputs:
        """The gradients in the dtype in which they are summed."""
        layout = self.layout
        arrays = inputs if layout.unchanged else layout.inputs(inputs)
        q, bias = arrays.q, arrays.bias
        if self.copies_output:
            output = to_dtype(output, layout.dtype).contiguous()
        if self.copies_d_output:
            d_output = to_dtype(d_output, layout.dtype).contiguous()
        if d_lse is not None:
            d_lse = to_dtype(d_lse, layout.compute_dtype).contiguous()
        dq = self.new_dq(q)
        dk = self.new_dk(q)
        dv = self.new_dv(q)
        copies = None if self.new_copies is None else self.new_copies(q)
        delta = None if self.new_delta is None else self.new_delta(q)
        d_bias = None if self.d_bias_shape is None else sums.new_zeros(self.d_bias_shape)
        lse = sums.data_ptr()
        # A tensor's shape takes a microsecond, its bytes less.
        lse_residual = lse + self.lse_bytes if sums.nbytes > self.lse_bytes else 0
        addresses = (
            q.data_ptr(),
            arrays.k.data_ptr(),
            arrays.v.data_ptr(),
            0 if bias is None else layout.bias_address(bias, layout.bias_strides),
            output.data_ptr(),
            lse,
            lse_residual,
            d_output.data_ptr(),
            0 if d_lse is None else d_lse.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            0 if copies is None else copies.data_ptr(),
            0 if d_bias is None else layout.bias_address(d_bias, (1,)),
            seed,
        )
        for prepared in self.rounds:
            self.launch.run_at(prepared, *addresses)
        if copies is not None:
            self._add_copies(copies, dk, dv)
        if not self.is_exact:
            sizes = self.call.sizes
            dk, dv = dk[:, :, : sizes.nk, : sizes.head_dim], dv[:, :, : sizes.nk, : sizes.value_dim]
        if d_bias is not None:
            d_bias = d_bias.sum(0).sum_to_size(bias.shape)
        d_sinks = None if delta is None else _d_sinks(arrays.sinks, sums[0], delta, output, d_lse)
        return Inputs(dq, dk, dv, d_bias, d_sinks)

    def _add_copies(self, copies: Any, dk: Any, dv: Any) -> None:
        """Add all copies of dK and dV after the first, in their order."""
        rows = dk.shape[2]
        ends = [begin for begin, _ in self.offsets[1:]]
        for (first, last), (at_dk, at_dv), end in zip(self.copies, self.offsets, ends, strict=False):
            keys = slice(KEYS * first, min(KEYS * last, rows))
            for whole, begin, stop in ((dk, at_dk, at_dv), (dv, at_dv, end)):
                part = whole[:, :, keys]
                part += copies[begin:stop].view(part.shape)


def _d_sinks(sinks: Any, lse: Any, delta: Any, output: Any, d_lse: Any) -> Any:
    """The gradient of the sinks: minus the sum over queries of the sink's weight times delta, without queries that see nothing."""
    nothing = lse == -float("inf")
    # A query that sees the sink alone has an output of 0, so that the gradient of the output takes no part, whatever it is.
    sink_alone = (output == 0).all(-1)
    delta = delta.masked_fill(sink_alone, 0) if d_lse is None else delta.where(~sink_alone, -d_lse)
    share = (sinks[None, :, None] - lse).exp().masked_fill(nothing, 0)
    return -(share * delta.masked_fill(nothing, 0)).sum((0, 2))
