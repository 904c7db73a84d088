"""Positions as users pass them, lists, NumPy arrays or tensors: checked, as int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.arrays import positions_in_numpy

__all__ = ["as_positions", "following", "same"]

_INT64 = np.dtype(np.int64)


def as_positions(positions: Any, name: str = "append: positions") -> NDArray[np.int64]:
    """Integers below POSITION_MAX; negative ones mean "no token here"."""
    return positions_in_numpy(name, positions, "(N,) or (B, N)")


def same(positions: Any, known: NDArray[np.int64]) -> bool:
    """Whether positions equal the known ones (R, N) in value and shape: by content, since the array may have been changed."""
    if type(positions) is np.ndarray and positions.dtype == _INT64:
        shape = positions.shape
        if shape == known.shape or shape == known.shape[1:]:
            return positions.tobytes() == known.tobytes()  # several times faster than array_equal
    given = np.atleast_2d(as_positions(positions))
    return given.shape == known.shape and bool(np.all(np.maximum(given, -1) == known))


def following(positions: Any, start: NDArray[np.int64], n: int, rows: int) -> NDArray[np.int64]:
    """Positions of ``n`` new tokens, (n,) or (rows, n), as (R, n); they must increase in each row, from ``start`` (R,) on."""
    given = as_positions(positions)
    new = np.maximum(np.atleast_2d(given), -1)
    if new.shape not in ((1, n), (rows, n)):
        raise CallError(
            f"append: positions {given.shape} do not fit {n} new tokens in {rows} rows: expected ({n},) or ({rows}, {n})."
        )
    if len(new) < len(start):
        new = np.broadcast_to(new, (len(start), n))
    last = np.broadcast_to(start[:, None] - 1, (len(new), 1))
    before = np.maximum.accumulate(np.concatenate([last, new], 1), 1)[:, :-1]
    if np.any((new <= before) & (new >= 0)):
        raise CallError(
            f"append: positions {given.tolist() if given.size <= 16 else given.shape} go back: "
            f"the next position is {start.tolist()}, and positions must increase.\nFix: crop(n) first, to remove tokens."
        )
    return new
