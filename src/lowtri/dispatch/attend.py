"""``attention`` and ``which_engine``: look up or prepare a call, then run it; ``merge``: join results over disjoint keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from lowtri.compat import compile_as
from lowtri.dispatch.choose import Choice, explain_choice
from lowtri.dispatch.prepared import cast_for_autocast, find, is_traced, prepare, run_eagerly
from lowtri.errors import CallError
from lowtri.masks.arrays import is_tensor
from lowtri.masks.mask import Mask
from lowtri.ops.arguments import describe, plain_array
from lowtri.ops.call import CallOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor
    from typing_extensions import Unpack

    from lowtri.dispatch.prepared import CachedCall
    from lowtri.ops.call import Array, Options, Placement
    from lowtri.ops.distance_bias import DistanceBias


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
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    return_received: Literal[True],
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
    return_weights: bool = False,
    return_received: bool = False,
    return_lse: bool = False,
    engine: str = "auto",
    **options: Unpack[Options],
) -> Array | tuple[Array, ...]: ...
def attention(
    q: Tensor | NDArray[Any],
    k: Tensor | NDArray[Any],
    v: Tensor | NDArray[Any],
    mask: Mask | str,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | NDArray[Any] | DistanceBias | None = None,
    sinks: Tensor | NDArray[Any] | None = None,
    dropout: float = 0.0,
    q_positions: Tensor | ArrayLike | None = None,
    k_positions: Tensor | ArrayLike | None = None,
    return_weights: bool = False,
    return_received: bool = False,
    return_lse: bool = False,
    engine: str = "auto",
) -> Any:
    """Masked attention: softmax(q k^T * scale) v over the keys that each query may see.

    >>> import numpy as np, lowtri
    >>> x = np.eye(3)
    >>> output, weights = lowtri.attention(x, x, x, "causal", return_weights=True)
    >>> weights.round(2)
    array([[1.  , 0.  , 0.  ],
           [0.36, 0.64, 0.  ],
           [0.26, 0.26, 0.47]])

    Args:
        q: (..., Hq, Nq, D), or (H, N, D), or (N, D); NumPy array or torch tensor. Or q, k and v are jagged nested tensors of torch,
            (B, H, j, D): each sequence is attended by itself, from position 0, without padding, and the result is jagged.
        k: (..., Hkv, Nk, D). Hq is a multiple of Hkv; query head h uses key/value head h // (Hq // Hkv).
        v: (..., Hkv, Nk, Dv).
        mask: a mask or its text; required.
        scale: factor on the scores; 1 / sqrt(D) by default.
        softcap: c > 0 caps the scaled scores at c * tanh(score / c).
        bias: added to the scaled (and capped) scores, broadcasting against (B, Hq, Nq, Nk); ignored where hidden. Or
            :func:`lowtri.alibi` or :func:`lowtri.distance_bias`, which need memory for the distances only.
        sinks: (Hq,), one logit per head that takes part in the softmax and has no value vector.
        dropout: the probability with which a weight is dropped; the others are divided by 1 - dropout. Which ones depends on a seed
            that the call draws (from torch's generator, for arrays from NumPy's), the row of the batch, the head and the positions,
            on nothing else: not on padding, caches, threads, nor, on a CPU, on the engine.
        q_positions, k_positions: (N,) or (B, N), positions in the sequence, in any order; -1 means no token. By default keys have
            the positions 0 .. Nk-1, and queries the last Nq of these.
        return_weights: also return the weights (..., Hq, Nq, Nk), before dropout; exactly 0 where hidden.
        return_received: also return what each key received from all queries: the sum of the weights over the queries, (..., Hq, Nk),
            at least float32, in memory for the keys alone. 0 for keys that are hidden or at position -1; it has no gradient.
        return_lse: also return the log-sum-exp of each query's scores (..., Hq, Nq), sinks included; -inf where it sees no key.
        engine: "auto" for the backend that the rules choose, which :func:`lowtri.which_engine` shows; or "cpu", "sdpa", "flex",
            "formula" or "reference", which runs the call or raises.

    Returns:
        the output (..., Hq, Nq, Dv); or a tuple of the output, then weights, received weights and log-sum-exp as requested. The
        output of a query that sees no key is 0.

    Under ``torch.compile`` and ``torch.export`` a call is one operator of the graph, ``lowtri::attention``. Build the mask outside
    the compiled region, or pass it as text. Inside the region, masks may be built from formulas, from ``documents``, ``keys`` and
    ``table`` of tensors, and with ``&``, ``|`` and ``-``; so may biases over distances. The numbers of a mask (lengths, edges, ids,
    windows) are inputs of the graph, so that one program serves other documents, too; those of a text are compiled. Dropout drops
    the weights that the call outside of the program drops after the same ``torch.manual_seed``; torch's own, by
    ``engine="sdpa"``, others. A mask of ``where`` causes a graph break, and so do ``torch.func``'s transforms inside the region.

    Raises:
        CallError: if the arguments do not fit together, or the returned weights would not fit into memory.
        MaskError: if ``mask`` is not a mask; this includes a bare tensor, because libraries disagree about the meaning of True.
        EngineError: if the engine given by name cannot run the call.

    Source: Vaswani et al. 2017, section 3.2.
    """
    if is_traced():
        return _attention_in_program(
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
            return_received=return_received,
            return_lse=return_lse,
            engine=engine,
        )
    positions = None if q_positions is None and k_positions is None else (q_positions, k_positions)
    ready, _ = find(
        q, k, v, bias, sinks, positions, mask, scale, softcap, dropout, return_weights, return_lse, engine, return_received
    )  # fmt: skip
    if ready is not None:
        return ready(q, k, v, bias, sinks) if ready.plain is None else ready.plain(q, k, v)
    options = CallOptions(
        scale,
        softcap,
        bias,
        sinks,
        dropout,
        q_positions,
        k_positions,
        return_weights,
        return_lse,
        engine,
        return_received,
    )
    if "NestedTensor" in (type(q).__name__, type(k).__name__, type(v).__name__):  # torch's class of jagged tensors
        from lowtri.dispatch.jagged import attend_jagged

        return attend_jagged(attention, q, k, v, mask, options)
    return run_eagerly(q, k, v, mask, options)


def _attention_in_program(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    """:func:`attention` where torch traces a program, which would compare each default of :func:`attention` at each of its calls."""
    from lowtri.dispatch.operators import traced

    return traced(q, k, v, mask, options)


compile_as(attention, _attention_in_program)


def find_over_cache(
    q: Any, k: Any, v: Any, mask: Mask, options: CallOptions, positions: Placement
) -> CachedCall | None:
    """The prepared call of :func:`attention_over_cache`, if an equal one was made before; None while torch traces."""
    if is_traced():
        return None
    ready, _ = find(
        q, k, v, None, options.sinks, positions, mask, options.scale, options.softcap, options.dropout, *options[7:]
    )  # fmt: skip
    return ready


def attention_over_cache(q: Any, k: Any, v: Any, mask: Mask, options: CallOptions, positions: Placement) -> Any:
    """The results of :func:`attention` over the first ``positions.nk`` keys and values in the buffers of a cache.

    Equal to a call at these positions, which are checked already. ``options`` have no bias, positions, weights or lse.
    """
    ready = find_over_cache(q, k, v, mask, options, positions)
    if ready is not None:
        return ready(q, k, v, None, options.sinks) if ready.plain is None else ready.plain(q, k, v)
    nk, given = positions.nk, options._replace(q_positions=positions.q, k_positions=positions.k)
    return attention(q, k[..., :nk, :], v[..., :nk, :], mask, **given._asdict())


def which_engine(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | str,
    *,
    return_weights: bool = False,
    return_received: bool = False,
    return_lse: bool = False,
    engine: str = "auto",
    **options: Unpack[Options],
) -> Choice:
    """The engine that :func:`attention` would use for these arguments, and why; and why not each other engine.

    An ordered list of rules decides (``lowtri.dispatch.choose``): the first engine whose answer is "yes" runs.

    >>> import numpy as np, lowtri
    >>> x = np.eye(3)
    >>> choice = lowtri.which_engine(x, x, x, "causal")
    >>> choice.engine, choice.answers["sdpa"]
    ('cpu', "no: the arrays are NumPy's")

    Args: those of :func:`attention`.
    """
    _, (q, k, v) = cast_for_autocast(q, k, v)
    checked = CallOptions(
        return_weights=return_weights, return_lse=return_lse, return_received=return_received, **options
    )
    call, inputs = describe(q, k, v, mask, checked)
    ready = prepare(call, engine)
    other = ready.fallback(inputs)
    chosen = ready.backend if other is None else other.backend
    return explain_choice(call, chosen, None if other is None else ready.backend, engine_was_named=engine != "auto")


def merge(outputs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    >>> import numpy as np, lowtri
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 4, 8))
    >>> parts = [lowtri.attention(q, k[half], v[half], "full", return_lse=True) for half in (slice(0, 2), slice(2, 4))]
    >>> output, lse = lowtri.merge([out for out, _ in parts], [lse for _, lse in parts])
    >>> bool(np.allclose(output, lowtri.attention(q, k, v, "full")))
    True

    Args:
        outputs: list of (..., Nq, Dv), one for each set of keys.  lses: list of (..., Nq), from ``return_lse=True``. A part whose
            log-sum-exp is -inf is empty; so is one of +inf whose output is 0, which is how flash-attn marks a row without keys.

    Returns:
        (output, lse) over all keys, which can be merged again. Compute the parts without sinks, which would be counted once per part.

    Source: the split softmax of FlashAttention (Dao et al. 2022) and ring attention (Liu et al. 2023).
    """
    try:
        outputs, lses = list(outputs), list(lses)
    except TypeError:
        kinds = f"{type(outputs).__name__} and {type(lses).__name__}"
        raise CallError(f"merge: got {kinds}, but it takes a list of outputs and a list of lses.") from None
    if not outputs or len(outputs) != len(lses):
        raise CallError(
            f"merge: {len(outputs)} outputs and {len(lses)} lses; there is one of each for every set of keys."
        )
    outputs, lses = (
        [plain_array("an output", x, "merge") for x in outputs],
        [plain_array("an lse", x, "merge") for x in lses],
    )
    whole = outputs + lses
    if (
        not all(isinstance(x, np.ndarray) or is_tensor(x) for x in whole)
        or len({isinstance(x, np.ndarray) for x in whole}) > 1
    ):
        names = sorted({type(x).__name__ for x in whole})
        raise CallError(
            f"merge: got {' and '.join(names)}, but it takes NumPy arrays or torch tensors, all of one kind."
        )
    if not all("float" in str(x.dtype) for x in whole):
        dtypes = sorted({str(x.dtype) for x in whole})
        raise CallError(f"merge: got {' and '.join(dtypes)}, but outputs and lses are floats. Fix: x.astype(float).")
    for out, lse in zip(outputs, lses, strict=True):
        if tuple(out.shape[:-1]) != tuple(lse.shape) or out.shape != outputs[0].shape:
            raise CallError(
                f"merge: an output is {tuple(out.shape)} and its lse {tuple(lse.shape)}, "
                "but outputs share one shape (..., Nq, Dv), and each has an lse (..., Nq)."
            )
    return _merge_arrays(outputs, lses) if isinstance(outputs[0], np.ndarray) else _merge_tensors(outputs, lses)


def _merge_arrays(outputs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    with np.errstate(all="ignore"):
        parts, lse = np.stack(outputs), np.stack(lses)  # (parts, ..., Nq, Dv), (parts, ..., Nq)
        empty = np.isneginf(lse) | (np.isposinf(lse) & (parts == 0).all(axis=-1))
        parts, lse = np.where(empty[..., None], 0, parts), np.where(empty, -np.inf, lse)
        row_max = lse.max(axis=0)
        shift = np.where(np.isneginf(row_max), 0, row_max)
        exps = np.exp(lse - shift)
        total = exps.sum(axis=0)
        share = exps / np.where(total == 0, 1, total)
        joined = np.where(np.isposinf(row_max), np.inf, shift + np.log(total)).astype(lse.dtype)
        return (parts * share[..., None]).sum(axis=0).astype(outputs[0].dtype), joined


def _merge_tensors(outputs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    import torch

    parts = torch.stack([*outputs])  # (parts, ..., Nq, Dv)
    lse = torch.stack([*lses])  # (parts, ..., Nq)
    empty = (lse == -torch.inf) | ((lse == torch.inf) & (parts == 0).all(dim=-1))
    parts, lse = parts.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    nothing = empty.all(dim=0)
    share = torch.softmax(lse.masked_fill(nothing, 0), dim=0).masked_fill(nothing, 0)
    joined = torch.logsumexp(lse.masked_fill(nothing, 0), dim=0).masked_fill(nothing, -torch.inf)
    return (parts * share[..., None]).sum(dim=0).to(outputs[0].dtype), joined
