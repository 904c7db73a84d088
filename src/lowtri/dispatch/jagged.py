"""Sequences of different lengths in torch's jagged nested tensors: one row of documents, without padding.

The values of a jagged tensor are its sequences one after the other. So a call over them is one call over packed documents, within each
of which the mask counts from position 0, and the result has the offsets of the queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.errors import CallError
from lowtri.masks.custom_masks import heads
from lowtri.masks.label_masks import documents
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask
from lowtri.ops.call import CallOptions
from lowtri.ops.distance_bias import DistanceBias

__all__ = ["attend_jagged", "is_jagged"]

_SHAPES = "(B, H, j, D), or (B, j, D)"


def is_jagged(x: Any) -> bool:
    """Whether x is a nested tensor of layout jagged."""
    return type(x).__name__ == "NestedTensor" and x.layout is torch.jagged  # its class is private


def attend_jagged(
    call: Callable[..., Any],
    q: Any,
    k: Any,
    v: Any,
    mask: Mask | str,
    options: CallOptions,
    *,
    name: str = "attention",
    from_top: bool = False,
) -> Any:
    """Attention over jagged tensors, each sequence by itself.

    Args:
        call: :func:`lowtri.attention`, for the values.
        q, k, v: (B, H, j, D), or (B, j, D); keys and values of the same lengths. Queries of a sequence stand at its last keys.
        options: those of :func:`lowtri.attention`.
        name: of the function, for messages.
        from_top: whether queries of a sequence stand at its first keys.

    Returns:
        the output, jagged, with the offsets of q; with ``return_lse`` also the log-sum-exp (B, H, j).
    """
    for which, x in (("q", q), ("k", k), ("v", v)):
        if not is_jagged(x):
            raise CallError(
                f"{name}: {which} is no jagged tensor, but another argument is.\nFix: q, k and v all jagged, or all dense."
            )
        if x.dim() not in (3, 4) or x.dim() != q.dim() or _ragged(x) != x.dim() - 2:
            raise CallError(
                f"{name}: {which} is jagged {tuple(x.shape)}; expected {_SHAPES}, ragged in the last dimension but one.\n"
                f"Fix: {which}.transpose(1, 2) where heads come after the tokens."
            )
    given = {"return_weights": options.return_weights or None, "return_received": options.return_received or None}
    given |= {"q_positions": options.q_positions, "k_positions": options.k_positions}
    given["bias"] = None if isinstance(options.bias, DistanceBias) else options.bias
    wrong = next((argument for argument, value in given.items() if value is not None), None)
    if wrong is not None:
        raise CallError(
            f"{name}: {wrong} is not taken with jagged tensors.\n"
            "Fix: torch.nested.to_padded_tensor, and keys(lengths=[...]) in the mask."
        )
    q, k, v = (x if x.lengths() is None else x.contiguous() for x in (q, k, v))
    of_q, of_k = _sizes(q), _sizes(k)
    if not np.array_equal(of_k, _sizes(v)) or len(of_q) != len(of_k):
        lengths = ", ".join(str(sizes[:8].tolist()) for sizes in (of_q, of_k, _sizes(v)))
        raise CallError(
            f"{name}: the sequences of q, k and v have the lengths {lengths}.\nFix: as many keys as values in each."
        )
    more = of_q > of_k
    if not from_top and more.any():
        raise CallError(
            f"{name}: a sequence has {int(of_q[more][0])} queries and {int(of_k[more][0])} keys.\n"
            "Fix: at most as many queries as keys."
        )
    parts = _parts_of(as_mask(mask), of_q, of_k, from_top)
    results = _over_parts(call, [x.values() for x in (q, k, v)], options, parts)
    jagged = [_as(q, x, dim) for x, dim in zip(results, (q.dim() - 2,) * 2, strict=False)]
    return tuple(jagged) if options.return_lse else jagged[0]


class _Part(NamedTuple):
    """Sequences of one call: where their queries and keys are among the values, their mask, and where the queries stand."""

    queries: slice
    keys: slice
    mask: Mask
    positions: NDArray[np.int64] | None


def _parts_of(mask: Mask, of_q: NDArray[np.int64], of_k: NDArray[np.int64], from_top: bool) -> list[_Part]:
    """One call for all sequences; where the mask differs from one to the other, a call for each."""
    rows = mask.batch[0] if mask.batch else 1
    if rows not in (1, len(of_q)):
        raise CallError(
            f"attention: {mask!r} has {rows} rows, but the jagged tensors have {len(of_q)} sequences.\nFix: a row for each."
        )
    q_ends, k_ends = (np.concatenate([[0], np.cumsum(sizes)]).tolist() for sizes in (of_q, of_k))
    bounds = [(0, len(of_q))] if rows == 1 else [(b, b + 1) for b in range(rows)]
    parts = []
    for first, stop in bounds:
        lengths, own = of_k[first:stop], _of_row(mask, first)
        packed = documents(lengths=lengths[lengths > 0], inner=own) if (lengths > 0).any() else own
        positions = _positions(of_q[first:stop], lengths, from_top)
        parts.append(_Part(slice(q_ends[first], q_ends[stop]), slice(k_ends[first], k_ends[stop]), packed, positions))
    return parts


def _over_parts(
    call: Callable[..., Any], values: Sequence[Tensor], options: CallOptions, parts: Sequence[_Part]
) -> tuple[Tensor, ...]:
    """The values of the results."""
    q, k, v = values
    results = []
    for part in parts:
        given: dict[str, Any] = options._replace(q_positions=part.positions)._asdict()
        own = q[..., part.queries, :], k[..., part.keys, :], v[..., part.keys, :]
        result = call(*own, part.mask, **given)
        results.append(result if options.return_lse else (result,))
    if len(results) == 1:
        return tuple(results[0])
    return tuple(torch.cat(x, dim) for x, dim in zip(zip(*results, strict=True), (-2, -1), strict=False))


def _of_row(mask: Mask, b: int) -> Mask:
    """The mask of one sequence, for all of its heads."""
    if len(mask.batch) < 2:
        return mask.for_row(b)
    return heads([mask.for_row(b, h) for h in range(mask.batch[1])]) if mask.batch[1] > 1 else mask.for_row(b)


def _positions(of_q: NDArray[np.int64], of_k: NDArray[np.int64], from_top: bool) -> NDArray[np.int64] | None:
    """Where the queries stand in the row of all keys; None for the default, each at a key of its own."""
    if np.array_equal(of_q, of_k):
        return None
    starts = np.cumsum(of_k) - of_k + (0 if from_top else of_k - of_q)
    within = np.arange(int(of_q.sum())) - np.repeat(np.cumsum(of_q) - of_q, of_q)
    last = np.repeat(of_k, of_q) - 1
    # From the top, more queries than keys: those past the last key see what the one at it sees, all keys.
    return np.where(last >= 0, np.repeat(starts, of_q) + (np.minimum(within, last) if from_top else within), -1)


def _ragged(x: Any) -> int:
    """The dimension whose sizes differ."""
    return next((dim for dim, size in enumerate(x.shape) if not isinstance(size, int)), -1)


def _sizes(x: Any) -> NDArray[np.int64]:
    """(B,): the length of each sequence."""
    sizes: NDArray[np.int64] = np.diff(x.offsets().cpu().numpy()).astype(np.int64)
    return sizes


def _as(q: Any, values: Tensor, dim: int) -> Tensor:
    """A jagged tensor of these values with the offsets of q, so that the two can be added."""
    jagged: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets=q.offsets(), jagged_dim=dim)
    return jagged
