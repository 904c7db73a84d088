"""What an output may depend on: the declared mask as a table of pairs, widened to several layers on request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.errors import CallError

__all__ = ["allowed_pairs", "has_token"]

Table = npt.NDArray[np.bool_]


def allowed_pairs(mask: Any, n: int, batch: int, layers: int | None = None) -> Table:
    """The pairs (1 or B, N, N) that the mask allows from end to end.

    A mask that differs from head to head allows what any head allows. With `layers`, the mask is one layer's, and every
    layer passes its own position on: the pairs are those that a path of at most `layers` steps joins.
    """
    table: Table
    if isinstance(mask, np.ndarray):
        table = mask.astype(bool)
    else:
        from lowtri.masks import as_mask

        table = np.array(as_mask(mask).dense(n), dtype=bool)
    if table.ndim == 4:
        table = np.asarray(table.any(axis=1))
    if table.ndim == 2:
        table = table[None]
    if table.shape[0] not in (1, batch) or table.shape[1:] != (n, n):
        raise CallError(
            f"audit: mask gives a table of {tuple(table.shape)}, the example has {batch} row(s) of {n} positions.\n"
            "Fix: use a mask without a batch, or one whose batch is the example's."
        )
    if layers is not None:
        if isinstance(layers, bool) or not isinstance(layers, (int, np.integer)) or layers < 1:
            raise CallError(
                f"audit: layers={layers!r}, expected a whole number of at least 1 (or None: the mask is from end to end)."
            )
        step = table | np.eye(n, dtype=bool)
        reach = step
        for _ in range(min(layers, n) - 1):
            wider = (reach.astype(np.float32) @ step.astype(np.float32)) > 0
            if (wider == reach).all():
                break
            reach = wider
        table = reach
    return table


def has_token(allowed: Table) -> npt.NDArray[np.bool_]:
    """Positions (1 or B, N) that some query sees; any other position is a pad, and its own output means nothing."""
    return np.asarray(allowed.any(axis=1))
