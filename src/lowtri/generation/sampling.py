"""Sampling: pure functions from the logits of one row to one token, by temperature, top-k and top-p.

The filters map logits to logits, with -inf for removed tokens, so they compose; ``next_token`` applies them in the usual order.
Computed in NumPy float64: the cost is small compared with a model's step, and a seed gives the same samples on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError

Logits = NDArray[np.floating]  # (V,)


@dataclass(frozen=True)
class Sampling:
    """The checked sampling options of :func:`lowtri.generate`.

    Raises:
        CallError: if an option is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise CallError(
                f"temperature is {self.temperature}; expected a number, at least 0. "
                "Fix: 0 for greedy decoding, 1 for the model's own probabilities."
            )
        if self.top_k is not None and (self.top_k < 1 or self.top_k != int(self.top_k)):
            raise CallError(f"top_k is {self.top_k}; it counts tokens, at least 1. Fix: top_k=None keeps all.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise CallError(
                f"top_p is {self.top_p}; expected a probability above 0, at most 1. Fix: top_p=None keeps all."
            )


def apply_temperature(logits: Logits, temperature: float) -> Logits:
    """Logits divided by the temperature: below 1 sharper, above 1 flatter.

    >>> apply_temperature(np.array([0.0, 1.0]), 0.5).tolist()
    [0.0, 2.0]
    """
    return logits / temperature


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Keep the ``k`` greatest logits; ties go to the smaller ids.

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
    """Keep the smallest set of most probable tokens whose probabilities sum to at least ``p``.

    >>> keep_top_p(np.log([0.5, 0.3, 0.2]), 0.7).round(2).tolist()
    [-0.69, -1.2, -inf]

    Source: nucleus sampling, Holtzman et al. 2020.
    """
    order = np.argsort(-logits, kind="stable")
    sums = np.cumsum(softmax(logits)[order])
    count = int(np.searchsorted(sums, p * sums[-1] * (1 - 1e-12))) + 1  # rounding must not add a token
    out = np.full_like(logits, -np.inf)
    out[order[:count]] = logits[order[:count]]
    return out


def softmax(logits: Logits) -> NDArray[np.float64]:
    """Probabilities (V,), float64, computed stably."""
    weights = np.exp(np.asarray(logits, np.float64) - logits.max())
    return weights / weights.sum()


def sample(probabilities: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Sample one token by inverting the cumulative distribution; a token of probability 0 is never sampled."""
    sums = np.cumsum(probabilities)
    return int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))


def next_token(logits: Logits, sampling: Sampling, rng: np.random.Generator) -> int:
    """The next token of one row: at temperature 0 the most probable (the first of ties), else a sample.

    Raises:
        CallError: if the logits hold NaN or +inf, or hide every token.
    """
    best = int(np.argmax(logits))  # NumPy's argmax finds NaN first
    if not np.isfinite(logits[best]):
        what = "hide every token (all are -inf)" if logits[best] == -np.inf else f"hold {logits[best]} at token {best}"
        raise CallError(f"generate: the model's logits {what}, so no token can be chosen.")
    if sampling.temperature == 0:
        return best
    filtered = apply_temperature(np.asarray(logits, np.float64) - logits[best], sampling.temperature)
    if sampling.top_k is not None:
        filtered = keep_top_k(filtered, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        filtered = keep_top_p(filtered, sampling.top_p)
    return sample(softmax(filtered), rng)
