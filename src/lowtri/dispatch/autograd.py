"""Gradients of prepared calls: the first by the backend, all further ones by the formula.

Kernels and torch's fused attention return gradients without a graph, the definition none. Where torch needs a graph
(``create_graph=True``) or transforms the backward, the formula recomputes the call, tile by tile, and is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtri.backends import GradientSource, LostSums, Prepared
from lowtri.backends.formula import FormulaCall, no_gradient_of_received
from lowtri.compat.torch_private import apply_function, saved_tensors_hooks
from lowtri.errors import CallError
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.tensors import active_mode, dense_keys, is_dense_cpu, loop_over_vmapped_grads


def differentiable(prepared: Prepared, call: Call, inputs: Inputs, seed: Any = None) -> Result:
    """The result of a prepared call, with gradients."""
    # Each argument takes microseconds, so most calls have three tensors only.
    arrays = inputs[:3] if inputs.bias is None and inputs.sinks is None else inputs
    apply = apply_to_dense if call.why_unreadable is None else _Differentiable.apply
    results = apply(lambda *arrays: prepared.run(Inputs(*arrays), seed), prepared, call, *arrays)
    if not isinstance(results, tuple):
        return Result(results)
    return Result(results[0], results[1], results[2], None, results[3])


class _Differentiable(torch.autograd.Function):
    """The output of a prepared call; with its weights, log-sum-exp and received weights, None where there are none, if the call returns
    any of them.

    ``run`` takes the inputs as they are, and returns the fields of the result.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], prepared: Prepared, call: Call, *inputs: Tensor | None) -> Any:
        result = run(*inputs)
        output, state = result[0], result[3]
        weights, lse = result[1], result[2]
        received = result[4] if len(result) > 4 else None
        packed = None  # what was saved, if a hook of the user's may pack it
        if saved_tensors_hooks(True) is not None:
            packed = [None if x is None else (x.shape, x.dtype, is_dense_cpu(x)) for x in (*inputs, output)]
        ctx.forward_state = prepared, call, [state], packed  # in one attribute, since each takes time
        ctx.save_for_backward(*inputs, output)
        if weights is None and lse is None and received is None:  # alone: each further result takes microseconds
            return output
        ctx.set_materialize_grads(False)
        return output, weights, lse, received

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> Any:
        for x in d_results:
            if x is not None and dense_keys(x) is None:  # a batch of gradients, or a tensor without data
                return _each_backward(ctx, *d_results)
        return _backward(ctx, True, *d_results)


@loop_over_vmapped_grads
def _each_backward(ctx: Any, *d_results: Tensor | None) -> Any:
    return _backward(ctx, all(x is None or is_dense_cpu(x) for x in d_results), *d_results)


def _backward(
    ctx: Any, dense: bool, d_output: Any, d_weights: Any = None, d_lse: Any = None, d_received: Any = None
) -> Any:
    """What the backward returns; ``dense``: the gradients of all results have data."""
    if d_received is not None:
        raise no_gradient_of_received()
    prepared, call = ctx.forward_state[:2]
    states, packed = ctx.forward_state[2:]
    *arrays, output = ctx.saved_tensors
    inputs = Inputs(*arrays)
    if d_output is None:
        d_output = torch.zeros_like(output)
    transformed = torch.is_grad_enabled() or active_mode() is not None  # torch records a graph of the gradients
    source = prepared.gradient_source()
    by_formula = transformed or not dense or source is GradientSource.FORMULA
    by_formula = by_formula or (d_weights is not None and source is GradientSource.LSE)

    def gradients_by_formula() -> Any:
        d_result = Result(d_output, d_weights, d_lse)
        seed = states[0].seed if call.dropout else None
        wanted = ctx.needs_input_grad[3:]
        return None, None, None, *_by_formula(prepared, call, inputs, d_result, wanted, seed)

    if by_formula or (prepared.checks_values() and not prepared.is_exact_for(inputs, d_output)):
        return gradients_by_formula()
    if packed is not None:
        _check_unpacked((*arrays, output), packed)
    if source is GradientSource.LSE:
        state = states[0]
    else:  # the first backward consumes a graph, which frees its memory; a second one records it again
        state = states.pop() if states else prepared.run(inputs).state
    try:
        return None, None, None, *prepared.gradients(inputs, output, state, d_output, d_lse)[: len(arrays)]
    except LostSums:
        return gradients_by_formula()


# Dense tensors are in no transform of torch.func, and looking for one takes longer than a small kernel.
apply_to_dense = apply_function(_Differentiable)


def _check_unpacked(tensors: Sequence[Tensor | None], packed: Sequence[Any]) -> None:
    """Raise if a hook of saved tensors unpacked others than were packed: kernels would read memory that is not there."""
    for x, saved in zip(tensors, packed, strict=True):
        if x is not None and (x.shape, x.dtype) != saved[:2]:
            raise CallError(
                f"attention: a hook of saved tensors unpacked {x.dtype} {tuple(x.shape)} where {saved[1]} {tuple(saved[0])} "
                "was packed. Fix: a hook that returns tensors of the same shape and dtype."
            )
        if x is not None and saved[2] and not is_dense_cpu(x):
            raise CallError(
                f"attention: a hook of saved tensors unpacked a tensor on {x.device} whose data does not lie in memory as it is.\n"
                "Fix: a hook that returns tensors like those that were packed."
            )


def _by_formula(
    prepared: Prepared, call: Call, inputs: Inputs, d_result: Result, wanted: Sequence[bool], seed: int | None
) -> list[Tensor | None]:
    """The gradients of the inputs that are ``wanted``; with a graph where torch records one. ``seed``: of the dropout."""
    dtype = torch.float64 if prepared.gradient_source() is GradientSource.FORMULA else None
    formula = FormulaCall(call)
    recording = torch.is_grad_enabled()

    def results(arrays: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The results that have a gradient."""
        cast = (x if x is None or dtype is None else x.to(dtype) for x in arrays)
        result = formula.run(Inputs(*cast), seed)
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
            arrays = views
            if not recording:
                arrays = [None if x is None else x.detach() for x in inputs]

            def of_leaves(*changed: Tensor) -> tuple[Tensor, ...]:
                each = iter(changed)
                return results([next(each) if i < len(wanted) and wanted[i] else x for i, x in enumerate(arrays)])

            leaves = [x for x, want in zip(arrays, wanted, strict=False) if want and x is not None]
            pulled: Any = torch.func.vjp(of_leaves, *leaves)
            outputs, pull = pulled
            grads = iter(pull(tuple(d_x.to(x.dtype) for x, d_x in zip(outputs, d_results, strict=True))))
    return [next(grads) if want else None for want in wanted]
