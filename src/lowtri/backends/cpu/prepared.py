"""A call prepared for the kernels: the spec that reads its arrays, the plan, and the launches."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from lowtri.backends.cpu.arrays import empty_like, to_dtype
from lowtri.backends.cpu.fields import Fields, address, of_bias, of_call, of_plan, packed, strides
from lowtri.backends.cpu.launch import PreparedLaunch, kernel_file
from lowtri.backends.cpu.specs import is_decoded, kernel_name, pack, spec_for, spec_of
from lowtri.kernels import abi
from lowtri.ops.call import ArrayInfo, Call, Inputs, Result, seen_keys
from lowtri.ops.distance_bias import first_pair

__all__ = ["PreparedKernels"]


class PreparedKernels:
    """One launch for the output, and one for the gradients.

    Half types are read directly, or cast to float32 if the CPU lacks the instructions. Few queries need no plan: all keys are
    visible, or a table of few rows says which.
    """

    computes_gradients = True
    formula_dtype = None
    from_output = True

    def __init__(self, call: Call) -> None:
        self.call = call
        self.cast = spec_of("forward", call) is None
        self.compute_dtype = "float64" if call.dtype == "float64" else "float32"
        self.read_dtype = "float32" if self.cast else call.dtype  # of the arrays that the kernels get
        self.arrays = [pack(x) for x in (call.q, call.k, call.v)] if self.cast else [call.q, call.k, call.v]
        bias = call.bias
        self.bias_strides = () if bias is None else pack(bias).strides if self._casts(bias) else bias.strides
        self._backward: dict[tuple[int, ...], PreparedLaunch] = {}  # by the strides of the output's gradient
        self.decodes = not call.needs_grad and is_decoded(call)
        self.plan = None if self.decodes else call.plan(kernel_file("forward").KEYS)
        self.launch = self._prepare_decode() if self.plan is None else self._prepare_forward(self.plan)
        self.nbytes = 8192 + (0 if self.plan is None else self.plan.nbytes)
        # Tensors that the kernel reads as they are; few queries must be contiguous.
        self.as_they_are = not (call.is_numpy or self.cast or call.bias or call.sinks)
        self.as_they_are &= not self.decodes or call.q.strides == packed(call.q.shape)
        self.output_shape = (*call.q.shape[:3], call.v.shape[3])

    def run(self, inputs: Inputs) -> Result:
        output, lse, _ = self._forward(inputs, self.call.return_lse)
        return Result(output, None, lse)

    def record(self, inputs: Inputs) -> tuple[Result, Any]:
        """The result with its log-sum-exp, and what the log-sum-exp loses to rounding."""
        output, lse, low = self._forward(inputs, True)
        return Result(output, None, lse), low

    def _forward(self, inputs: Inputs, want_lse: bool) -> tuple[Any, Any, Any]:
        """Output (B, Hq, Nq, Dv) in the dtype of q; log-sum-exp (B, Hq, Nq), and its rounding error if there are gradients."""
        lse, low = None, None
        with_low = self.call.needs_grad and not self.decodes
        if self.as_they_are:  # the shortest way, since small calls take microseconds
            q, k, v, _, _ = inputs
            output, addresses = q.new_empty(self.output_shape), [0] if self.decodes else [0, 0]
            if want_lse:
                lse = empty_like(q, self.output_shape[:3], self.compute_dtype)
                addresses[0] = lse.data_ptr()
            if with_low:
                low = empty_like(q, self.output_shape[:3], self.compute_dtype)
                addresses[1] = low.data_ptr()
            self.launch.run_at(q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr(), *addresses, 0, 0)
            return output, lse, low
        q, k, v, bias, sinks = self._readable(inputs)
        output = empty_like(q, (*q.shape[:3], v.shape[3]))
        lse = empty_like(q, q.shape[:3], self.compute_dtype) if want_lse else None
        low = empty_like(q, q.shape[:3], self.compute_dtype) if with_low else None
        self.launch.run(
            q=address(q),
            k=address(k),
            v=address(v),
            o=address(output),
            lse=address(lse),
            **({} if self.decodes else {"lse_low": address(low)}),
            bias=self._first_pair(bias, self.bias_strides),
            sinks=address(sinks),
        )
        return (to_dtype(output, self.call.dtype) if self.cast else output), lse, low

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients of the inputs from those of the output and the log-sum-exp."""
        wide = self.wide_gradients(inputs, result, recorded, d_result)
        return Inputs(*(None if d is None else d.to(x.dtype) for d, x in zip(wide, inputs, strict=True)))

    def wide_gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients in the dtype in which they are summed, at least float32."""
        import torch

        call = self.call
        q, k, v, bias, sinks = inputs if self.as_they_are else self._readable(inputs)
        batch, heads, kv_heads, nq, nk, d, dv = call.sizes
        lse, d_lse, d_output = result.lse, d_result.lse, to_dtype(d_result.output, self.read_dtype)
        delta = (to_dtype(d_output, self.compute_dtype) * to_dtype(result.output, self.compute_dtype)).sum(-1)
        if d_lse is not None:
            delta -= d_lse
        if self.spec.rows == "pairs" and not kernel_file("select").Array(d_output.stride(), dv).even:
            d_output = d_output.contiguous()
        dq = lse.new_empty((batch, heads, nq, d))
        # The kernel adds to dk and dv_sums.
        parts, (padded_nk, *sizes) = self.parts, self._padded
        dk, dv_sums = (lse.new_zeros((parts, batch, kv_heads, padded_nk, size)) for size in sizes)
        d_bias = None
        if call.bias is not None and call.bias.requires_grad:
            d_bias = lse.new_zeros((parts, batch, heads, *bias.shape[2:]))
        self._launch_backward(d_output, d_bias).run_at(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            self._first_pair(bias, self.bias_strides),
            lse.data_ptr(),
            address(recorded),  # lse_low
            delta.data_ptr(),
            d_output.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv_sums.data_ptr(),
            self._first_pair(d_bias, (1,)),
        )
        dk, d_values = ((x[0] if parts == 1 else x.sum(0))[:, :, :nk] for x in (dk, dv_sums))
        d_bias = None if d_bias is None else d_bias.sum(0).sum_to_size(bias.shape)
        d_sinks = None
        if sinks is not None:  # d_sink = -sum over rows of P_sink * delta, without the rows that see nothing
            nothing = lse == -torch.inf
            share = torch.exp(sinks[None, :, None] - lse).masked_fill(nothing, 0)
            d_sinks = -(share * delta.masked_fill_(nothing, 0)).sum((0, 2))
        return Inputs(dq, dk[..., :d].mul_(call.scale), d_values[..., :dv], d_bias, d_sinks)

    @cached_property
    def spec(self) -> Any:
        """The spec of the forward kernel and its gradients."""
        return spec_for("forward", "float32" if self.cast else self.call.dtype, self.arrays)

    @cached_property
    def _padded(self) -> tuple[int, int, int]:
        """The rows of the buffers of dk and dv, and their head sizes."""
        *_, nk, d, dv = self.call.sizes
        kernel, spec = self._kernel("backward"), self.spec
        return kernel.key_rows(spec, nk), kernel.padded(spec, d), kernel.padded(spec, dv)

    def _kernel(self, family: str) -> Any:
        """The file of the kernel of this family."""
        return kernel_file(kernel_name(family, self.spec))

    def _launch(self, family: str, fields: Fields, plan: Any) -> PreparedLaunch:
        """The launch of the forward kernel or of its gradients."""
        call, spec, kernel = self.call, self.spec, self._kernel(family)
        batch, _, kv_heads, _, nk, d, dv = call.sizes
        scratch, record = kernel.scratch(spec, d, dv), getattr(abi, kernel_name(family, spec).upper())
        if spec.rows != "tiles":
            return PreparedLaunch(record, spec, fields, call.threads, scratch, keep=plan)
        # The forward transposes V, the backward K.
        shared = kernel_file("shared_pack").shared_scratch(batch * kv_heads, nk, dv if family == "forward" else d)
        return PreparedLaunch(record, spec, fields, call.threads, scratch, shared, zeros="packed_states", keep=plan)

    @cached_property
    def parts(self) -> int:
        """A task owns a key/value head; if that leaves threads idle, its queries are split into parts with separate sums."""
        batch, _, kv_heads, *_ = self.call.sizes
        threads, rows = self.call.threads, self._planned().rows
        return min(1 if batch * kv_heads % threads == 0 or batch * kv_heads >= 4 * threads else threads, rows)

    def _planned(self) -> Any:
        if self.plan is None:  # a decode call whose gradients are computed from a given output
            self.plan = self.call.plan(kernel_file("forward").KEYS)
        return self.plan

    def _fields(self) -> Fields:
        q, k, v = (x.strides for x in self.arrays)
        return of_call(self.call, q, k, v, self.bias_strides)

    def _prepare_forward(self, plan: Any) -> PreparedLaunch:
        batch, heads, _, nq, _, _, dv = self.call.sizes
        fields = self._fields() | {"plan": of_plan(plan)}
        fields |= {"o_strides": strides(packed((batch, heads, nq, dv))), "tasks": batch * heads * plan.rows}
        return self._launch("forward", fields, plan)

    def _launch_backward(self, d_output: Any, d_bias: Any) -> PreparedLaunch:
        d_strides = d_output.stride()
        launch = self._backward.get(d_strides)
        if launch is None:
            plan = self._planned()
            batch, _, kv_heads, *_ = self.call.sizes
            fields = self._fields() | {"plan": of_plan(plan)}
            fields |= {
                "parts": self.parts,
                "tasks": self.parts * batch * kv_heads,
                "d_output_strides": strides(d_strides),
            }
            shape, steps = (None, ()) if d_bias is None else (d_bias.shape, d_bias.stride())
            fields["d_bias_strides"] = of_bias(self.call, shape, steps, ("part", "b", "h", "q", "k"))
            launch = self._launch("backward", fields, plan)
            if len(self._backward) >= _MOST_LAYOUTS:
                self._backward.clear()
            self._backward[d_strides] = launch
        return launch

    def _prepare_decode(self) -> PreparedLaunch:
        call, kernel = self.call, kernel_file("decode")
        batch, _, kv_heads, nq, nk, d, dv = call.sizes
        self.arrays[0] = pack(self.arrays[0])  # the few queries are made contiguous in each run
        spec = spec_for("decode", "float32" if self.cast else call.dtype, self.arrays)
        visible, first_key = None, 0
        if not call.shows_all:
            visible = call.visible()  # (B|1, Hq|1, Nq, Nk)
            seen = seen_keys(visible)  # a window: only the keys from the first to the last visible one
            if seen is not None:
                visible, first_key, nk = visible[..., seen], seen.start, seen.stop - seen.start
            visible = None if visible.all() else np.ascontiguousarray(visible)
        groups, queries = batch * kv_heads, call.group * nq
        parts = max(1, min(2 * call.threads // groups, -(-nk // kernel.KEYS)))
        fields = self._fields()
        fields |= {"nk": nk, "first_key": first_key, "tasks": groups * parts, "parts": parts}
        fields |= {"visible": address(visible), "visible_strides": {"b": 0, "h": 0}}
        if visible is not None:
            by_row, by_head, *_ = (step if n > 1 else 0 for n, step in zip(visible.shape, visible.strides, strict=True))
            fields["visible_strides"] = {"b": by_row, "h": by_head}
        scratch, shared = kernel.scratch(spec, queries, d, dv), kernel.shared_scratch(groups, parts, queries, dv)
        return PreparedLaunch(abi.DECODE, spec, fields, call.threads, scratch, shared, zeros="joined", keep=visible)

    def _first_pair(self, bias: Any, steps: tuple[int, ...]) -> int:
        """The address of the bias, or of its gradient, of the first query and the first key."""
        if bias is None or self.call.distance_low is None:
            return address(bias)
        start = first_pair(self.call)
        assert start is not None, "supports() has rejected other positions"
        return address(bias) + start * steps[-1] * (8 if self.compute_dtype == "float64" else 4)

    def _casts(self, bias: ArrayInfo) -> bool:
        return bias.dtype != self.compute_dtype

    def _readable(self, inputs: Inputs) -> Inputs:
        """The arrays in dtypes that the kernels read."""
        q, k, v, bias, sinks = inputs
        if self.cast:
            q, k, v = (to_dtype(x, "float32") for x in (q, k, v))
        elif self.decodes:
            q = np.ascontiguousarray(q) if self.call.is_numpy else q.contiguous()
        if bias is not None and self.call.bias is not None and self._casts(self.call.bias):
            bias = to_dtype(bias, self.compute_dtype)
        return Inputs(q, k, v, bias, None if sinks is None else to_dtype(sinks, self.compute_dtype))


_MOST_LAYOUTS = 8  # backward launches kept, one for each stride pattern of the output's gradient
