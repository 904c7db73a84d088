"""``attention_backward``: the gradients of a call whose output and log-sum-exp are known, also for a part of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowtri.compat.torch_private import recording_gradients
from lowtri.dispatch.prepared import CachedCall, autocast_device, prepared_call, without_autocast
from lowtri.errors import CallError
from lowtri.masks.mask import Mask
from lowtri.ops.call import CallOptions, Inputs, Result
from lowtri.ops.distance_bias import packed_bias, unpacked_bias

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lowtri.ops.types import Options


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
    _check(q, v, d_output=d_output, output=output, lse=lse, d_lse=d_lse)
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    bias, bias_kind = packed_bias(options.get("bias"))
    sinks: Any = options.get("sinks")
    leaves: list[Any] = [x.detach().requires_grad_() for x in (q, k, v)]
    leaves += [
        None if x is None else x.detach().requires_grad_(getattr(x, "requires_grad", False)) for x in (bias, sinks)
    ]
    call = CallOptions(
        options.get("scale"),
        options.get("softcap"),
        unpacked_bias(leaves[3], bias_kind),
        leaves[4],
        q_positions=options.get("q_positions"),
        k_positions=options.get("k_positions"),
        return_lse=True,
        engine=engine,
    )
    with recording_gradients(), without_autocast(autocast_device(output)):
        ready, rows = prepared_call(leaves[0], leaves[1], leaves[2], mask, call)
        if ready.prepared.from_output:
            gradients = gradients_from_output(ready, rows, leaves, output, lse, d_output, d_lse, wide=wide)
        else:
            if wide:  # torch's own gradients have the dtypes of the inputs
                leaves = [
                    None if x is None else x.detach().to(lse.dtype).requires_grad_(x.requires_grad) for x in leaves
                ]
                call = call._replace(bias=unpacked_bias(leaves[3], bias_kind), sinks=leaves[4])
                ready, rows = prepared_call(leaves[0], leaves[1], leaves[2], mask, call)
            result = ready.run(rows)
            part, part_lse = ready.call.restore(result.output), ready.call.restore(result.lse)
            d_part, d_part_lse = _of_part(part.detach(), part_lse.detach(), output, lse, d_output, d_lse)
            gradients = gradients_of_results([part, part_lse], [d_part, d_part_lse], leaves)
    grads: list[Any] = [None if x is None or not x.requires_grad else d for d, x in zip(gradients, leaves, strict=True)]
    return Gradients(*grads)


def gradients_from_output(
    ready: CachedCall,
    rows: Inputs,
    leaves: Sequence[Tensor | None],
    output: Tensor,
    lse: Tensor,
    d_output: Tensor,
    d_lse: Tensor,
    *,
    wide: bool = False,
) -> list[Tensor | None]:
    """The gradients of q, k, v, bias and sinks, in their shapes; ``leaves`` are these tensors, ``rows`` their four dimensions.

    Results and their gradients have the user's dimensions.
    """
    shape = ready.call.q.shape[:3]
    dtype = torch.promote_types(rows.q.dtype, torch.float32)
    known = Result(
        output.reshape(*shape, -1).to(rows.q.dtype), None, lse.reshape(shape).to(dtype).contiguous()
    )  # kernels read it so
    d_known = Result(d_output.reshape(*shape, -1).to(rows.q.dtype), None, d_lse.reshape(shape))
    with torch.no_grad():
        grads = ready.prepared.gradients(rows, known, None, d_known, wide)
    if ready.call.distance_low is not None and grads.bias is not None:  # of all distances
        assert rows.bias is not None and leaves[3] is not None
        (d_values,) = torch.autograd.grad(rows.bias, leaves[3], grads.bias.to(rows.bias.dtype))
        grads = grads._replace(bias=d_values)
    return [None if d is None or x is None else d.reshape(x.shape) for d, x in zip(grads, leaves, strict=True)]


def gradients_of_results(
    results: list[Tensor], d_results: list[Tensor], inputs: list[Tensor | None]
) -> list[Tensor | None]:
    """torch's gradients of the inputs that require one; results that depend on none (no keys, hence no scores) are left out."""
    pairs = [(x, d_x.to(x.dtype)) for x, d_x in zip(results, d_results, strict=True) if x.requires_grad]
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not pairs:
        gradients = iter([torch.zeros_like(x) for x in wanted])
    else:
        outputs, d_outputs = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(outputs, wanted, d_outputs, materialize_grads=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in inputs]


def _of_part(
    part: Tensor, part_lse: Tensor, output: Tensor, lse: Tensor, d_output: Tensor, d_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the output and the log-sum-exp of a part of the keys, whose results merge into the whole.

    The whole is sum(share * part) with share = exp(part_lse - lse), so d_part = share * d_output, and the gradient of part_lse is
    share * (d_output . (part - output) + d_lse). For all keys, share is 1 and part is output.
    """
    nothing = (lse == -torch.inf) | (part_lse == -torch.inf)
    share = torch.exp(part_lse - lse).masked_fill(nothing, 0)
    wide = d_output.to(lse.dtype)
    moved = (wide * (part.to(lse.dtype) - output.to(lse.dtype))).sum(-1) + d_lse
    return (share[..., None] * wide).to(part.dtype), (share * moved).masked_fill(nothing, 0)


def _check(q: Any, v: Any, **results: Any) -> None:
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
