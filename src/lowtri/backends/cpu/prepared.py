"""A call prepared for the kernels: the spec that reads its arrays, the plan, and the launches."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from lowtri.backends.cpu.fields import Fields, address, broadcast, of_call, of_plan, packed, strides
from lowtri.backends.cpu.launch import PreparedLaunch, kernel_file
from lowtri.kernels.abi import BACKWARD, DECODE, FORWARD
from lowtri.ops.call import ArrayInfo, Call, Inputs, Result, seen_keys

__all__ = ["FEW_QUERIES", "PreparedKernels", "is_decoded", "spec_of"]

FEW_QUERIES = 16  # below, reading the keys and values takes most of the time


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
        self.arrays = [_packed(x) for x in (call.q, call.k, call.v)] if self.cast else [call.q, call.k, call.v]
        bias = call.bias
        self.bias_strides = () if bias is None else _packed(bias).strides if self._casts(bias) else bias.strides
        self._backward: dict[tuple[int, ...], PreparedLaunch] = {}  # by the strides of the output's gradient
        self.decodes = not call.needs_grad and is_decoded(call)
        self.plan = None if self.decodes else call.plan(kernel_file("forward").KEYS)
        self.launch = self._prepare_decode() if self.plan is None else self._prepare_forward(self.plan)
        self.nbytes = 8192 + (0 if self.plan is None else self.plan.nbytes)

    def run(self, inputs: Inputs) -> Result:
        output, lse = self._forward(inputs, self.call.return_lse)
        return Result(output, None, lse)

    def record(self, inputs: Inputs) -> tuple[Result, None]:
        """The result with its log-sum-exp; the gradients need no other state."""
        output, lse = self._forward(inputs, True)
        return Result(output, None, lse), None

    def _forward(self, inputs: Inputs, want_lse: bool) -> tuple[Any, Any]:
        """Output (B, Hq, Nq, Dv) in the dtype of q, and log-sum-exp (B, Hq, Nq) if requested."""
        q, k, v, bias, sinks = self._readable(inputs)
        output = _empty(q, (*q.shape[:3], v.shape[3]))
        lse = _empty(q, q.shape[:3], self.compute_dtype) if want_lse else None
        self.launch.run(
            q=address(q),
            k=address(k),
            v=address(v),
            o=address(output),
            lse=address(lse),
            bias=address(bias),
            sinks=address(sinks),
        )
        return (_to(output, self.call.dtype) if self.cast else output), lse

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result) -> Inputs:
        """The gradients of the inputs from those of the output and the log-sum-exp."""
        wide = self.wide_gradients(inputs, result, d_result)
        return Inputs(*(None if d is None else d.to(x.dtype) for d, x in zip(wide, inputs, strict=True)))

    def wide_gradients(self, inputs: Inputs, result: Result, d_result: Result) -> Inputs:
        """The gradients in the dtype in which they are summed, at least float32."""
        import torch

        call, (q, k, v, bias, sinks) = self.call, self._readable(inputs)
        batch, heads, kv_heads, nq, nk, d, dv = call.sizes
        lse, d_lse, d_output = result.lse, d_result.lse, d_result.output.to(q.dtype)
        nothing = lse == -torch.inf
        delta = (d_output.to(lse.dtype) * result.output.to(lse.dtype)).sum(-1)
        delta = (delta if d_lse is None else delta - d_lse).masked_fill_(nothing, 0)
        if self.spec.rows == "pairs" and not kernel_file("select").Array(d_output.stride(), dv).even:
            d_output = d_output.contiguous()
        dq = lse.new_empty((batch, heads, nq, d))
        parts = self.parts
        dk, dv_sums = (lse.new_zeros((parts, batch, kv_heads, nk, size)) for size in self._padded)
        d_bias = None
        if call.bias is not None and call.bias.requires_grad:
            d_bias = lse.new_zeros((parts, batch, heads, *bias.shape[2:]))
        self._launch_backward(d_output, d_bias).run(
            q=address(q),
            k=address(k),
            v=address(v),
            bias=address(bias),
            lse=address(lse),
            delta=address(delta),
            d_output=address(d_output),
            dq=address(dq),
            dk=address(dk),
            dv_sums=address(dv_sums),
            d_bias=address(d_bias),
        )
        dk, d_values = (x[0] if parts == 1 else x.sum(0) for x in (dk, dv_sums))
        d_bias = None if d_bias is None else d_bias.sum(0).sum_to_size(bias.shape)
        d_sinks = None
        if sinks is not None:  # d_sink = -sum over rows of P_sink * delta
            share = torch.exp(sinks[None, :, None] - lse).masked_fill(nothing, 0)
            d_sinks = -(share * delta).sum((0, 2))
        return Inputs(dq, dk[..., :d].mul_(call.scale), d_values[..., :dv], d_bias, d_sinks)

    @cached_property
    def spec(self) -> Any:
        """The spec of the forward kernel and its gradients."""
        return _spec("forward", "float32" if self.cast else self.call.dtype, self.arrays)

    @cached_property
    def _padded(self) -> tuple[int, int]:
        """The head sizes of the buffers of dk and dv."""
        *_, d, dv = self.call.sizes
        padded = kernel_file("backward").padded
        return padded(self.spec, d), padded(self.spec, dv)

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
        call, kernel, spec = self.call, kernel_file("forward"), self.spec
        batch, heads, _, nq, _, d, dv = call.sizes
        fields = self._fields() | {"plan": of_plan(plan)}
        fields |= {"o_strides": strides(packed((batch, heads, nq, dv))), "tasks": batch * heads * plan.rows}
        return PreparedLaunch(FORWARD, spec, fields, call.threads, kernel.scratch(spec, d, dv), keep=plan)

    def _launch_backward(self, d_output: Any, d_bias: Any) -> PreparedLaunch:
        d_strides = d_output.stride()
        launch = self._backward.get(d_strides)
        if launch is None:
            call, kernel, spec, plan = self.call, kernel_file("backward"), self.spec, self._planned()
            batch, _, kv_heads, *_, d, dv = call.sizes
            fields = self._fields() | {"plan": of_plan(plan)}
            fields |= {
                "parts": self.parts,
                "tasks": self.parts * batch * kv_heads,
                "d_output_strides": strides(d_strides),
            }
            shape, steps = (None, ()) if d_bias is None else (d_bias.shape, d_bias.stride())
            fields["d_bias_strides"] = broadcast(shape, steps, ("part", "b", "h", "q", "k"))
            scratch = kernel.scratch(spec, d, dv)
            launch = PreparedLaunch(BACKWARD, spec, fields, call.threads, scratch, keep=plan)
            if len(self._backward) >= _MOST_LAYOUTS:
                self._backward.clear()
            self._backward[d_strides] = launch
        return launch

    def _prepare_decode(self) -> PreparedLaunch:
        call, kernel = self.call, kernel_file("decode")
        batch, _, kv_heads, nq, nk, d, dv = call.sizes
        self.arrays[0] = _packed(self.arrays[0])  # the few queries are made contiguous in each run
        spec = _spec("decode", "float32" if self.cast else call.dtype, self.arrays)
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
        return PreparedLaunch(DECODE, spec, fields, call.threads, scratch, shared, zeros="joined", keep=visible)

    def _casts(self, bias: ArrayInfo) -> bool:
        return bias.dtype != self.compute_dtype

    def _readable(self, inputs: Inputs) -> Inputs:
        """The arrays in dtypes that the kernels read."""
        q, k, v, bias, sinks = inputs
        if self.cast:
            q, k, v = (_to(x, "float32") for x in (q, k, v))
        elif self.decodes:
            q = np.ascontiguousarray(q) if self.call.is_numpy else q.contiguous()
        if bias is not None and self.call.bias is not None and self._casts(self.call.bias):
            bias = _to(bias, self.compute_dtype)
        return Inputs(q, k, v, bias, None if sinks is None else _to(sinks, self.compute_dtype))


_MOST_LAYOUTS = 8  # backward launches kept, one for each stride pattern of the output's gradient


def is_decoded(call: Call) -> bool:
    """Whether the decode kernel runs the call: few queries, and rows that can be read in whole vectors."""
    if call.q.shape[2] >= FEW_QUERIES:
        return False
    cast = spec_of("forward", call) is None
    arrays = [_packed(x) if cast else x for x in (call.q, call.k, call.v)]
    return _spec("decode", "float32" if cast else call.dtype, [_packed(arrays[0]), *arrays[1:]]) is not None


def spec_of(family: str, call: Call) -> Any:
    """The spec of the kernel that reads the call's arrays without a cast, or None."""
    return _spec(family, call.dtype, [call.q, call.k, call.v])


def _spec(family: str, dtype: str, arrays: list[ArrayInfo]) -> Any:
    select = kernel_file("select")
    return select.spec_of(family, dtype, *(select.Array(x.strides, x.shape[3]) for x in arrays))


def _packed(x: ArrayInfo) -> ArrayInfo:
    return x._replace(strides=packed(x.shape))


def _to(x: Any, dtype: str) -> Any:
    """The array in this dtype: itself, or a contiguous copy."""
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else np.ascontiguousarray(x, dtype)
    import torch

    kind = getattr(torch, dtype)
    return x if x.dtype is kind else x.detach().to(kind, memory_format=torch.contiguous_format)


def _empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype or like.dtype)
    if dtype is None:
        return like.new_empty(shape)
    import torch

    return like.new_empty(shape, dtype=getattr(torch, dtype))
