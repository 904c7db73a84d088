"""Dense masks, as callers pass them: boolean, or additive (added to the scores), with four dimensions.

A boolean mask is read as torch's SDPA reads it, True = may see. An additive mask hides a pair with -inf or with the smallest
value of its dtype; any other value but 0 is a bias. A mask is read once per forward pass, not once per layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowtri.compat.torch_private import version_of
from lowtri.errors import CallError
from lowtri.integrations.transformers_lazy import LazyMask, LazyMaskTensor
from lowtri.masks.array_masks import Keys, table
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.formulas import causal, full
from lowtri.masks.mask import Mask
from lowtri.ops.arguments import plain_array

__all__ = ["MaskAndBias", "mask_shape", "read_dense_mask", "hidden_threshold"]


class MaskAndBias(NamedTuple):
    """A dense mask as a lazy mask, and the bias that is left of it (None, or four dimensions)."""

    lazy: LazyMask
    bias: Tensor | None


# tensor -> ((version, sizes, dtype), lazy mask, whether there is no bias). Entries are removed with their tensor; a bias is not
# stored, since it would keep its own key alive.
_read: Any = WeakTensorKeyDictionary()


def read_dense_mask(mask: Tensor, nq: int, nk: int, dtype: torch.dtype, true_hides: bool = False) -> MaskAndBias:
    """Read a dense ``attention_mask`` for ``nq`` queries and ``nk`` keys.

    >>> import torch
    >>> least = torch.finfo(torch.float32).min
    >>> read_dense_mask(torch.tensor([[[[0.0, least], [0.0, 0.0]]]]), 2, 2, torch.float32)
    MaskAndBias(lazy=LazyMask(mask=causal, q0=0, nq=2, k0=0, nk=2), bias=None)

    Args:
        mask: (B|1, H|1, Nq|1, Nk|1), or fewer dimensions in front; bools, True = may see, or numbers added to the scores.
        nq, nk: how many queries and keys the call has.
        dtype: of the queries; the smallest value of this dtype hides, too.
        true_hides: whether the mask is of ``nn.MultiheadAttention``: True = hidden, and of numbers only -inf hides.

    Raises:
        CallError: if the sizes do not fit, or the mask holds integers, which could be read as booleans or as a bias.
    """
    if isinstance(mask, LazyMaskTensor):
        if (mask.lazy.nq, mask.lazy.nk) == (nq, nk):
            return MaskAndBias(mask.lazy, None)
        mask = mask.materialize()
    mask = plain_array("attention_mask", mask, "transformers")
    shape = mask_shape(mask, nq, nk)
    version = version_of(mask)
    key = (version, nq, nk, dtype, true_hides)
    entry = None if version is None else _read.get(mask)
    if entry is None or entry[0] != key:
        entry = (key, *_make(mask.detach().reshape(shape), nq, nk, dtype, true_hides))
        if version is not None:  # else a change in place would go unnoticed
            _read[mask] = entry
    _, lazy, is_bool = entry
    return MaskAndBias(lazy, None if is_bool and not mask.requires_grad else mask.reshape(shape))


def mask_shape(mask: Tensor, nq: int, nk: int) -> tuple[int, ...]:
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


def _make(mask: Tensor, nq: int, nk: int, dtype: torch.dtype, true_hides: bool) -> tuple[LazyMask, bool]:
    """The lazy mask, and whether there is no bias."""
    if mask.dtype == torch.bool:
        hidden = mask if true_hides else ~mask
    else:
        hidden = mask <= (-torch.inf if true_hides else hidden_threshold(mask.dtype, dtype))
    lazy = LazyMask(_mask((~hidden).cpu().numpy(), nq, nk), max(nk - nq, 0), nq, 0, nk)
    return lazy, mask.dtype == torch.bool or bool(((mask == 0) | hidden).all())


def hidden_threshold(of_mask: torch.dtype, of_queries: torch.dtype) -> float:
    """The largest value that hides a pair: a float32 mask may have been made with the smallest value of a narrower dtype."""
    return max(torch.finfo(of_mask).min, torch.finfo(of_queries).min)


def _mask(visible: NDArray[np.bool_], nq: int, nk: int) -> Mask:
    """The simplest mask that is this table: full, causal, keys, or the table itself."""
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
        visible = visible[0, 0]
        is_causal = nk >= nq and np.array_equal(visible, np.arange(nk) <= np.arange(nk - nq, nk)[:, None])
        return causal() if is_causal else table(visible)
    return table(visible[:, 0] if visible.shape[1] == 1 else visible)
