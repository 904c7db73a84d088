"""Checks positions and rows as users pass them (lists, NumPy arrays or tensors), and converts them to int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.masks.arrays import positions_in_numpy

__all__ = ["as_positions", "ends_of", "following", "rows_of", "same"]

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
    rows = np.atleast_2d(as_positions(positions))
    return rows.shape == known.shape and bool(np.all(np.maximum(rows, -1) == known))


def following(positions: Any, start: NDArray[np.int64], n: int, rows: int) -> NDArray[np.int64]:
    """Positions of ``n`` new tokens, (n,) or (rows, n), as (R, n); they must increase in each row, from ``start`` (R,) on."""
    positions = as_positions(positions)
    new = np.maximum(np.atleast_2d(positions), -1)
    if new.shape not in ((1, n), (rows, n)):
        raise CallError(
            f"append: positions {positions.shape} do not fit {n} new tokens in {rows} rows: expected ({n},) or ({rows}, {n})."
        )
    if len(new) < len(start):
        new = np.broadcast_to(new, (len(start), n))
    last = np.broadcast_to(start[:, None] - 1, (len(new), 1))
    before = np.maximum.accumulate(np.concatenate([last, new], 1), 1)[:, :-1]
    if np.any((new <= before) & (new >= 0)):
        raise CallError(
            f"append: positions {positions.tolist() if positions.size <= 16 else positions.shape} go back: "
            f"the next position is {start.tolist()}, and positions must increase.\nFix: crop(n) first, to remove tokens."
        )
    return new


def rows_of(index: Any, size: int, mask: Mask) -> NDArray[np.int64]:
    """Rows of a batch of this size; each must get a row with the same mask as its own."""
    rows = as_positions(index, "reorder: index")
    if rows.ndim != 1 or np.any((rows < 0) | (rows >= size)):
        raise CallError(f"reorder: index is {rows.tolist()}, but the cache has the rows 0 .. {size - 1}.")
    masks, heads = (*mask.batch, 1, 1)[:2]
    if masks > 1 and (
        len(rows) != size
        or any(mask.at(i, h) != mask.at(int(row), h) for i, row in enumerate(rows) for h in range(heads))
    ):
        raise CallError(
            f"reorder: index is {rows.tolist()}, but {mask!r} differs from row to row, and masks are not reordered.\n"
            "Fix: reorder only among rows that have the same mask."
        )
    return rows


def ends_of(n: Any, rows: int) -> NDArray[np.int64]:
    """The next position after a crop: one for all rows, (1,), or one for each, (rows,)."""
    ends = np.atleast_1d(as_positions(n, "crop: n"))
    if ends.ndim != 1 or len(ends) not in (1, rows) or np.any(ends < 0):
        raise CallError(
            f"crop: n is {ends.tolist()}; it is the position of the next token, at least 0, "
            f"one for all or one for each of {rows} rows."
        )
    return ends
