"""Gradients of prepared calls: the first by the backend, all further ones by the formula.

Kernels and torch's fused attention return gradients without a graph, the definition none. Where torch needs a graph
(``create_graph=True``) or transforms the backward, the formula recomputes the call, tile by tile, and is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtri.backends.base import Prepared
from lowtri.compat.torch_private import apply_function, is_batched, saved_tensors_hooks
from lowtri.dispatch.choose import load
from lowtri.errors import CallError
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.gradient_batches import loop_over_vmapped_grads
from lowtri.ops.guards import active_mode, is_plain, plain_keys


def differentiable(prepared: Prepared, call: Call, inputs: Inputs) -> Result:
    """The result of a prepared call, with gradients."""
    if prepared.qkv_only:
        return Result(_apply_to_qkv(prepared, call, inputs.q, inputs.k, inputs.v))
    # Each argument takes microseconds, so most calls have three tensors only.
    arrays = inputs[:3] if inputs.bias is None and inputs.sinks is None else inputs
    apply = _apply_to_plain if call.opaque is None else _Differentiable.apply
    results = apply(prepared, call, *arrays)
    return Result(*results) if isinstance(results, tuple) else Result(results)


class _Differentiable(torch.autograd.Function):
    """The output of a prepared call; with its weights and log-sum-exp, None where there are none, if the call returns any of them."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, call: Call, *inputs: Tensor | None) -> Any:
        result, recorded = prepared.record(Inputs(*inputs))
        ctx.prepared, ctx.call, ctx.recorded = prepared, call, [recorded]
        if result.weights is None and result.lse is None:  # alone: each further result takes microseconds
            _save(ctx, *inputs, result.output)
            return result.output
        ctx.set_materialize_grads(False)
        # Kernels have recorded the log-sum-exp, so the user may change the returned one in place.
        _save(ctx, *inputs, *(result._replace(lse=None) if prepared.from_output else result))
        return tuple(result)

    @staticmethod
    @loop_over_vmapped_grads
    def backward(ctx: Any, *d_results: Tensor | None) -> Any:
        saved, prepared = ctx.saved_tensors, ctx.prepared
        count = len(saved) - len(d_results)  # of inputs
        inputs, result, d_result = Inputs(*saved[:count]), Result(*saved[count:]), Result(*d_results)
        if d_result.output is None:
            d_result = d_result._replace(output=torch.zeros_like(result.output))
        if _needs_formula(prepared, inputs, d_result):
            return None, None, *_by_formula(prepared, ctx.call, inputs, d_result, ctx.needs_input_grad[2:])
        _check_unpacked(ctx, saved)
        # The first backward consumes a large recorded state, which frees its memory; a second one records again.
        if prepared.from_output:
            recorded = ctx.recorded[0]
        else:
            recorded = ctx.recorded.pop() if ctx.recorded else None
        return None, None, *prepared.gradients(inputs, result, recorded, d_result)[:count]


class _QKVFunction(_Differentiable):
    """Gradients of a call with q, k and v alone, whose first gradients skip the general steps: small calls take microseconds."""

    @staticmethod
    def forward(ctx: Any, prepared: Any, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        output, recorded = prepared.record_qkv(q, k, v)
        ctx.prepared, ctx.call, ctx.recorded = prepared, call, [recorded]
        _save(ctx, q, k, v, output)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Any:
        if is_batched(d_output) or torch.is_grad_enabled() or active_mode() is not None or not is_plain(d_output):
            return _Differentiable.backward(ctx, d_output)
        q, k, v, output = saved = ctx.saved_tensors
        _check_unpacked(ctx, saved)
        return None, None, *ctx.prepared.gradients_qkv(q, k, v, output, ctx.recorded[0], d_output)


# Plain tensors are in no transform of torch.func, and looking for one takes longer than a small kernel.
_apply_to_plain, _apply_to_qkv = apply_function(_Differentiable), apply_function(_QKVFunction)


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for the backward; and what they were, if a hook of the user's may pack them."""
    ctx.saved = None
    if saved_tensors_hooks(True) is not None:
        ctx.saved = [None if x is None else (x.shape, x.dtype, is_plain(x)) for x in tensors]
    ctx.save_for_backward(*tensors)


def _check_unpacked(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Raise if a hook of saved tensors unpacked others than were packed: kernels would read memory that is not there."""
    for x, saved in zip(tensors, ctx.saved or (), strict=False):
        if x is not None and (x.shape, x.dtype) != saved[:2]:
            raise CallError(
                f"attention: a hook of saved tensors unpacked {x.dtype} {tuple(x.shape)} where {saved[1]} {tuple(saved[0])} "
                "was packed. Fix: a hook that returns tensors of the same shape and dtype."
            )
        if x is not None and saved[2] and not is_plain(x):
            raise CallError(
                f"attention: a hook of saved tensors unpacked a tensor on {x.device} whose data does not lie in memory as it is.\n"
                "Fix: a hook that returns tensors like those that were packed."
            )


def _needs_formula(prepared: Prepared, inputs: Inputs, d_result: Result) -> bool:
    """Whether torch records a graph of the gradients, or passes tensors without data, or numbers that would spread."""
    if prepared.formula_dtype is not None or torch.is_grad_enabled() or active_mode() is not None:
        return True
    for x in d_result:
        if x is not None and plain_keys(x) is None:
            return True
    return not prepared.accepts(inputs, d_result.output)


def _by_formula(
    prepared: Prepared, call: Call, inputs: Inputs, d_result: Result, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the inputs that are ``wanted``; with a graph where torch records one."""
    name = prepared.formula_dtype
    dtype = None if name is None else getattr(torch, name)
    recording = torch.is_grad_enabled()

    def results(arrays: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The results that have a gradient."""
        cast = (x if x is None or dtype is None else x.to(dtype) for x in arrays)
        result = load("formula").prepare(call).run(Inputs(*cast))
        return tuple(x for x, d_x in zip(result, d_result, strict=True) if x is not None and d_x is not None)

    d_results = [d_x for d_x in d_result if d_x is not None]
    with torch.enable_grad():
        # Views: one tensor may be several inputs, or one input may derive from another, and each needs its own gradient.
        views = [None if x is None else x.view_as(x) for x in inputs]
        leaves = [x for x, want in zip(views, wanted, strict=False) if want and x is not None]
        pairs = [(x, d_x.to(x.dtype)) for x, d_x in zip(results(views), d_results, strict=True) if x.requires_grad]
        if pairs:
            outputs, d_outputs = zip(*pairs, strict=True)
            grads = iter(
                torch.autograd.grad(outputs, leaves, d_outputs, create_graph=recording, materialize_grads=True)
            )
        else:  # inside torch.func.grad or jvp, tensors from outside record no graph there
            arrays = views if recording else [None if x is None else x.detach() for x in inputs]

            def of_leaves(*changed: Tensor) -> tuple[Tensor, ...]:
                each = iter(changed)
                return results([next(each) if i < len(wanted) and wanted[i] else x for i, x in enumerate(arrays)])

            leaves = [x for x, want in zip(arrays, wanted, strict=False) if want and x is not None]
            pulled: Any = torch.func.vjp(of_leaves, *leaves)
            outputs, pull = pulled
            grads = iter(pull(tuple(d_x.to(x.dtype) for x, d_x in zip(outputs, d_results, strict=True))))
    return [next(grads) if want else None for want in wanted]
