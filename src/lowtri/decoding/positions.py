"""Positions as users pass them, lists, NumPy arrays or tensors: checked, as int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import END

__all__ = ["as_positions", "same"]


def as_positions(positions: Any, name: str = "positions") -> NDArray[np.int64]:
    """Whole numbers below END; negative ones mean "no token here"."""
    if hasattr(positions, "detach"):
        positions = positions.detach().cpu().numpy()
    array = np.asarray(positions)
    if array.size and array.dtype.kind not in "iu":
        raise CallError(f"{name} are {array.dtype} {array.shape}, but positions are whole numbers.")
    if array.size and array.max() >= END:  # in the array's own dtype: uint64 would wrap to negative ones
        raise CallError(f"{name} reach {array.max()}, but they must lie below 2**62. Fix: count from 0.")
    return array.astype(np.int64, copy=False)


def same(positions: Any, known: NDArray[np.int64], rows: int) -> bool:
    """Whether positions, (N,) or (rows, N), are the known ones (R, N): by content, since the caller may have changed them."""
    if (
        isinstance(positions, np.ndarray)
        and positions.dtype == np.int64
        and positions.shape in (known.shape, known.shape[1:])
    ):
        return positions.tobytes() == known.tobytes()  # several times faster than array_equal
    given = np.atleast_2d(as_positions(positions))
    return given.shape in ((1, known.shape[1]), (rows, known.shape[1])) and bool(np.all(np.maximum(given, -1) == known))
