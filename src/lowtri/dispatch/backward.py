"""Gradients from a known output and log-sum-exp: :func:`lowtri.attention_backward`, and the backward of a compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lowtri.backends import Drawn, GradientSource, PreparedWithGradients
from lowtri.compat.torch_private import recording_gradients
from lowtri.dispatch.prepared import CachedCall, autocast_device, prepared_call, without_autocast
from lowtri.errors import CallError
from lowtri.masks.mask import Mask
from lowtri.ops.call import CallOptions, Inputs
from lowtri.ops.distance_bias import bias_arguments, bias_from_arguments

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
    bias, bias_kind = bias_arguments(options.get("bias"))
    leaves: list[Any] = [x.detach().requires_grad_() for x in (q, k, v)]
    others: Any = bias, options.get("sinks")
    for x in others:
        leaves.append(None if x is None else x.detach().requires_grad_(getattr(x, "requires_grad", False)))
    settings: Any = {name: x for name, x in options.items() if name not in ("bias", "sinks")}
    known = KnownResults(output, lse, d_output, d_lse=torch.zeros_like(lse) if d_lse is None else d_lse)
    call = CallOptions(return_lse=True, engine=engine, **settings)
    return Gradients(*gradients_of_call(leaves, bias_kind, mask, call, known, wide=wide, is_part=True))


class KnownResults(NamedTuple):
    """The results of a call and their gradients, in the user's dimensions."""

    output: Tensor
    lse: Tensor | None  # None where the forward did not compute it
    d_output: Tensor
    d_weights: Tensor | None = None  # None: 0, as below
    d_lse: Tensor | None = None
    seed: Tensor | None = None  # of the dropout


def gradients_of_call(
    leaves: list[Any],
    bias_kind: str | None,
    mask: Any,
    options: CallOptions,
    known: KnownResults,
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
        given = Inputs(*leaves)
        bias = bias_from_arguments(given.bias, bias_kind)
        return prepared_call(given.q, given.k, given.v, mask, options._replace(bias=bias, sinks=given.sinks))

    with recording_gradients(), without_autocast(autocast_device(known.output)):
        ready, rows = prepared(leaves)
        from_lse = ready.prepared.gradient_source() is GradientSource.LSE and known.d_weights is None
        if from_lse and _tells_weights(known.lse, rows.bias):
            gradients = _from_lse(ready, rows, leaves, known, wide)
        else:
            if wide and known.lse is not None:  # torch's own gradients have the dtypes of the inputs
                leaves = [
                    None if x is None else x.detach().to(known.lse.dtype).requires_grad_(x.requires_grad)
                    for x in leaves
                ]
                ready, rows = prepared(leaves)
            result, to_user_rank = ready.run(rows, known.seed), ready.call.to_user_rank
            results = [
                (result.output, known.d_output),
                (result.weights, known.d_weights),
                (result.lse, known.d_lse),
            ]
            pairs = [(to_user_rank(x), d_x) for x, d_x in results if x is not None and d_x is not None]
            if is_part:
                (part, _), (part_lse, _) = pairs
                d_part, d_part_lse = _of_part(part.detach(), part_lse.detach(), known)
                pairs = [(part, d_part), (part_lse, d_part_lse)]
            gradients = _of_results(pairs, leaves)
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


def _from_lse(ready: CachedCall, rows: Inputs, leaves: list[Any], known: KnownResults, wide: bool) -> list[Any]:
    """The gradients by the backend; ``rows`` are the leaves in four dimensions."""
    shape, dtype = ready.call.q.shape[:3], rows.q.dtype
    output, d_output = (x.reshape(*shape, -1).to(dtype) for x in (known.output, known.d_output))
    assert known.lse is not None, "such gradients are asked for where it is known"
    lse = known.lse.reshape(1, *shape).to(torch.promote_types(dtype, torch.float32)).contiguous()
    state: Any = lse if known.seed is None else Drawn(int(known.seed), lse)
    d_lse = None if known.d_lse is None else known.d_lse.reshape(shape)
    with torch.no_grad():
        grads = cast(PreparedWithGradients, ready.prepared).gradients(rows, output, state, d_output, d_lse)
    if ready.call.distance_low is not None and grads.bias is not None:  # of all distances
        (d_values,) = torch.autograd.grad(rows.bias, leaves[3], grads.bias.to(rows.bias.dtype))
        grads = grads._replace(bias=d_values)
    gradients: list[Any] = [
        None if d is None or x is None else d.reshape(x.shape) for d, x in zip(grads, leaves, strict=True)
    ]
    if wide:
        return gradients
    return [None if d is None else d.to(x.dtype) for d, x in zip(gradients, leaves, strict=True)]


def _of_results(pairs: Sequence[tuple[Tensor, Tensor]], leaves: list[Any]) -> list[Any]:
    """torch's gradients of the leaves that require one, from results and their gradients.

    Results that depend on no leaf (no keys, hence no scores) are left out.
    """
    pairs = [(x, d_x.to(x.dtype)) for x, d_x in pairs if x.requires_grad]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    if not pairs:
        gradients = iter([torch.zeros_like(x) for x in wanted])
    else:
        outputs, d_outputs = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(outputs, wanted, d_outputs, materialize_grads=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in leaves]


def _of_part(part: Tensor, part_lse: Tensor, known: KnownResults) -> tuple[Tensor, Tensor]:
    """The gradients of the output and the log-sum-exp of a part of the keys, whose results merge into the whole.

    The whole is sum(share * part) with share = exp(part_lse - lse), so d_part = share * d_output, and the gradient of part_lse is
    share * (d_output . (part - output) + d_lse). For all keys, share is 1 and part is output.
    """
    lse = known.lse
    assert lse is not None and known.d_lse is not None, "attention_backward gets them"
    nothing = (lse == -torch.inf) | (part_lse == -torch.inf)
    share = torch.exp(part_lse - lse).masked_fill(nothing, 0)
    d_output = known.d_output.to(lse.dtype)
    moved = (d_output * (part.to(lse.dtype) - known.output.to(lse.dtype))).sum(-1) + known.d_lse
    return (share[..., None] * d_output).to(part.dtype), (share * moved).masked_fill(nothing, 0)


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
