"""``attention``: check the call once, choose an engine, run it.

The engines are asked in order, each for a reason why it cannot run; the first that has none runs. One that is asked for by name
runs or raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lowtri.engines.choice import Choice, answers, choose, load
from lowtri.engines.decode import again
from lowtri.errors import CallError
from lowtri.masks.mask import Mask
from lowtri.ops.call import Call, Result, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from lowtri.ops.types import Array, Options

__all__ = ["attention", "merge", "which_engine"]


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | str,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    engine: str = "auto",
    **options: Unpack[Options],
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | str,
    *,
    return_weights: Literal[True],
    return_lse: Literal[False] = False,
    engine: str = "auto",
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | str,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[True],
    engine: str = "auto",
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | str,
    *,
    return_weights: Literal[True],
    return_lse: Literal[True],
    engine: str = "auto",
    **options: Unpack[Options],
) -> tuple[Array, Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | str,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    engine: str = "auto",
    **options: Unpack[Options],
) -> Array | tuple[Array, ...]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Mask | str,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    q_positions: Any = None,
    k_positions: Any = None,
    return_weights: bool = False,
    return_lse: bool = False,
    engine: str = "auto",
) -> Any:
    """Masked attention: each query's mean of the values it may see, weighted by softmax(q k^T * scale).

    >>> import numpy as np, lowtri
    >>> x = np.eye(3)
    >>> output, weights = lowtri.attention(x, x, x, "causal", return_weights=True)
    >>> weights.round(2)
    array([[1.  , 0.  , 0.  ],
           [0.36, 0.64, 0.  ],
           [0.26, 0.26, 0.47]])

    Args:
        q: (..., Hq, Nq, D), or (H, N, D), or (N, D); NumPy array or torch tensor.
        k: (..., Hkv, Nk, D); Hq is a multiple of Hkv, and each key/value head serves neighbouring query heads.
        v: (..., Hkv, Nk, Dv).
        mask: who may see whom, a mask or its text. It has no default.
        scale: factor on the scores; 1 / sqrt(D) by default.
        softcap: c > 0 caps the scaled scores at c * tanh(score / c).
        bias: numbers added to the scaled (and capped) scores, broadcasting against (B, Hq, Nq, Nk); never read where hidden.
        sinks: (Hq,), a logit for each head that takes part in the softmax and has no value.
        dropout: the probability with which a weight is dropped.
        q_positions, k_positions: (N,) or (B, N) places in the sequence, in any order; -1 where there is no token. By default
            keys stand at 0 .. Nk-1 and queries at the last Nq of them.
        return_weights: also return the weights (..., Hq, Nq, Nk), exactly 0 where hidden, before dropout.
        return_lse: also return the log-sum-exp of each query's scores (..., Hq, Nq), sinks included, -inf where it sees nothing.
        engine: "auto", or one of "cpu", "sdpa", "formula", "reference", which then runs or raises.

    Returns:
        what was asked for, in this order: output (..., Hq, Nq, Dv), weights, lse. A query that sees nothing gives 0.

    Under ``torch.compile`` and ``torch.export`` a call is one operator of the program, ``lowtri::attention``. Its mask may come
    from outside, with any arrays, or be made inside: of formulas and ``& | -``, and of ``documents``, ``keys`` and ``table`` of
    tensors. Masks of lists and ``~`` stand outside, or are said as text. Weights, dropout and ``where`` run outside of the program.

    Raises:
        CallError: if the arguments do not fit together.
        MaskError: if the mask is none; a bare tensor is refused, since True means opposite things in two libraries.
        EngineError: if the engine asked for by name cannot run the call.

    Source: Vaswani et al. 2017, section 3.2.
    """
    device = _autocast_device(q)
    if device is not None:
        q, k, v = _cast(device, q, k, v)
    if _is_traced():
        from lowtri.engines.operators import traced

        options = {
            "scale": scale,
            "softcap": softcap,
            "bias": bias,
            "sinks": sinks,
            "dropout": dropout,
            "engine": engine,
        }
        places = {"q_positions": q_positions, "k_positions": k_positions}
        return traced(q, k, v, mask, return_weights=return_weights, return_lse=return_lse, **options, **places)
    plain = q_positions is k_positions is bias is sinks is device is None
    if plain and not (dropout or return_weights or return_lse):
        output = again(q, k, v, mask, scale, softcap, engine)
        if output is not None:
            return output
    call = describe(
        q,
        k,
        v,
        mask,
        scale=scale,
        softcap=softcap,
        bias=bias,
        sinks=sinks,
        dropout=dropout,
        q_positions=q_positions,
        k_positions=k_positions,
        return_weights=return_weights,
        return_lse=return_lse,
    )
    run = load(choose(call, engine)).run
    found = run(call) if device is None else _without_autocast(device, run, call)
    output = call.restore(found.output)
    if not (return_weights or return_lse):
        return output
    extra = [found.weights] * return_weights + [found.lse] * return_lse
    return (output, *(call.restore(x) for x in extra))


def which_engine(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | str,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    engine: str = "auto",
    **options: Unpack[Options],
) -> Choice:
    """Which engine :func:`attention` would run for these arguments, and for each other why not.

    >>> import numpy as np, lowtri
    >>> x = np.eye(3)
    >>> choice = lowtri.which_engine(x, x, x, "causal")
    >>> choice.engine, choice.answers["sdpa"]
    ('reference', "no: the arrays are NumPy's")

    Args: those of :func:`attention`.
    """
    device = _autocast_device(q)
    if device is not None:
        q, k, v = _cast(device, q, k, v)
    call = describe(q, k, v, mask, return_weights=return_weights, return_lse=return_lse, **options)
    return Choice(choose(call, engine), answers(call))


def merge(outputs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Join attention over disjoint sets of keys into attention over all of them.

    >>> import numpy as np, lowtri
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 4, 8))
    >>> parts = [lowtri.attention(q, k[half], v[half], "full", return_lse=True) for half in (slice(0, 2), slice(2, 4))]
    >>> output, lse = lowtri.merge([out for out, _ in parts], [lse for _, lse in parts])
    >>> bool(np.allclose(output, lowtri.attention(q, k, v, "full")))
    True

    Args:
        outputs: list of (..., Nq, Dv), one for each set of keys.  lses: list of (..., Nq), from ``return_lse=True``.

    Returns:
        (output, lse) over all keys, so that joins can be joined again. Without sinks, which would be counted twice.

    Source: the split softmax of FlashAttention (Dao et al. 2022) and ring attention (Liu et al. 2023).
    """
    outputs, lses = list(outputs), list(lses)
    if not outputs or len(outputs) != len(lses):
        raise CallError(
            f"merge: {len(outputs)} outputs and {len(lses)} lses; there is one of each for every set of keys."
        )
    whole = outputs + lses
    if not all(hasattr(x, "dtype") for x in whole) or len({isinstance(x, np.ndarray) for x in whole}) > 1:
        kinds = sorted({type(x).__name__ for x in whole})
        raise CallError(
            f"merge: {' and '.join(kinds)} came, but it takes NumPy arrays or torch tensors, all of one kind."
        )
    for out, lse in zip(outputs, lses, strict=True):
        if tuple(out.shape[:-1]) != tuple(lse.shape) or out.shape != outputs[0].shape:
            raise CallError(
                f"merge: an output {tuple(out.shape)} stands beside an lse {tuple(lse.shape)}; shapes differ."
            )
    if isinstance(outputs[0], np.ndarray):
        stacked, lse = np.stack(outputs), np.stack(lses)  # (parts, ..., Nq, Dv), (parts, ..., Nq)
        greatest = lse.max(axis=0)
        shift = np.where(np.isneginf(greatest), 0, greatest)
        with np.errstate(divide="ignore"):
            total = np.exp(lse - shift).sum(axis=0)
            joined = shift + np.log(total)
        share = np.exp(lse - shift) / np.where(total == 0, 1, total)
        return (stacked * share[..., None]).sum(axis=0).astype(outputs[0].dtype), joined
    import torch

    parts, lse = torch.stack(outputs), torch.stack(lses)
    nothing = (lse == -torch.inf).all(dim=0)
    share = torch.softmax(lse.masked_fill(nothing, 0), dim=0).masked_fill(nothing, 0)
    joined = torch.logsumexp(lse.masked_fill(nothing, 0), dim=0).masked_fill(nothing, -torch.inf)
    return (parts * share[..., None]).sum(dim=0).to(outputs[0].dtype), joined


def _is_traced() -> bool:
    """Whether this call is being written into a program, by torch.compile or torch.export, and not run."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _autocast_device(q: Any) -> str | None:
    """The kind of q's device, where torch.autocast is on for it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return None
    if q.is_cpu:  # asked before each token of each layer
        return "cpu" if torch.is_autocast_enabled("cpu") else None
    kind = q.device.type
    return kind if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) else None


def _cast(device: str, *inputs: Any) -> tuple[Any, ...]:
    """Under torch.autocast float32 inputs are cast as torch casts those of its own attention."""
    import torch

    kind = torch.get_autocast_dtype(device)
    return tuple(x.to(kind) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in inputs)


def _without_autocast(device: str, run: Callable[[Call], Result], call: Call) -> Result:
    """What an engine computes in float32 stays in float32: the cast is at the door only."""
    import torch

    with torch.autocast(device, enabled=False):
        return run(call)
