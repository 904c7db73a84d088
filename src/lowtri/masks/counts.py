"""The number of visible pairs, and whether a mask is causal; both are computed from the plan, without a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.masks.formulas import causal
from lowtri.masks.mask import Mask
from lowtri.masks.plan import plan
from lowtri.masks.tile import default_positions

__all__ = ["is_causal", "pairs"]


def pairs(mask: Mask, nq: int, nk: int | None = None) -> Any:
    """How many pairs are visible among ``nq`` queries and ``nk`` keys; an array over ``m.batch`` if there is one.

    >>> causal().pairs(1_000_000)
    500000500000
    """

    def count(mask: Mask) -> int:
        q, k = default_positions(mask, nq, nk)
        return plan(mask, q, k).pairs

    return mask._each(count) if mask.batch else count(mask)


def is_causal(mask: Mask, n: int) -> bool:
    """Whether no query among the first ``n`` positions sees a later key, in any batch row and head.

    >>> from lowtri import first, window
    >>> window(4).is_causal(100), first(4).is_causal(100)
    (True, False)
    """
    return not np.any(pairs(mask - causal(), n))
