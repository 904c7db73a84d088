"""Attention as two torch operators, for torch.compile and torch.export.

    lowtri::attention            q, k, v and the rest -> output, log-sum-exp
    lowtri::attention_backward   -> gradients of q, k, v, bias and sinks, as far as they need them

The graph has one node for a call; masks and plans are not traced. The mask is passed as a text and the list of its arrays as
tensors, so the same graph runs with other batches of documents. A bias over distances is passed as the tensor that it is made from
and a text, ``bias_kind``. Eager calls on plain tensors do not use these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.compat.torch_private import outside_graph, recording_gradients
from lowtri.dispatch.backward import gradients_from_output, gradients_of_results
from lowtri.dispatch.prepared import CachedCall, autocast_device, prepared_call, run_eagerly, without_autocast
from lowtri.errors import CallError, MaskError
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask, pack, unpack
from lowtri.ops.call import CallOptions, Inputs
from lowtri.ops.distance_bias import packed_bias, unpacked_bias

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, str mask, Tensor[] arrays, Tensor? q_positions, "
    "Tensor? k_positions, float? scale, float? softcap, str? bias_kind, bool return_lse, str engine"
)


def traced(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Any:
    """A call of attention under tracing: the operator, or a graph break for what the operator does not support.

    Weights, dropout and masks with a Python function (``where``) run outside of the graph.
    """
    if type(options.bias).__name__ == "CausalBias":
        raise CallError('attention: bias is a CausalBias, which has no data. Fix: the mask "causal".')
    if not isinstance(mask, (Mask, str)):
        as_mask(mask, "attention: mask")  # raises with the fix
    text, arrays = pack(mask) if isinstance(mask, Mask) else (mask, [])
    if _strictly_exporting() and not all(isinstance(array, Tensor) for array in arrays):
        raise MaskError(
            "attention: torch.export(strict=True) does not keep the arrays of a mask, since they are NumPy's. Fix: strict=False."
        )
    bias, bias_kind = packed_bias(options.bias)
    tensors = all(isinstance(x, Tensor) for x in (q, k, v)) and (bias is None or isinstance(bias, Tensor))
    if text is None or options.dropout or options.return_weights or not tensors:
        return _eager(q, k, v, mask, options)
    output, lse = _attention(
        q,
        k,
        v,
        bias,
        options.sinks,
        text,
        [_tensor(array) for array in arrays],
        _tensor(options.q_positions),
        _tensor(options.k_positions),
        options.scale,
        options.softcap,
        bias_kind,
        options.return_lse,
        options.engine,
    )
    return (output, lse) if options.return_lse else output


_eager = outside_graph(
    run_eagerly, "lowtri.attention with dropout=, return_weights= or a mask of where() runs outside of the graph"
)


def _strictly_exporting() -> bool:
    """Whether torch.export traces with the compiler, which replaces NumPy arrays by tensors without data."""
    return (
        torch.compiler.is_dynamo_compiling()
        and hasattr(torch.compiler, "is_exporting")
        and torch.compiler.is_exporting()
    )


def _tensor(array: Any) -> Any:
    """Positions, or an array of a mask, as a tensor."""
    if array is None or isinstance(array, Tensor):
        return array
    return torch.as_tensor(array if isinstance(array, np.ndarray) else list(array))


@torch.library.custom_op("lowtri::attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Output (..., Hq, Nq, Dv) and log-sum-exp (..., Hq, Nq); the latter is 0 where neither the caller nor the backward needs it."""
    ready, inputs = _prepared(q, k, v, *rest)
    if ready.prepared.from_output and not ready.call.return_lse:  # the gradients need it
        rest = (*rest[:-2], True, ready.backend)
        ready, inputs = _prepared(q, k, v, *rest)
    with without_autocast(autocast_device(q)):
        result = ready.run(inputs)
    restore = ready.call.restore
    lse = q.new_zeros(q.shape[:-1], dtype=_wide(q)) if result.lse is None else restore(result.lse)
    return restore(result.output).contiguous(), lse.contiguous()


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=_wide(q))


@torch.library.custom_op(
    "lowtri::attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_output, Tensor d_lse, Tensor output, Tensor lse, bool[] wanted, {_ARGUMENTS}) -> Tensor[]",
)
def _backward(
    d_output: Tensor, d_lse: Tensor, output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """The gradients of those of q, k, v, bias and sinks that are ``wanted``. Some backends run forward again."""
    inputs: Any = [
        None if x is None else x.detach().requires_grad_(want) for x, want in zip(arguments[:5], wanted, strict=True)
    ]
    with recording_gradients(), without_autocast(autocast_device(output)):
        ready, rows = _prepared(*inputs, *arguments[5:])
        call = ready.call
        if ready.prepared.from_output:
            grads = gradients_from_output(ready, rows, inputs, output, lse, d_output, d_lse)
        else:
            result = ready.run(rows)
            results, d_results = [call.restore(result.output)], [d_output]
            if call.return_lse:
                results.append(call.restore(result.lse))
                d_results.append(d_lse)
            grads = gradients_of_results(results, d_results, inputs)
    return [d.contiguous() for d, want in zip(grads, wanted, strict=True) if want and d is not None]


@_backward.register_fake
def _(
    d_output: Tensor, d_lse: Tensor, output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    inputs = (x for x, want in zip(arguments[:5], wanted, strict=True) if want)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the gradients need: all arguments, the output and its log-sum-exp."""
    q, k, v, bias, sinks, mask, arrays, q_positions, k_positions, *options = inputs
    ctx.save_for_backward(q, k, v, bias, sinks, q_positions, k_positions, *arrays, *output)
    ctx.mask, ctx.options = mask, options


def _gradients(ctx: Any, d_output: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, sinks, q_positions, k_positions, *arrays, output, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:5])
    arguments = (q, k, v, bias, sinks, ctx.mask, arrays, q_positions, k_positions, *ctx.options)
    grads = iter(_backward(d_output, d_lse, output, lse, wanted, *arguments))
    of_mask = (None, [None] * len(arrays))
    return (*(next(grads) if want else None for want in wanted), *of_mask, *[None] * 7)


_attention.register_autograd(_gradients, setup_context=_keep)


def _prepared(
    q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: str, arrays: Sequence[Tensor], *rest: Any
) -> tuple[CachedCall, Inputs]:
    """The prepared call for the operator's arguments, in their order."""
    q_positions, k_positions, scale, softcap, bias_kind, return_lse, engine = rest
    read = unpack(mask, [array.cpu().numpy() for array in arrays])
    options = CallOptions(
        scale,
        softcap,
        unpacked_bias(bias, bias_kind),
        sinks,
        q_positions=q_positions,
        k_positions=k_positions,
        return_lse=return_lse,
        engine=engine,
    )
    return prepared_call(q, k, v, read, options)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
