"""Tables of pairs that somebody made by hand: bools, or numbers added to the scores, in four dimensions.

A bool table is a mask, True = may see, as torch's SDPA reads it. A table of numbers is a mask where it says "hidden" (-inf, or the
least number that its dtype has), and a bias where it says anything but 0. Each is read once, not once a layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowtri.errors import CallError
from lowtri.integrations.transformers_seen import Seen, SeenTensor
from lowtri.masks.array_masks import Keys, table
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.formulas import causal, full
from lowtri.masks.mask import Mask
from lowtri.ops.arguments import plain_array

__all__ = ["Given", "fitting", "given", "least"]


class Given(NamedTuple):
    """What a tensor means: who may see whom, and what is added to the scores (None, or four dimensions)."""

    seen: Seen
    bias: Tensor | None


# tensor -> (its version, the sizes it was read for, who sees whom, whether it is a bias); the bias itself would keep its own key.
_read: Any = WeakTensorKeyDictionary()


def given(mask: Tensor, nq: int, nk: int, dtype: torch.dtype) -> Given:
    """What the tensor that came as ``attention_mask`` means for ``nq`` queries and ``nk`` keys.

    >>> import torch
    >>> least = torch.finfo(torch.float32).min
    >>> given(torch.tensor([[[[0.0, least], [0.0, 0.0]]]]), 2, 2, torch.float32)
    Given(seen=Seen(mask=causal, q0=0, nq=2, k0=0, nk=2), bias=None)

    Args:
        mask: (B|1, H|1, Nq|1, Nk|1), or fewer dimensions in front; bools, True = may see, or numbers added to the scores.
        nq, nk: how many queries and keys the call has.
        dtype: of the queries: its least number, too, says "hidden".

    Raises:
        CallError: if the sizes do not fit, or the numbers are whole numbers, of which nobody can say what they mean.
    """
    if isinstance(mask, SeenTensor):
        if (mask.seen.nq, mask.seen.nk) == (nq, nk):
            return Given(mask.seen, None)
        mask = mask.written()
    mask = plain_array("attention_mask", mask, "transformers")
    shape = fitting(mask, nq, nk)
    key = (mask._version, nq, nk, dtype)
    known = _read.get(mask)
    if known is None or known[0] != key:
        known = _read[mask] = (key, *_make(mask.detach().reshape(shape), nq, nk, dtype))
    _, seen, plain = known
    return Given(seen, None if plain and not mask.requires_grad else mask.reshape(shape))


def fitting(mask: Tensor, nq: int, nk: int) -> tuple[int, ...]:
    """The mask's shape in four dimensions."""
    shape = (*(1,) * (4 - mask.ndim), *mask.shape)
    if len(shape) != 4 or shape[2] not in (1, nq) or shape[3] not in (1, nk):
        raise CallError(
            f"transformers: attention_mask is {tuple(mask.shape)}, but the layer has {nq} queries and {nk} keys: "
            f"expected (B, H, {nq}, {nk}), each size or 1."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise CallError(
            f"transformers: attention_mask is {mask.dtype} {tuple(mask.shape)}; as numbers for each pair they could mean "
            "two things.\nFix: bools, True = may see, or floats that are added to the scores."
        )
    return shape


def _make(mask: Tensor, nq: int, nk: int, dtype: torch.dtype) -> tuple[Seen, bool]:
    """Who sees whom, and whether that is all that the tensor says."""
    if mask.dtype == torch.bool:
        return _placed(mask, nq, nk), True
    hidden = mask <= least(mask.dtype, dtype)
    return _placed(~hidden, nq, nk), bool(((mask == 0) | hidden).all())


def least(of_mask: torch.dtype, of_queries: torch.dtype) -> float:
    """The greatest number that hides: the least of either dtype, since a table of float32 may have been made for half types."""
    return max(torch.finfo(of_mask).min, torch.finfo(of_queries).min)


def _placed(visible: Tensor, nq: int, nk: int) -> Seen:
    return Seen(_mask(visible.cpu().numpy(), nq, nk), max(nk - nq, 0), nq, 0, nk)


def _mask(visible: NDArray[np.bool_], nq: int, nk: int) -> Mask:
    """The shortest mask that is this table: everything, causal, some keys, or the table itself."""
    if visible.all():
        return full()
    for axis in (0, 1):
        if len(visible) > 1 or axis:
            first = visible.take([0], axis)
            visible = first if (visible == first).all() else visible
    if visible.shape[1:3] == (1, 1):
        rows = np.broadcast_to(visible[:, 0, 0], (len(visible), nk))
        return Keys(FrozenArray(rows[0] if len(rows) == 1 else rows))
    visible = np.broadcast_to(visible, (*visible.shape[:2], nq, nk))
    if visible.shape[:2] == (1, 1):
        alone = visible[0, 0]
        line = nk >= nq and np.array_equal(alone, np.arange(nk) <= np.arange(nk - nq, nk)[:, None])
        return causal() if line else table(alone)
    return table(visible[:, 0] if visible.shape[1] == 1 else visible)
