"""Attention as torch operators, for torch.compile and torch.export.

    lowtri::attention                 the results of a call, with gradients
    lowtri::attention_forward         the results, without gradients
    lowtri::attention_output          the output alone, without gradients
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
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.backends import GradientSource
from lowtri.compat import constant_while_traced, is_fixed, is_surely, tensor_of, tracer
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
    """The arguments of the operators, in their order. They are few, since torch converts each of them at each call."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: str  # the mask and what else is no number, as _call_text writes it
    # Those that ``call`` names, then the mask's arrays. Packages of AOTInductor cannot pass an empty list.
    tensors: Sequence[Tensor] | None = None
    factors: Sequence[float] | None = None  # those that ``call`` names
    numbers: Sequence[int] | None = None  # one for each placeholder of the mask's text


# Bytes of a mask's arrays up to which the mask is kept: reading larger ones takes a small part of their call.
_MOST_KEPT = 2**16
_AN_ARRAY = -(2**63)  # among the numbers, in the place of an array
_SCHEMA = "Tensor q, Tensor k, Tensor v, str call, Tensor[]? tensors, float[]? factors, SymInt[]? numbers"


class CallText(NamedTuple):
    """What the text of a call says.

    Attributes:
        mask: the text of the mask.
        options: those that are neither tensors nor numbers.
        bias_kind: the kind of a bias over distances.
        tensors, factors: the names of those that are given, in their order: bias and sinks before other tensors.
    """

    mask: str
    options: CallOptions
    bias_kind: str | None
    tensors: tuple[str, ...]
    factors: tuple[str, ...]


_FACTORS = "scale", "softcap", "dropout"
# The words for tensors; a factor is one where each run of the program computes it.
_TENSORS = "bias", "sinks", "seed", "q_positions", "k_positions", "scale_tensor", "softcap_tensor", "dropout_tensor"


@lru_cache(1024)
def _read_call(text: str) -> CallText:
    """A call from its text, as ``"return_lse; engine=cpu; bias; sinks; scale; mask=causal"``."""
    head, _, mask = text.partition("mask=")
    words = head.split("; ")[:-1]
    values: dict[str, Any] = dict(word.split("=", 1) for word in words if "=" in word)
    bias_kind = values.pop("bias_kind", None)
    flags: dict[str, Any] = {word: True for word in words if word.startswith("return_")}
    tensors = tuple(word for word in words if word in _TENSORS)
    factors = tuple(word for word in words if word in _FACTORS)
    return CallText(mask, CallOptions(**flags, **values), bias_kind, tensors, factors)


# A call that is traced.


def traced(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> Any:
    """A call of attention under tracing: an operator; or a graph break for a mask with a Python function, and in torch.func.

    Each global name that is read here, or in a function that is called here, is compared at each call of the program, and more slowly
    if the program reads the same object by another name. What ``constant_while_traced`` marks is not traced.

    Args:
        options: the keyword arguments that are given.
    """
    _check_names(options)
    bias, bias_kind = options.get("bias"), None
    if bias is not None:
        if type(bias).__name__ == "CausalBias":
            raise CallError('attention: bias is a CausalBias, which has no data. Fix: the mask "causal".')
        bias, bias_kind = bias_arguments(bias)
    text: str | None
    values: list[Any] = []
    if isinstance(mask, str):
        text = mask
    else:
        if not isinstance(mask, Mask):
            as_mask(mask, "attention: mask")  # raises with the fix
        text, values = to_text(mask)
    kind = _kind_of_trace()
    if kind == "onnx":
        return formula_for_onnx(q, k, v, mask, CallOptions(**options))
    if text is None or kind == "transform" or not _are_of_operator(q, k, v, bias, options):
        return _eager(q, k, v, mask, CallOptions(**options))
    dtype = _autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, v = [x.to(dtype) if x.dtype == torch.float32 else x for x in (q, k, v)]
    call, tensors, factors = _call_text(text, bias, bias_kind, options)
    numbers = None
    if values:
        arrays, numbers = _arrays_and_numbers(values)
        tensors += arrays
    arguments = (call, tensors or None, factors or None, numbers)
    returns_more = options.get("return_weights") or options.get("return_received") or options.get("return_lse")
    is_trained = kind == "with gradients" and _requires_gradients(q, k, v, bias, options.get("sinks"))
    if kind == "exported" or is_trained:
        results = _attention(q, k, v, *arguments)
    elif returns_more:
        results = _attention_forward(q, k, v, *arguments)
    else:
        return _attention_output(q, k, v, *arguments)
    return tuple(results) if returns_more else results[0]


_eager = outside_graph(
    run_eagerly,
    "lowtri.attention with a mask of where(), with NumPy's arrays, with arguments of unusual kinds, or inside of torch.func's "
    "transforms runs outside of the graph",
)


def _are_of_operator(q: Any, k: Any, v: Any, bias: Any, options: dict[str, Any]) -> bool:
    """Whether arguments are of the kinds that operators take; the eager call converts others, or says what is wrong with them."""
    sinks, engine = options.get("sinks"), options.get("engine", "auto")
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if q.ndim < 2 or k.ndim != q.ndim or v.ndim != q.ndim or k.device != q.device or v.device != q.device:
        return False
    if not (isinstance(engine, str) and engine.isidentifier()):
        return False
    for x in (bias, sinks):
        if not (x is None or isinstance(x, Tensor)):
            return False
    for x in (options.get("scale"), options.get("softcap"), options.get("dropout", 0.0)):
        if isinstance(x, (Tensor, str, complex)):  # NumPy's numbers are neither, and taken
            return False
    for x in (options.get("return_weights"), options.get("return_received"), options.get("return_lse")):
        if not (x is None or isinstance(x, int)):
            return False
    positions = options.get("q_positions"), options.get("k_positions")
    return options.get("dropout", 0.0) is not None and not any(isinstance(x, str) for x in positions)


@constant_while_traced
def _kind_of_trace() -> str:
    """What the program is traced for.

    Exported programs may also be trained where their example was not. Inside of torch.func's transforms, whose tensors require no
    gradient themselves, the operators have no rules.
    """
    if exports_to_onnx():
        return "onnx"
    if transform_stack() is not None:
        return "transform"
    if tracer():  # torch.export's; the compiler's program is said to run while this constant is computed
        return "exported"
    return "with gradients" if torch.is_grad_enabled() else "without gradients"


@constant_while_traced
def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype to which autocast casts on this kind of device; None where it is off."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name not in (
            "scale", "softcap", "bias", "sinks", "dropout", "q_positions", "k_positions",
            "return_weights", "return_received", "return_lse", "engine",
        ):  # fmt: skip
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")


def _call_text(
    mask: str, bias: Tensor | None, bias_kind: str | None, options: dict[str, Any]
) -> tuple[str, list[Tensor], list[float]]:
    """The text of a call, which :func:`_read_call` reads, and the tensors and the factors that it names."""
    words: list[str] = []
    tensors: list[Tensor] = []
    factors: list[float] = []
    if options.get("return_weights"):
        words.append("return_weights")
    if options.get("return_received"):
        words.append("return_received")
    if options.get("return_lse"):
        words.append("return_lse")
    engine = options.get("engine", "auto")
    if engine != "auto":
        words.append(f"engine={engine}")
    if bias_kind is not None:
        words.append(f"bias_kind={bias_kind}")
    if bias is not None:
        words.append("bias")
        tensors.append(bias)
    if options.get("sinks") is not None:
        words.append("sinks")
        tensors.append(options["sinks"])
    given = [name for name in ("scale", "softcap") if options.get(name) is not None]
    if _may_drop(options.get("dropout", 0.0)):
        words.append("seed")
        # A compiler that removes equal operations keeps this one for each call, since each call has new memory.
        tensors.append(_dropout_seed(torch.empty((), dtype=torch.int64)))
        given.append("dropout")
    if options.get("q_positions") is not None:
        words.append("q_positions")
        tensors.append(tensor_of(options["q_positions"]))
    if options.get("k_positions") is not None:
        words.append("k_positions")
        tensors.append(tensor_of(options["k_positions"]))
    for name in given:
        if is_fixed(options[name]):
            words.append(name)
            factors.append(options[name])
        else:
            words.append(f"{name}_tensor")
            tensors.append(tensor_of(options[name]))
    words.append(f"mask={mask}")
    return "; ".join(words), tensors, factors


def _may_drop(dropout: Any) -> bool:
    """Whether there may be dropout; also where it is known only when the program runs."""
    return isinstance(dropout, np.ndarray) or not is_surely(dropout == 0)


def _requires_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)


def _arrays_and_numbers(values: list[Any]) -> tuple[list[Tensor], list[int] | None]:
    """What the placeholders of a mask's text stand for: the arrays as tensors, and the numbers, which are inputs of the graph, too."""
    arrays = [x for x in values if not isinstance(x, int)]
    if not all(isinstance(array, Tensor) for array in arrays) and tracer() == "strict export":
        raise MaskError(
            "attention: torch.export(strict=True) does not keep the arrays of a mask, since they are NumPy's. Fix: strict=False."
        )
    numbers = [x if isinstance(x, int) else _AN_ARRAY for x in values]
    return [tensor_of(array) for array in arrays], numbers if len(numbers) > len(arrays) else None


# What the operators compute.


class Given(NamedTuple):
    """The arguments of an operator, read: those of :func:`lowtri.attention`.

    Attributes:
        mask: a mask; or its text where that says all, which is looked up as it is.
        seed: of the dropout.
        bias_kind: the kind of a bias over distances; ``options.bias`` is that bias.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: CallOptions
    seed: Tensor | None
    bias_kind: str | None


def _given(arguments: Arguments) -> Given:
    q, k, v = arguments[:3]
    call = _read_call(arguments.call)
    if not any(arguments[4:]):  # most calls
        return Given(q, k, v, call.mask, call.options, None, None)
    tensors = list(arguments.tensors or ())
    named: dict[str, Any] = dict(zip(call.tensors, tensors, strict=False))
    factors: dict[str, Any] = dict(zip(call.factors, arguments.factors or (), strict=True))
    seed = named.pop("seed", None)
    factors |= {name: named.pop(f"{name}_tensor").item() for name in _FACTORS if f"{name}_tensor" in named}
    options = call.options._replace(**named, **factors)
    options = options._replace(bias=bias_from_arguments(options.bias, call.bias_kind))
    mask = _mask(call.mask, tensors[len(call.tensors) :], arguments.numbers)
    return Given(q, k, v, mask, options, seed, call.bias_kind)


def _mask(text: str, arrays: Sequence[Tensor], numbers: Sequence[int] | None) -> Any:
    """The mask of a text and its values; or the text, where it has none."""
    if not arrays and numbers is None:
        return text
    values = [array.cpu().numpy() for array in arrays]
    in_order = None if numbers is None else tuple(numbers)
    if sum(array.nbytes for array in values) > _MOST_KEPT:
        return _mask_of(text, values, in_order)
    return _known_mask(text, tuple((array.tobytes(), array.dtype.str, array.shape) for array in values), in_order)


@lru_cache(64)
def _known_mask(
    text: str, contents: tuple[tuple[bytes, str, tuple[int, ...]], ...], numbers: tuple[int, ...] | None
) -> Any:
    """The mask of arrays with these contents: its text is read once, and its arrays are compared once."""
    arrays = [np.frombuffer(content, dtype).reshape(shape) for content, dtype, shape in contents]
    return _mask_of(text, arrays, numbers)


def _mask_of(text: str, arrays: list[NDArray[Any]], numbers: tuple[int, ...] | None) -> Any:
    values: list[Any] = arrays
    if numbers is not None:
        each = iter(arrays)
        values = [next(each) if number == _AN_ARRAY else number for number in numbers]
    return from_text(text, values)


def _output(
    q: Tensor, k: Tensor, v: Tensor, text: str, tensors: Any = None, factors: Any = None, numbers: Any = None
) -> Tensor:
    call = _read_call(text)
    if not call.tensors:
        options = call.options
        if factors is not None:
            options = options._replace(**dict(zip(call.factors, factors, strict=True)))
        mask = _mask(call.mask, tensors or (), numbers)
        ready, _ = find(q, k, v, None, None, None, mask, options.scale, options.softcap, 0.0, *options[7:])
        if ready is not None and ready.plain is not None:
            output: Tensor = ready.plain(q, k, v).contiguous()
            return output
    return _forward(q, k, v, text, tensors, factors, numbers)[0]


def _forward(*arguments: Any) -> list[Tensor]:
    """The output, the weights, what keys received and the log-sum-exp, as far as the call returns them."""
    return _run(_given(Arguments(*arguments)), for_gradients=False)


def _run(given: Given, for_gradients: bool) -> list[Tensor]:
    """The results; ``for_gradients`` also the log-sum-exp, inf where the backward needs none."""
    q, options = given.q, given.options
    with without_autocast(autocast_device(q)):
        ready, inputs = prepared_call(q, given.k, given.v, given.mask, options)
        if for_gradients and ready.prepared.gradient_source() is GradientSource.LSE and not ready.call.return_lse:
            if ready.with_lse is None:  # the gradients need it
                with_lse = options._replace(return_lse=True, engine=ready.backend)
                ready.with_lse, inputs = prepared_call(q, given.k, given.v, given.mask, with_lse)
            ready = ready.with_lse
        result = ready.run(inputs, given.seed)
    call, lse = ready.call, result.lse
    with_lse_returned = options.return_lse or (for_gradients and lse is not None)
    results = [x.contiguous() for x in call.in_order(result, with_lse_returned)]
    if for_gradients and lse is None:
        results.append(q.new_full(q.shape[:-1], torch.inf, dtype=_wide(q)))
    return results


def _run_for_gradients(*arguments: Any) -> list[Tensor]:
    return _run(_given(Arguments(*arguments)), for_gradients=True)


def _fake_forward(*arguments: Any) -> list[Tensor]:
    given = Arguments(*arguments)
    if exports_to_onnx():
        raise CallError(
            "attention: torch.onnx.export got a program that was exported before, with lowtri's operator, which ONNX lacks.\n"
            "Fix: torch.onnx.export(model, args), with the model itself."
        )
    q, k = given.q, given.k
    options = _read_call(given.call).options
    results = [q.new_empty((*q.shape[:-1], given.v.shape[-1]))]
    if options.return_weights:
        results.append(q.new_empty((*q.shape[:-1], k.shape[-2])))
    if options.return_received:
        results.append(q.new_empty((*q.shape[:-2], k.shape[-2]), dtype=_wide(q)))
    if options.return_lse:
        results.append(q.new_empty(q.shape[:-1], dtype=_wide(q)))
    return results


def _fake_output(*arguments: Any) -> Tensor:
    return _fake_forward(*arguments)[0]


def _fake_for_gradients(*arguments: Any) -> list[Tensor]:
    q, text = arguments[0], arguments[3]
    results = _fake_forward(*arguments)
    if not _read_call(text).options.return_lse:
        results.append(q.new_empty(q.shape[:-1], dtype=_wide(q)))
    return results


def _run_backward(
    d_results: Sequence[Tensor | None], output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """The gradients of those of q, k, v, bias and sinks that are ``wanted``.

    Args:
        d_results: the gradients of the output, the weights and the log-sum-exp.
        wanted: for each of those that are given, in this order.
    """
    inputs = Arguments(*arguments)
    leaves = {
        name: x.detach().requires_grad_(want)
        for (name, x), want in zip(_differentiable(inputs).items(), wanted, strict=True)
    }
    given = _given(inputs)
    d_output, d_weights, d_lse = d_results
    if d_output is None:
        d_output = torch.zeros_like(output)
    if d_weights is not None and not d_weights.any():  # the compiler passes zeros for results that nothing depends on
        d_weights = None
    known_lse = None if lse.isposinf().all() else lse  # a call whose backend was chosen for the forward may not have it
    known = KnownResults(output, known_lse, d_output, d_weights, d_lse, given.seed)
    in_order = [leaves.get(name) for name in ("q", "k", "v", "bias", "sinks")]
    grads = gradients_of_call(in_order, given.bias_kind, given.mask, given.options, known)
    return [d.contiguous() for d in grads if d is not None]


def _fake_backward(
    d_results: Sequence[Tensor | None], output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    inputs = zip(_differentiable(Arguments(*arguments)).values(), wanted, strict=True)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, want in inputs if want]


def _differentiable(arguments: Arguments) -> dict[str, Tensor]:
    """Those of q, k, v, bias and sinks that are given, in this order."""
    named = zip(_read_call(arguments.call).tensors, arguments.tensors or (), strict=False)
    differentiable = {"q": arguments.q, "k": arguments.k, "v": arguments.v}
    return differentiable | {name: x for name, x in named if name in ("bias", "sinks")}


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# Gradients.


class _Recorded(torch.autograd.Function):
    """The operator ``attention``, where a gradient may be recorded."""

    @staticmethod
    def forward(ctx: Any, text: str, factors: Any, numbers: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            results = _attention_for_gradients(*_arguments(text, factors, numbers, tensors))
        ctx.save_for_backward(results[0], results[-1], *tensors)
        ctx.others = text, factors, numbers
        options = _read_call(text).options
        returned = results if options.return_lse else results[:-1]
        if options.return_received:
            ctx.mark_non_differentiable(returned[1 + options.return_weights])
        ctx.set_materialize_grads(False)
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> tuple[Any, ...]:
        output, lse, *tensors = ctx.saved_tensors
        text, factors, numbers = ctx.others
        arguments = _arguments(text, factors, numbers, tensors)
        options = _read_call(arguments.call).options
        each = iter(d_results)
        d_output = next(each)
        d_weights = next(each) if options.return_weights else None
        if options.return_received:
            next(each)
        d_lse = next(each) if options.return_lse else None
        needed = ctx.needs_input_grad[3:]  # of the tensors
        wanted = list(needed[: len(_differentiable(arguments))])
        grads = iter(_backward([d_output, d_weights, d_lse], output, lse, wanted, *arguments))
        return (None, None, None, *(next(grads) if need else None for need in needed))


def _arguments(text: str, factors: Any, numbers: Any, tensors: Sequence[Tensor]) -> Arguments:
    """The arguments of an operator from those of ``_Recorded``, to which each tensor is passed by itself."""
    q, k, v = tensors[:3]
    return Arguments(q, k, v, text, list(tensors[3:]) or None, factors, numbers)


def _recorded(*arguments: Any) -> list[Tensor]:
    """The operator ``attention`` above autograd."""
    given = Arguments(*arguments)
    if torch.is_grad_enabled() and any(x.requires_grad for x in _differentiable(given).values()):
        tensors = given.tensors or ()
        return list(_Recorded.apply(given.call, given.factors, given.numbers, given.q, given.k, given.v, *tensors))
    with below_autograd():
        results: list[Tensor] = _attention_forward(*given)
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
_attention_forward: Any = _define("attention_forward", f"({_SCHEMA}) -> Tensor[]", _forward, _fake_forward)
_attention_output: Any = _define("attention_output", f"({_SCHEMA}) -> Tensor", _output, _fake_output)
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
