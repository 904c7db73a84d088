"""How to train: the rows and the settings of a step depend only on the recipe, the number of rows and the step's number.

The schedule carries no state from step to step, so a run that was killed continues exactly where it stopped.
Sources: Loshchilov and Hutter 2017 (cosine); Goyal et al. 2017 (warm-up).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lowtri.errors import CallError


@dataclass(frozen=True)
class Recipe:
    """How to train. Two runs with the same recipe, tokens, machine and thread count give the same weights."""

    steps: int = 1000
    batch: int = 16  # rows in a step
    context: int = 256  # tokens in a row
    lr: float = 1e-3  # the highest learning rate, at the end of the warm-up
    warmup: int = 50  # steps from 0 to lr; at most a tenth of all
    lr_floor: float = 0.1  # the last learning rate, as a share of lr
    weight_decay: float = 0.1  # on matrices; norms have none
    clip: float = 1.0  # the gradient's greatest norm
    held_out: float = 0.05  # share of the rows kept for validation
    validate_every: int = 100  # steps
    save_every: int = 100  # steps
    seed: int = 0
    accumulate: int = 1  # parts of a batch that are computed one after the other, with one update
    dtype: str = (
        "float32"  # of the computation: float32 or bfloat16; weights, moments and sums of gradients are float32
    )

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "validate_every", "save_every", "accumulate"):
            if getattr(self, name) < 1:
                raise CallError(f"{name}: got {getattr(self, name)}; at least 1 is needed")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise CallError(f"{name}: got {getattr(self, name)}; a number above 0 is needed")
        if self.dtype not in ("float32", "bfloat16"):
            raise CallError(f"dtype: got {self.dtype!r}; float32 or bfloat16 is needed")
        if not 0 <= self.held_out < 1:
            raise CallError(f"held_out: got {self.held_out}; a share of the rows from 0 to below 1 is needed")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a straight line up, then half a cosine down to the floor.

        >>> recipe = Recipe(steps=100, lr=1.0)
        >>> [round(recipe.lr_at(step), 3) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.542, 0.1]
        """
        warmup = min(self.warmup, self.steps // 10)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - 1 - warmup)
        return self.lr * (self.lr_floor + (1 - self.lr_floor) * (1 + math.cos(math.pi * done)) / 2)

    def random_seed(self, step: int, rank: int) -> int:
        """The seed of the random numbers (dropout) that a process draws in a step."""
        return int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1)[0])


def split(rows: int, held_out: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers of the rows to train on, and of those held out.

    Those held out are spread evenly, 64 at most; of two rows or more there is at least one on either side.

    >>> split(10, held_out=0.2)
    (array([0, 1, 3, 4, 5, 6, 8, 9]), array([2, 7]))
    """
    count = min(64, rows - 1, max(1, round(rows * held_out))) if held_out and rows > 1 else 0
    validation = (np.arange(count) * 2 + 1) * rows // (2 * count) if count else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(rows), validation), validation


def rows_of_step(rows: npt.NDArray[np.int64], step: int, recipe: Recipe) -> npt.NDArray[np.int64]:
    """The rows of a step: the next ``batch`` of an endless sequence of shuffled epochs."""
    numbers = np.arange(step * recipe.batch, (step + 1) * recipe.batch)  # (B,)
    epochs, indices = (x.tolist() for x in np.divmod(numbers, len(rows)))
    return rows[[_order(recipe.seed, epoch, len(rows))[index] for epoch, index in zip(epochs, indices, strict=True)]]


@lru_cache(2)  # a step may lie in two epochs; shuffling ten million rows takes most of a second
def _order(seed: int, epoch: int, rows: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)
