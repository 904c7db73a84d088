"""Whether a cache of transformers can serve a user's mask: it holds what the model's own pattern keeps, which may be too little."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from lowtri.errors import CallError
from lowtri.generation.missing import row_masks, visible_pair
from lowtri.masks.formulas import first
from lowtri.masks.mask import Mask
from lowtri.masks.tile import EMPTY

__all__ = ["check_cache"]


def check_cache(mask: Mask, q0: int, nq: int, k0: int, nk: int) -> Mask:
    """The mask for queries ``q0 .. q0 + nq`` and keys ``k0 .. k0 + nk`` (positions in the row), if a cache can serve it.

    Returns:
        the mask, without keys of a static cache that are not written yet.

    Raises:
        CallError: if earlier queries lack one of these keys, or these queries lack a key that the cache has dropped.
    """
    end = q0 + nq
    if pair := _shown(mask, 0, q0, q0, end):
        _reject(mask, *pair, "which came only after it", "a mask that shows no later keys")
    if pair := _shown(mask, q0, end, 0, k0):
        fix = "past_key_values=transformers.DynamicCache(), which drops nothing"
        _reject(mask, *pair, "which the model's cache has dropped", fix)
    if k0 + nk > end and not np.all(mask.tile(q0, end, end, k0 + nk) == EMPTY):
        return mask & first(end)
    return mask


def _shown(mask: Mask, q0: int, q1: int, k0: int, k1: int) -> tuple[int, int] | None:
    """A query of ``q0 .. q1`` and a key of ``k0 .. k1`` that it sees, for any row and head."""
    if q0 == q1 or k0 == k1 or np.all(mask.tile(q0, q1, k0, k1) == EMPTY):
        return None
    pairs = (visible_pair(part, q0, q1, np.arange(k0, k1)) for part in row_masks(mask, 0, 1))
    return next((pair for pair in pairs if pair is not None), None)


def _reject(mask: Mask, q: int, k: int, why: str, fix: str) -> NoReturn:
    raise CallError(f"transformers: {mask!r} shows the query at {q} the key at {k}, {why}.\nFix: {fix}.")
