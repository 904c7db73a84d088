"""From logits to one token, in pure functions of one row: temperature, top-k, top-p, and the draw.

Each of the first three takes logits and gives logits, -inf where it cuts, so they can be joined in any order; ``choose``
applies them in the usual one. NumPy, float64: a draw costs little beside a model's step, and is the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError

__all__ = ["Sampling", "choose", "draw", "heat", "keep_top_k", "keep_top_p", "softmax"]

Logits = NDArray[np.floating]  # (V,)


@dataclass(frozen=True)
class Sampling:
    """How to pick a token: the checked options of :func:`lowtri.generate`.

    Raises:
        CallError: if one of them makes no sense.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise CallError(f"temperature is {self.temperature}; it is 0 (greedy) or a positive number.")
        if self.top_k is not None and (self.top_k < 1 or self.top_k != int(self.top_k)):
            raise CallError(f"top_k is {self.top_k}; it counts tokens, at least 1. Fix: top_k=None keeps all.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise CallError(f"top_p is {self.top_p}; it is a probability above 0, at most 1.")


def heat(logits: Logits, temperature: float) -> Logits:
    """Logits divided by the temperature: below 1 sharper, above 1 flatter.

    >>> heat(np.array([0.0, 1.0]), 0.5).tolist()
    [0.0, 2.0]
    """
    return logits / temperature


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Only the ``k`` greatest logits; of equal ones those with the smaller ids.

    >>> keep_top_k(np.array([1.0, 3.0, 2.0, 3.0]), 2).tolist()
    [-inf, 3.0, -inf, 3.0]

    Source: Fan, Lewis and Dauphin 2018.
    """
    if k >= len(logits):
        return logits
    least = np.partition(logits, -k)[-k]  # the k-th greatest
    keep = logits > least
    equal = np.flatnonzero(logits == least)
    keep[equal[: k - np.count_nonzero(keep)]] = True
    return np.where(keep, logits, -np.inf)


def keep_top_p(logits: Logits, p: float) -> Logits:
    """Only the smallest set of the most probable tokens whose probabilities add up to at least ``p``.

    >>> keep_top_p(np.log([0.5, 0.3, 0.2]), 0.7).round(2).tolist()
    [-0.69, -1.2, -inf]

    Source: nucleus sampling, Holtzman et al. 2020.
    """
    order = np.argsort(-logits, kind="stable")
    sums = np.cumsum(softmax(logits)[order])
    count = int(np.searchsorted(sums, p * sums[-1] * (1 - 1e-12))) + 1  # rounding must not ask for one token more
    out = np.full_like(logits, -np.inf)
    out[order[:count]] = logits[order[:count]]
    return out


def softmax(logits: Logits) -> NDArray[np.float64]:
    """Probabilities (V,), float64; subtracting the greatest logit first keeps exp in range."""
    weights = np.exp(np.asarray(logits, np.float64) - logits.max())
    return weights / weights.sum()


def draw(probabilities: NDArray[np.float64], rng: np.random.Generator) -> int:
    """One token drawn by its probability, from one uniform number; a token of probability 0 is never drawn."""
    sums = np.cumsum(probabilities)
    return int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))


def choose(logits: Logits, how: Sampling, rng: np.random.Generator) -> int:
    """The next token of one row: the most probable one at temperature 0 (of equal ones the first), else a draw.

    Raises:
        CallError: if the logits hold NaN or +inf, or hide every token.
    """
    best = int(np.argmax(logits))  # NumPy's argmax finds NaN first
    if not np.isfinite(logits[best]):
        what = "hide every token (all are -inf)" if logits[best] == -np.inf else f"hold {logits[best]} at token {best}"
        raise CallError(f"generate: the model's logits {what}, so no token can be chosen.")
    if how.temperature == 0:
        return best
    kept = heat(np.asarray(logits, np.float64) - logits[best], how.temperature)
    if how.top_k is not None:
        kept = keep_top_k(kept, how.top_k)
    if how.top_p is not None and how.top_p < 1:
        kept = keep_top_p(kept, how.top_p)
    return draw(softmax(kept), rng)
