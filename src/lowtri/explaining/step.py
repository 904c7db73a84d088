"""The steps of an explanation, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAIRS", "Step", "Steps"]

PAIRS = ("scores", "scaled", "mask", "masked", "weights")  # steps with a row for each query, a column for each key


@dataclass(frozen=True)
class Step:
    """One step: its value, (rows, columns) or (heads, rows, columns), with a label for each row and column.

    Attributes:
        name: such as ``"scores"`` or ``"weights"``.
        formula: how the value follows from the steps before it; empty for inputs.
        sentence: the same in words.
        value: the numbers.
        rows, columns: the labels.
        unmasked: the same step without a mask, or None where the mask makes no difference.
    """

    name: str
    formula: str
    sentence: str
    value: NDArray[Any]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    unmasked: NDArray[Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def hatched(self) -> bool:
        """Whether the cells are pairs of tokens that the mask may hide."""
        return self.name in ("mask", "masked", "weights")


@dataclass(frozen=True)
class Steps:
    """All steps, in order, and the tokens and mask that they are about."""

    tokens: tuple[str, ...]
    mask: str
    visible: NDArray[np.bool_]  # (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see
    steps: tuple[Step, ...]
    note: str = ""
