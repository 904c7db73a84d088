"""Masks that are formulas over positions: for each, its dataclass and the public function that makes it.

The formulas take ints, NumPy arrays and intervals alike, and their tile answers are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtri.compat import is_surely, tracer
from lowtri.masks.mask import Mask, constructor, field_text
from lowtri.masks.tile import POSITION_MAX, Index, check_count


@dataclass(frozen=True, repr=False)
class Full(Mask):
    depends_on_query = False

    def _sees(self, q: Index, k: Index) -> Any:
        return (q >= 0) & (k >= 0)  # always true, in the shape of the answer

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index]:
        return []


@constructor()
def full() -> Mask:
    """Every query sees every key: the encoder's attention.

    >>> print(full().draw(3))
    ███
    ███
    ███

    The same elsewhere: no mask. Source: the encoder of Vaswani et al. 2017.
    """
    return Full()


@dataclass(frozen=True, repr=False)
class Band(Mask):
    """A strip along the diagonal: ``q - before <= k <= q + after``. causal, window and band are its three names."""

    before: int
    after: int
    name: str

    def _sees(self, q: Index, k: Index) -> Any:
        if self.before >= POSITION_MAX and self.after == 0:  # causal: one comparison instead of two
            return k <= q
        distance = q - k
        return (distance <= self.before) & (distance >= -self.after)

    def full_unchecked(self, q_low: int, q_high: int, k_low: int, k_high: int) -> bool:
        return q_high - k_low <= self.before and k_high - q_low <= self.after  # each token that is generated asks

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index]:
        return [q0 - k0]

    def _extent(self) -> int:
        strip = 1 + self.after + (self.before if self.before < POSITION_MAX else 0)  # of causal there is no end to show
        return strip + strip // 2

    def _text(self, arrays: list[Any] | None = None) -> str:
        if arrays is None or tracer() != "compile":
            return self.name
        if is_surely(self.after == 0):
            if is_surely(self.before >= POSITION_MAX):
                return "causal"
            return f"window({field_text(self.before + 1, arrays)})"
        return f"band({field_text(self.before, arrays)}, {field_text(self.after, arrays)})"


@constructor()
def causal() -> Mask:
    """Each query sees itself and all earlier keys: ``k <= q``.

    >>> print(causal().draw(4))
    █···
    ██··
    ███·
    ████

    The same mask elsewhere: SDPA ``is_causal=True`` (for as many queries as keys), ``torch.tril``, FlashAttention ``causal=True``.
    Source: the decoder of Vaswani et al. 2017, section 3.2.3.
    """
    return Band(POSITION_MAX, 0, "causal")


@constructor()
def window(n: int) -> Mask:
    """Each query sees the newest ``n`` keys, including the one at its own position.

    >>> print(window(3).draw(6))
    █·····
    ██····
    ███···
    ·███··
    ··███·
    ···███

    A query at ``q`` sees a key at ``k`` when ``q - n < k <= q``.

    Args:
        n: the number of keys, at least 1; under ``window(1)`` each query sees only its own position.

    Raises:
        MaskError: if ``n`` is below 1, since no query would then see any key.

    The same mask elsewhere: FlashAttention ``window_size=(n - 1, 0)``; transformers ``sliding_window=n``.
    Source: the backward half of the sliding window in Longformer (Beltagy et al. 2020).
    """
    n = check_count("window", "n", n, least=1)
    return Band(n - 1, 0, "" if tracer() == "compile" else f"window({n})")


@constructor()
def band(before: int, after: int) -> Mask:
    """Each query sees its own position, ``before`` keys before it and ``after`` keys after it: ``q - before <= k <= q + after``.

    >>> print(band(1, 2).draw(5))
    ███··
    ████·
    ·████
    ··███
    ···██

    Args:
        before, after: the number of keys before and after the query's position, at least 0.

    The same mask elsewhere: FlashAttention ``window_size=(before, after)``.
    Source: the symmetric window of Longformer (Beltagy et al. 2020).
    """
    before, after = check_count("band", "before", before, least=0), check_count("band", "after", after, least=0)
    return Band(before, after, "" if tracer() == "compile" else f"band({before}, {after})")


@dataclass(frozen=True, repr=False)
class First(Mask):
    n: int

    depends_on_query = False

    def _sees(self, q: Index, k: Index) -> Any:
        return (k < self.n) & (q >= 0)

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index]:
        return [np.clip(self.n - k0, 0, nk)]


@constructor()
def first(n: int) -> Mask:
    """Every query sees the first ``n`` keys: ``0 <= k < n``.

    >>> prefix = causal() | first(2)
    >>> print(prefix.draw(4))
    ██··
    ██··
    ███·
    ████

    ``causal() | first(p)`` is a prefix language model; ``causal() & (window(w) | first(s))`` keeps ``s`` attention sinks.

    Args:
        n: the number of keys, at least 1.

    Source: prefix LM, Raffel et al. 2020; sinks, Xiao et al. 2023 (StreamingLLM).
    """
    return First(check_count("first", "n", n, least=1))


@dataclass(frozen=True, repr=False)
class Strided(Mask):
    n: int

    def _sees(self, q: Index, k: Index) -> Any:
        return (q - k) % self.n == 0

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index]:
        return [(q0 - k0) % self.n]


@constructor()
def strided(n: int) -> Mask:
    """Every ``n``-th key, counted from the query: ``(q - k) % n == 0``.

    >>> print((causal() & strided(2)).draw(5))
    █····
    ·█···
    █·█··
    ·█·█·
    █·█·█

    Args:
        n: the stride, in tokens, at least 1.

    Source: the strided pattern of Sparse Transformers (Child et al. 2019).
    """
    return Strided(check_count("strided", "n", n, least=1))
