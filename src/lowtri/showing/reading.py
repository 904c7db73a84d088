"""Weights of any size, pooled to the cells of a picture: at most 64 each way for one head, 12 for the overview of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.masks.arrays import in_numpy, is_tensor
from lowtri.masks.panels import MAX_CELLS, cells_of

__all__ = ["MAX_HEADS", "SMALL", "Cells", "Maps", "check_weights", "pool"]

MAX_HEADS = 64  # heads of an overview
SMALL = 12  # cells of a head in the overview, each way
_AT_ONCE = 2**24  # numbers of a head that are read; of larger heads, some rows of each cell


@dataclass(frozen=True)
class Cells:
    """One head, pooled: every row of cells still sums to 1 if the weights do."""

    values: NDArray[
        np.float64
    ]  # (rows, columns): means over a cell's queries of the weight on its keys; NaN if one was
    visible: NDArray[np.int8] | None  # (rows, columns): 0 hidden, 1 partly, 2 visible; None without a mask
    step: int  # positions to a cell, each way
    rows_read: int  # queries of a cell that were read


@dataclass(frozen=True)
class Maps:
    """What a picture of weights shows."""

    heads: int
    queries: int
    keys: int
    head: int  # the one that is shown large
    large: Cells
    small: tuple[Cells, ...]  # the overview: the first heads; empty if there is one head
    greatest: float  # the weight that has the full colour
    query_labels: tuple[str, ...] = ()  # one for each row of `large`, or none
    key_labels: tuple[str, ...] = ()

    @property
    def left_out(self) -> int:
        return self.heads - len(self.small) if self.small else 0


def check_weights(weights: Any) -> Any:
    """Weights (H, Nq, Nk), as they came where they are an array or a tensor.

    Raises:
        CallError: if they have other dimensions, no entry, or no numbers.
    """
    if not is_tensor(weights) and not (hasattr(weights, "shape") and hasattr(weights, "dtype")):
        weights = in_numpy("weights", weights)
    if isinstance(weights, str):
        raise CallError(f"show: {weights}. Fix: (H, N, N) or (N, N) numbers.")
    shape = tuple(int(n) for n in weights.shape)
    if len(shape) == 4 and shape[0] == 1:
        weights, shape = weights[0], shape[1:]
    if len(shape) == 4:
        raise CallError(f"show: weights are {shape}, with a batch of {shape[0]} in front. Fix: show(weights[0]).")
    if len(shape) not in (2, 3) or 0 in shape:
        raise CallError(f"show: weights are {shape}, but expected (H, Nq, Nk) or (Nq, Nk), with no empty side.")
    if not is_tensor(weights) and np.dtype(weights.dtype).kind not in "fiub":
        raise CallError(f"show: weights are {weights.dtype}, but expected real numbers.")
    return weights if len(shape) == 3 else weights[None]


def pool(weights: Any, head: int, most: int = MAX_CELLS, mask: Mask | None = None) -> Cells:
    """One head of weights (H, Nq, Nk) as at most ``most`` x ``most`` cells; ``mask`` says which of them are hidden.

    >>> pool(np.eye(4)[None], 0, most=2).values
    array([[1., 0.],
           [0., 1.]])

    Raises:
        CallError: if a weight that is read is negative or infinite.
    """
    nq, nk = int(weights.shape[1]), int(weights.shape[2])
    step = -(-max(nq, nk) // most)
    starts = range(0, nq, step)
    rows_read = max(1, min(step, _AT_ONCE // (len(starts) * nk)))
    values = np.empty((len(starts), -(-nk // step)))  # (rows, columns)
    for i, start in enumerate(starts):
        every = -(-min(step, nq - start) // rows_read)  # evenly spaced queries
        values[i] = _summed(weights[head, start : min(start + step, nq) : every], step).mean(0)
    visible = None if mask is None else cells_of(mask.at(0, head), nq, nk, step)
    return Cells(values, visible, step, rows_read)


def _summed(rows: Any, step: int) -> NDArray[np.float64]:
    """Rows (n, Nk) summed over groups of ``step`` keys."""
    numbers = in_numpy("weights", rows)
    if isinstance(numbers, str):
        raise CallError(f"show: {numbers}. Fix: weights with numbers.")
    numbers = numbers.astype(np.float64)
    if (numbers < 0).any() or np.isinf(numbers).any():
        raise CallError(
            f"show: weights are at least 0 and finite, but {numbers[(numbers < 0) | np.isinf(numbers)][0]:g} came.\n"
            "Fix: pass them after the softmax."
        )
    return np.add.reduceat(numbers, np.arange(0, numbers.shape[1], step), axis=1) if step > 1 else numbers
