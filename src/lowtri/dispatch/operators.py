"""Attention as two torch operators, for torch.compile and torch.export; and gradients from a known output and log-sum-exp.

    lowtri::attention            q, k, v and the rest -> output, log-sum-exp
    lowtri::attention_backward   -> gradients of q, k, v, bias and sinks, as far as they need them

The graph has one node for a call; masks and plans are not traced. The mask is passed as a text and the list of its arrays as
tensors, so the same graph runs with other batches of documents. A bias over distances is passed as the tensor that it is made from
and a text, ``bias_kind``. Eager calls on plain tensors do not use these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lowtri.backends import GradientSource, PreparedWithGradients
from lowtri.compat.torch_private import outside_graph, recording_gradients
from lowtri.dispatch.exported import exports_to_onnx, formula_for_onnx
from lowtri.dispatch.prepared import CachedCall, autocast_device, prepared_call, run_eagerly, without_autocast
from lowtri.errors import CallError, MaskError
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask, from_text, to_text
from lowtri.ops.call import CallOptions, Inputs
from lowtri.ops.distance_bias import packed_bias, unpacked_bias

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lowtri.ops.call import Options


class Gradients(NamedTuple):
    """The gradients that :func:`attention_backward` returns, each in the shape of its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # None unless the bias requires a gradient
    sinks: Tensor | None = None  # None unless the sinks do


def attention_backward(
    d_output: Tensor,
    d_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | str,
    *,
    wide: bool = False,
    engine: str = "auto",
    **options: Unpack[Options],
) -> Gradients:
    """The gradients of a call of :func:`lowtri.attention`, from its output and log-sum-exp, without running it again where possible.

    >>> import torch, lowtri
    >>> q, k, v, d_output = torch.randn(4, 1, 2, 8, 16).requires_grad_()
    >>> output, lse = lowtri.attention(q, k, v, "causal", return_lse=True)
    >>> exact = torch.autograd.grad(output, (q, k, v), d_output)
    >>> grads = lowtri.attention_backward(d_output, None, output, lse, q, k, v, "causal")
    >>> all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, exact))
    True

    ``k`` and ``v`` may be a part of the keys and values that gave ``output`` and ``lse``, with their ``k_positions``. The result
    then has the gradients of that part; those of q (and bias) add up over disjoint parts. Pass ``sinks`` with exactly one part.

    Args:
        d_output: the gradient of the output, (..., Hq, Nq, Dv).  d_lse: the gradient of the log-sum-exp, or None for 0.
        output: (..., Hq, Nq, Dv).  lse: (..., Hq, Nq), from ``return_lse=True``.
        wide: return gradients in float32 (float64 for float64) instead of the dtypes of the inputs, so that sums over parts round
            once.
        q, k, v, mask, engine, options: as in :func:`lowtri.attention`, without dropout; torch tensors.

    Raises:
        CallError: if the arguments do not fit together.

    Source: the backward pass of FlashAttention (Dao et al. 2022), and of ring attention (Liu et al. 2023).
    """
    if options.get("dropout"):
        raise CallError("attention_backward: dropout drew at random in the forward. Fix: torch's own backward.")
    _check_results(q, v, d_output=d_output, output=output, lse=lse, d_lse=d_lse)
    bias, bias_kind = packed_bias(options.get("bias"))
    leaves: list[Any] = [x.detach().requires_grad_() for x in (q, k, v)]
    others: Any = bias, options.get("sinks")
    for x in others:
        leaves.append(None if x is None else x.detach().requires_grad_(getattr(x, "requires_grad", False)))
    settings: Any = {name: x for name, x in options.items() if name not in ("bias", "sinks")}
    known = _Known(output, lse, d_output, torch.zeros_like(lse) if d_lse is None else d_lse)
    call = CallOptions(return_lse=True, engine=engine, **settings)
    return Gradients(*_gradients_of_call(leaves, bias_kind, mask, call, known, wide=wide, is_part=True))


class _Known(NamedTuple):
    """The results of a call and their gradients, in the user's dimensions."""

    output: Tensor
    lse: Tensor | None  # None where the forward did not compute it
    d_output: Tensor
    d_lse: Tensor


def _gradients_of_call(
    leaves: list[Any],
    bias_kind: str | None,
    mask: Any,
    options: CallOptions,
    known: _Known,
    *,
    wide: bool = False,
    is_part: bool = False,
) -> list[Any]:
    """The gradients of q, k, v, bias and sinks, in their shapes; None for those that require none. Some backends run forward again.

    Args:
        leaves: these tensors.
        is_part: k and v may be a part of those that gave the results.
    """

    def prepared(leaves: list[Any]) -> tuple[CachedCall, Inputs]:
        q, k, v, bias, sinks = leaves
        return prepared_call(q, k, v, mask, options._replace(bias=unpacked_bias(bias, bias_kind), sinks=sinks))

    with recording_gradients(), without_autocast(autocast_device(known.output)):
        ready, rows = prepared(leaves)
        if ready.prepared.gradient_source() is GradientSource.LSE and _tells_weights(known.lse, rows.bias):
            gradients = _from_lse(ready, rows, leaves, known, wide)
        else:
            if wide and known.lse is not None:  # torch's own gradients have the dtypes of the inputs
                leaves = [
                    None if x is None else x.detach().to(known.lse.dtype).requires_grad_(x.requires_grad)
                    for x in leaves
                ]
                ready, rows = prepared(leaves)
            result, restore = ready.run(rows), ready.call.to_user_rank
            results = [restore(x) for x in (result.output, result.lse if options.return_lse else None) if x is not None]
            d_results = [known.d_output, known.d_lse]
            if is_part:
                d_results = _of_part(results[0].detach(), results[1].detach(), known)
            gradients = _of_results(results, d_results, leaves)
    return [None if x is None or not x.requires_grad else d for d, x in zip(gradients, leaves, strict=True)]


def _tells_weights(lse: Tensor | None, bias: Any) -> bool:
    """Whether weights can be computed from a log-sum-exp alone: a large bias leaves it no digits for how many keys a query sees."""
    if lse is None or bias is None:
        return lse is not None
    limit = 2**-13 / torch.finfo(torch.promote_types(lse.dtype, torch.float32)).eps
    size = lse.detach().abs()
    if size.max().item() < limit:  # else it is large, or infinite since a query sees nothing
        return True
    return not bool(((size >= limit) & (size < torch.inf)).any())


def _from_lse(ready: CachedCall, rows: Inputs, leaves: list[Any], known: _Known, wide: bool) -> list[Any]:
    """The gradients by the backend; ``rows`` are the leaves in four dimensions."""
    shape = ready.call.q.shape[:3]
    q, lse_dtype = rows.q, torch.promote_types(rows.q.dtype, torch.float32)
    output, d_output = (x.reshape(*shape, -1).to(q.dtype) for x in (known.output, known.d_output))
    assert known.lse is not None, "such gradients are asked for where it is known"
    lse = known.lse.reshape(1, *shape).to(lse_dtype).contiguous()
    with torch.no_grad():
        prepared = cast(PreparedWithGradients, ready.prepared)
        grads = prepared.gradients(rows, output, lse, d_output, known.d_lse.reshape(shape))
    if ready.call.distance_low is not None and grads.bias is not None:  # of all distances
        (d_values,) = torch.autograd.grad(rows.bias, leaves[3], grads.bias.to(rows.bias.dtype))
        grads = grads._replace(bias=d_values)
    return [
        None if d is None or x is None else d.reshape(x.shape).to(d.dtype if wide else x.dtype)
        for d, x in zip(grads, leaves, strict=True)
    ]


def _of_results(results: list[Tensor], d_results: Sequence[Tensor], leaves: list[Any]) -> list[Any]:
    """torch's gradients of the leaves that require one; results that depend on none (no keys, hence no scores) are left out."""
    pairs = [(x, d_x.to(x.dtype)) for x, d_x in zip(results, d_results, strict=False) if x.requires_grad]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    if not pairs:
        gradients = iter([torch.zeros_like(x) for x in wanted])
    else:
        outputs, d_outputs = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(outputs, wanted, d_outputs, materialize_grads=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in leaves]


def _of_part(part: Tensor, part_lse: Tensor, known: _Known) -> list[Tensor]:
    """The gradients of the output and the log-sum-exp of a part of the keys, whose results merge into the whole.

    The whole is sum(share * part) with share = exp(part_lse - lse), so d_part = share * d_output, and the gradient of part_lse is
    share * (d_output . (part - output) + d_lse). For all keys, share is 1 and part is output.
    """
    output, lse, d_output, d_lse = known
    assert lse is not None, "attention_backward gets it"
    nothing = (lse == -torch.inf) | (part_lse == -torch.inf)
    share = torch.exp(part_lse - lse).masked_fill(nothing, 0)
    d_output = d_output.to(lse.dtype)
    moved = (d_output * (part.to(lse.dtype) - output.to(lse.dtype))).sum(-1) + d_lse
    return [(share[..., None] * d_output).to(part.dtype), (share * moved).masked_fill(nothing, 0)]


def _check_results(q: Any, v: Any, **results: Any) -> None:
    for name, x in results.items():
        if x is None and name == "d_lse":
            continue
        if not isinstance(x, Tensor) or not isinstance(q, Tensor) or not isinstance(v, Tensor):
            kind = type(x).__name__ if not isinstance(x, Tensor) else "a tensor, but q or v is not"
            raise CallError(f"attention_backward: {name} is {kind}; it takes torch tensors. Fix: torch.as_tensor(x).")
        shape = (*q.shape[:-1], v.shape[-1]) if name.endswith("output") else q.shape[:-1]
        if x.shape != shape:
            raise CallError(
                f"attention_backward: {name} is {tuple(x.shape)}, but q {tuple(q.shape)} and v {tuple(v.shape)} "
                f"give {tuple(shape)}."
            )


# The operators.

# A mask without arrays has None for them: packages of AOTInductor cannot pass an empty list of tensors.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, str mask, Tensor[]? arrays, SymInt[]? numbers, Tensor? q_positions, "
    "Tensor? k_positions, float? scale, float? softcap, str? bias_kind, bool return_lse, str engine"
)


def traced(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Any:
    """A call of attention under tracing: the operator, or a graph break for what the operator does not support.

    Weights, what keys received, dropout and masks with a Python function (``where``) run outside of the graph.
    """
    if type(options.bias).__name__ == "CausalBias":
        raise CallError('attention: bias is a CausalBias, which has no data. Fix: the mask "causal".')
    if not isinstance(mask, (Mask, str)):
        as_mask(mask, "attention: mask")  # raises with the fix
    if exports_to_onnx():
        return formula_for_onnx(q, k, v, mask, options)
    text, values = to_text(mask) if isinstance(mask, Mask) else (mask, [])
    arrays = [x for x in values if not isinstance(x, int)]
    # Numbers are inputs of the graph, too: one for each placeholder, -1 where that is an array.
    numbers = [x if isinstance(x, int) else -1 for x in values]
    if _strictly_exporting() and not all(isinstance(array, Tensor) for array in arrays):
        raise MaskError(
            "attention: torch.export(strict=True) does not keep the arrays of a mask, since they are NumPy's. Fix: strict=False."
        )
    bias, bias_kind = packed_bias(options.bias)
    tensors = all(isinstance(x, Tensor) for x in (q, k, v)) and (bias is None or isinstance(bias, Tensor))
    in_graph = not (options.dropout or options.return_weights or options.return_received)
    if text is None or not in_graph or not tensors:
        return _eager(q, k, v, mask, options)
    output, lse = _attention(
        q,
        k,
        v,
        bias,
        options.sinks,
        text,
        [_tensor(array) for array in arrays] or None,
        numbers if len(numbers) > len(arrays) else None,
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
    run_eagerly,
    "lowtri.attention with dropout=, return_weights=, return_received= or a mask of where() runs outside of the graph",
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


# Defined in a library, since torch.library.custom_op takes some 20 us more for each call.
_LIBRARY = torch.library.Library("lowtri", "DEF")
_LIBRARY.define(f"attention({_ARGUMENTS}) -> (Tensor, Tensor)", tags=[torch.Tag.pt2_compliant_tag])
_LIBRARY.define(
    f"attention_backward(Tensor d_output, Tensor d_lse, Tensor output, Tensor lse, bool[] wanted, {_ARGUMENTS}) -> Tensor[]",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _run(q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """Output (..., Hq, Nq, Dv) and log-sum-exp (..., Hq, Nq); the latter is inf where neither the caller nor the backward needs it."""
    mask, options, bias_kind = _read(*rest)
    options = options._replace(bias=unpacked_bias(bias, bias_kind), sinks=sinks)
    with without_autocast(autocast_device(q)):
        ready, inputs = prepared_call(q, k, v, mask, options)
        if ready.prepared.gradient_source() is GradientSource.LSE and not ready.call.return_lse:
            if ready.with_lse is None:  # the gradients need it
                options = options._replace(return_lse=True, engine=ready.backend)
                ready.with_lse, inputs = prepared_call(q, k, v, mask, options)
            ready = ready.with_lse
        result = ready.run(inputs)
    restore = ready.call.to_user_rank
    if result.lse is None:
        lse = q.new_full(q.shape[:-1], torch.inf, dtype=_wide(q))
    else:
        lse = restore(result.lse)
    return restore(result.output).contiguous(), lse.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if exports_to_onnx():
        raise CallError(
            "attention: torch.onnx.export got a program that was exported before, with lowtri's operator, which ONNX lacks.\n"
            "Fix: torch.onnx.export(model, args), with the model itself."
        )
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=_wide(q))


def _run_backward(
    d_output: Tensor, d_lse: Tensor, output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    """The gradients of those of q, k, v, bias and sinks that are ``wanted``."""
    leaves = [
        None if x is None else x.detach().requires_grad_(want) for x, want in zip(arguments[:5], wanted, strict=True)
    ]
    mask, options, bias_kind = _read(*arguments[5:])
    known_lse = None if lse.isposinf().all() else lse  # a call whose backend was chosen for the forward may not have it
    grads = _gradients_of_call(leaves, bias_kind, mask, options, _Known(output, known_lse, d_output, d_lse))
    return [d.contiguous() for d in grads if d is not None]


def _fake_backward(
    d_output: Tensor, d_lse: Tensor, output: Tensor, lse: Tensor, wanted: Sequence[bool], *arguments: Any
) -> list[Tensor]:
    inputs = (x for x, want in zip(arguments[:5], wanted, strict=True) if want)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the gradients need: all arguments, the output and its log-sum-exp."""
    q, k, v, bias, sinks, mask, arrays, numbers, q_positions, k_positions, *options = inputs
    ctx.save_for_backward(q, k, v, bias, sinks, q_positions, k_positions, *(arrays or ()), *output)
    ctx.mask, ctx.numbers, ctx.options = mask, numbers, options
    ctx.has_arrays = arrays is not None


def _gradients(ctx: Any, d_output: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, sinks, q_positions, k_positions, *arrays, output, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:5])
    given = arrays or None, ctx.numbers
    arguments = (q, k, v, bias, sinks, ctx.mask, *given, q_positions, k_positions, *ctx.options)
    grads = iter(_backward(d_output, d_lse, output, lse, wanted, *arguments))
    of_arrays = [None for _ in arrays] if ctx.has_arrays else None
    return (*(next(grads) if want else None for want in wanted), None, of_arrays, *[None] * 8)


def _refuse_second_gradients(ctx: Any, *d_gradients: Any) -> Any:
    raise RuntimeError(
        "lowtri.attention_backward: a compiled program has no gradients of gradients.\n"
        "Fix: the function without torch.compile, where the formula gives them."
    )


for _name, _implementation, _shapes in (
    ("attention", _run, _fake),
    ("attention_backward", _run_backward, _fake_backward),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowtri::{_name}", _shapes, lib=_LIBRARY)
torch.library.register_autograd("lowtri::attention", _gradients, setup_context=_keep, lib=_LIBRARY)
torch.library.register_autograd("lowtri::attention_backward", _refuse_second_gradients, lib=_LIBRARY)
_attention: Any = torch.ops.lowtri.attention.default
_backward: Any = torch.ops.lowtri.attention_backward.default


def _read(
    mask: str, arrays: Sequence[Tensor] | None, numbers: Sequence[int] | None, *rest: Any
) -> tuple[Mask, CallOptions, str | None]:
    """The mask, the options and the kind of the bias from the operator's arguments after the tensors."""
    q_positions, k_positions, scale, softcap, bias_kind, return_lse, engine = rest
    options = CallOptions(
        scale, softcap, q_positions=q_positions, k_positions=k_positions, return_lse=return_lse, engine=engine
    )
    values: list[Any] = [array.cpu().numpy() for array in arrays or ()]
    if numbers is not None:
        each = iter(values)
        values = [next(each) if number < 0 else number for number in numbers]
    return from_text(mask, values), options, bias_kind


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
