"""Attention as torch operators, for torch.compile and torch.export.

    lowtri::attention                 the results of a call, with gradients
    lowtri::attention_forward         the results, without gradients
    lowtri::attention_for_gradients   the results, and the log-sum-exp that the gradients need
    lowtri::attention_backward        the gradients of q, k, v, bias and sinks, as far as they are wanted
    lowtri::dropout_seed              the seed of a call with dropout, from the generator that an eager call draws from

The graph has one node for a call (and one for its seed); masks and plans are not traced. The mask is passed as a text and the list of
its arrays as tensors, so the same graph runs with other batches of documents. A bias over distances is passed as the tensor that it is
made from and a text, ``bias_kind``. Eager calls on plain tensors do not use these operators.

Recording gradients in Python takes longer than a small kernel. So a call that records none is ``attention_forward``; and the graphs
of AOTAutograd have ``attention_for_gradients`` and ``attention_backward`` instead of ``attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.backends import GradientSource
from lowtri.compat import constant_while_traced
from lowtri.compat.torch_private import below_autograd, outside_graph, transform_stack
from lowtri.dispatch.backward import KnownResults, gradients_of_call
from lowtri.dispatch.exported import exports_to_onnx, formula_for_onnx
from lowtri.dispatch.prepared import autocast_device, find, prepared_call, run_eagerly, without_autocast
from lowtri.errors import CallError, MaskError
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask, from_text, to_text
from lowtri.ops.call import CallOptions
from lowtri.ops.distance_bias import bias_arguments, bias_from_arguments
from lowtri.ops.dropout import new_seed

__all__ = ["traced"]


class Arguments(NamedTuple):
    """The arguments of the operators, in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None  # of the dropout
    mask: str
    arrays: Sequence[Tensor] | None  # None without any: packages of AOTInductor cannot pass an empty list of tensors
    numbers: Sequence[int] | None  # one for each placeholder of the mask's text, -1 where that is an array
    q_positions: Tensor | None
    k_positions: Tensor | None
    scale: float | None
    softcap: float | None
    dropout: float
    bias_kind: str | None
    return_weights: bool
    return_received: bool
    return_lse: bool
    engine: str


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? seed, str mask, Tensor[]? arrays, SymInt[]? numbers, "
    "Tensor? q_positions, Tensor? k_positions, float? scale, float? softcap, float dropout, str? bias_kind, bool return_weights, "
    "bool return_received, bool return_lse, str engine"
)
_WITH_GRADIENTS = 5  # the first arguments: q, k, v, bias, sinks
_OPTIONS = 11  # the first argument that is neither a tensor nor of the mask


# A call that is traced.


def traced(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Any:
    """A call of attention under tracing: an operator; or a graph break for a mask with a Python function, and in torch.func.

    Each global name that is read here, or in a function that is called here, is compared at each call of the program.
    """
    bias = options.bias
    if bias is not None and type(bias).__name__ == "CausalBias":
        raise CallError('attention: bias is a CausalBias, which has no data. Fix: the mask "causal".')
    text: str | None = mask
    values: list[Any] = []
    if type(mask) is not str:
        if not isinstance(mask, Mask):
            as_mask(mask, "attention: mask")  # raises with the fix
        text, values = to_text(mask)
    if exports_to_onnx():
        return formula_for_onnx(q, k, v, mask, options)
    bias_kind = None
    if bias is not None:
        bias, bias_kind = bias_arguments(bias)
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if (
        text is None
        or not tensors
        or not (bias is None or isinstance(bias, Tensor))
        or _in_transform()  # for torch.func's, the operators have no rules
    ):
        return _eager(q, k, v, mask, options)
    arrays = numbers = None
    if values:
        arrays, numbers = _arrays_and_numbers(values)
    seed = None
    if options.dropout:
        # A compiler that removes equal operations keeps this one for each call, since each call has new memory.
        seed = _dropout_seed(torch.empty((), dtype=torch.int64))
    operator = _attention if _needs_gradients(q, k, v, bias, options.sinks) else _attention_without_gradients
    results = operator(
        q,
        k,
        v,
        bias,
        options.sinks,
        seed,
        text,
        arrays,
        numbers,
        None if options.q_positions is None else _tensor(options.q_positions),
        None if options.k_positions is None else _tensor(options.k_positions),
        options.scale,
        options.softcap,
        options.dropout,
        bias_kind,
        options.return_weights,
        options.return_received,
        options.return_lse,
        options.engine,
    )
    if options.return_weights or options.return_received or options.return_lse:
        return tuple(results)
    return results[0]


_eager = outside_graph(
    run_eagerly,
    "lowtri.attention with a mask of where(), with NumPy's arrays, or inside of torch.func's transforms runs outside of the graph",
)


@constant_while_traced
def _in_transform() -> bool:
    """Whether the program being traced is inside of one of torch.func's transforms, whose tensors require no gradient themselves."""
    return transform_stack() is not None


def _needs_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> bool:
    """Whether a gradient may be recorded; an exported program may also be trained where its example was not."""
    if not torch.compiler.is_dynamo_compiling() or _strictly_exporting():
        return True
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)


def _arrays_and_numbers(values: list[Any]) -> tuple[list[Tensor] | None, list[int] | None]:
    """What the placeholders of a mask's text stand for: the arrays as tensors, and the numbers, which are inputs of the graph, too."""
    arrays = [x for x in values if not isinstance(x, int)]
    if not all(isinstance(array, Tensor) for array in arrays) and _strictly_exporting():
        raise MaskError(
            "attention: torch.export(strict=True) does not keep the arrays of a mask, since they are NumPy's. Fix: strict=False."
        )
    numbers = [x if isinstance(x, int) else -1 for x in values]
    return [_tensor(array) for array in arrays] or None, numbers if len(numbers) > len(arrays) else None


def _strictly_exporting() -> bool:
    """Whether torch.export traces with the compiler, which replaces NumPy arrays by tensors without data."""
    return (
        torch.compiler.is_dynamo_compiling()
        and hasattr(torch.compiler, "is_exporting")
        and torch.compiler.is_exporting()
    )


def _tensor(array: Any) -> Any:
    """Positions, or an array of a mask, as a tensor."""
    if isinstance(array, Tensor):
        return array
    return torch.as_tensor(array if isinstance(array, np.ndarray) else list(array))


# What the operators compute.


def _forward(*arguments: Any) -> list[Tensor]:
    """The output, the weights, what keys received and the log-sum-exp, as far as the call returns them."""
    given = Arguments(*arguments)
    ready = None
    if given.seed is None and given.arrays is None and given.numbers is None and given.bias_kind is None:
        positions = None
        if given.q_positions is not None or given.k_positions is not None:
            positions = given.q_positions, given.k_positions
        ready, _ = find(
            given.q, given.k, given.v, given.bias, given.sinks, positions, given.mask, given.scale, given.softcap,
            given.dropout, given.return_weights, given.return_lse, given.engine, given.return_received,
        )  # fmt: skip
    if ready is None or ready.plain is None:
        return _run(given, for_gradients=False)
    return [ready.plain(given.q, given.k, given.v).contiguous()]


def _run(given: Arguments, for_gradients: bool) -> list[Tensor]:
    """The results; ``for_gradients`` also the log-sum-exp, inf where the backward needs none."""
    options = _options(given)
    with without_autocast(autocast_device(given.q)):
        ready, inputs = prepared_call(given.q, given.k, given.v, _mask(given), options)
        if for_gradients and ready.prepared.gradient_source() is GradientSource.LSE and not ready.call.return_lse:
            if ready.with_lse is None:  # the gradients need it
                options = options._replace(return_lse=True, engine=ready.backend)
                ready.with_lse, inputs = prepared_call(given.q, given.k, given.v, _mask(given), options)
            ready = ready.with_lse
        result = ready.run(inputs, given.seed)
    call, lse = ready.call, result.lse
    with_lse = given.return_lse or (for_gradients and lse is not None)
    results = [x.contiguous() for x in call.in_order(result, with_lse)]
    if for_gradients and lse is None:
        q = given.q
        results.append(q.new_full(q.shape[:-1], torch.inf, dtype=_wide(q)))
    return results


def _run_for_gradients(*arguments: Any) -> list[Tensor]:
    return _run(Arguments(*arguments), for_gradients=True)


def _fake_forward(*arguments: Any) -> list[Tensor]:
    given = Arguments(*arguments)
    if exports_to_onnx():
        raise CallError(
            "attention: torch.onnx.export got a program that was exported before, with lowtri's operator, which ONNX lacks.\n"
            "Fix: torch.onnx.export(model, args), with the model itself."
        )
    q, k = given.q, given.k
    results = [q.new_empty((*q.shape[:-1], given.v.shape[-1]))]
    if given.return_weights:
        results.append(q.new_empty((*q.shape[:-1], k.shape[-2])))
    if given.return_received:
        results.append(q.new_empty((*q.shape[:-2], k.shape[-2]), dtype=_wide(q)))
    if given.return_lse:
        results.append(q.new_empty(q.shape[:-1], dtype=_wide(q)))
    return results


def _fake_for_gradients(*arguments: Any) -> list[Tensor]:
    given = Arguments(*arguments)
    results = _fake_forward(*given)
    return results if given.return_lse else [*results, given.q.new_empty(given.q.shape[:-1], dtype=_wide(given.q))]


def _run_backward(
    d_results: Sequence[Tensor | None], output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """The gradients of those of q, k, v, bias and sinks that are ``wanted``.

    Args:
        d_results: the gradients of the output, the weights and the log-sum-exp.
    """
    given = Arguments(*arguments)
    leaves = [
        None if x is None else x.detach().requires_grad_(want)
        for x, want in zip(arguments[:_WITH_GRADIENTS], wanted, strict=True)
    ]
    d_output, d_weights, d_lse = d_results
    if d_output is None:
        d_output = torch.zeros_like(output)
    if d_weights is not None and not d_weights.any():  # the compiler passes zeros for results that nothing depends on
        d_weights = None
    known_lse = None if lse.isposinf().all() else lse  # a call whose backend was chosen for the forward may not have it
    known = KnownResults(output, known_lse, d_output, d_weights, d_lse, given.seed)
    grads = gradients_of_call(leaves, given.bias_kind, _mask(given), _options(given), known)
    return [d.contiguous() for d in grads if d is not None]


def _fake_backward(
    d_results: Sequence[Tensor | None], output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    inputs = (x for x, want in zip(arguments, wanted, strict=False) if want)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _mask(given: Arguments) -> Any:
    """The mask; a text without arrays is looked up as it is."""
    if given.arrays is None and given.numbers is None:
        return given.mask
    values: list[Any] = [array.cpu().numpy() for array in given.arrays or ()]
    if given.numbers is not None:
        each = iter(values)
        values = [next(each) if number < 0 else number for number in given.numbers]
    return from_text(given.mask, values)


def _options(given: Arguments) -> CallOptions:
    return CallOptions(
        given.scale,
        given.softcap,
        bias_from_arguments(given.bias, given.bias_kind),
        given.sinks,
        given.dropout,
        given.q_positions,
        given.k_positions,
        given.return_weights,
        given.return_lse,
        given.engine,
        given.return_received,
    )


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# Gradients.


class _Recorded(torch.autograd.Function):
    """The operator ``attention``, where a gradient may be recorded."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        given = Arguments(*arguments)
        with below_autograd():
            results = _attention_for_gradients(*given)
        lse = results[-1]
        tensors = [*given[: _WITH_GRADIENTS + 1], given.q_positions, given.k_positions, results[0], lse]
        ctx.save_for_backward(*tensors, *(given.arrays or ()))
        ctx.has_arrays = given.arrays is not None
        ctx.mask_and_numbers, ctx.options = (given.mask, given.numbers), given[_OPTIONS:]
        returned = results if given.return_lse else results[:-1]
        if given.return_received:
            ctx.mark_non_differentiable(returned[1 + given.return_weights])
        ctx.set_materialize_grads(False)
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) for _ in range(_WITH_GRADIENTS + 1)]
        positions = next(saved), next(saved)
        output, lse = next(saved), next(saved)
        arrays = list(saved) if ctx.has_arrays else None
        mask, numbers = ctx.mask_and_numbers
        arguments: list[Any] = [*inputs, mask, arrays, numbers, *positions, *ctx.options]
        given = Arguments(*arguments)
        each = iter(d_results)
        d_output = next(each)
        d_weights = next(each) if given.return_weights else None
        if given.return_received:
            next(each)
        d_lse = next(each) if given.return_lse else None
        wanted = list(ctx.needs_input_grad[:_WITH_GRADIENTS])
        grads = iter(_backward([d_output, d_weights, d_lse], output, lse, wanted, *arguments))
        others = len(arguments) - _WITH_GRADIENTS
        return (*(next(grads) if want else None for want in wanted), *[None] * others)


def _recorded(*arguments: Any) -> list[Tensor]:
    """The operator ``attention`` above autograd."""
    tensors = (x for x in arguments[:_WITH_GRADIENTS] if x is not None)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return list(_Recorded.apply(*arguments))
    with below_autograd():
        results: list[Tensor] = _attention_without_gradients(*arguments)
    return results


def _refuse_second_gradients(ctx: Any, *d_gradients: Any) -> Any:
    raise RuntimeError(
        "lowtri.attention_backward: a compiled program has no gradients of gradients.\n"
        "Fix: the function without torch.compile, where the formula gives them."
    )


# Defined in a library, since torch.library.custom_op takes some 20 us more for each call.
_LIBRARY = torch.library.Library("lowtri", "DEF")


def _define(name: str, schema: str, run: Any, fake: Any, *tags: Any) -> Any:
    """Define an operator; ``run`` computes it on any device, ``fake`` gives the shapes of its results."""
    _LIBRARY.define(f"{name}{schema}", tags=[torch.Tag.pt2_compliant_tag, *tags])
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowtri::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lowtri, name).default


_attention: Any = _define("attention", f"({_SCHEMA}) -> Tensor[]", _forward, _fake_forward)
_attention_without_gradients: Any = _define("attention_forward", f"({_SCHEMA}) -> Tensor[]", _forward, _fake_forward)
_attention_for_gradients: Any = _define(
    "attention_for_gradients", f"({_SCHEMA}) -> Tensor[]", _run_for_gradients, _fake_for_gradients
)
_backward: Any = _define(
    "attention_backward",
    f"(Tensor?[] d_results, Tensor output, Tensor lse, bool[] wanted, {_SCHEMA}) -> Tensor[]",
    _run_backward,
    _fake_backward,
)
_dropout_seed: Any = _define(
    "dropout_seed",
    "(Tensor memory) -> Tensor",
    lambda memory: new_seed(is_numpy=False),
    torch.empty_like,
    torch.Tag.nondeterministic_seeded,
)
_LIBRARY.impl("attention", _recorded, "Autograd")
torch.library.register_autograd("lowtri::attention_backward", _refuse_second_gradients, lib=_LIBRARY)
