"""The formulas of positions alone: who sees whom, and when a rectangle is wholly seen (``full``) or wholly hidden (``empty``).

They take ints and NumPy arrays alike, and answer exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtri.masks.mask import END, Answer, Mask, Positions, verdict

__all__ = ["Band", "Chunks", "First", "Full", "Strided", "same"]


@dataclass(frozen=True)
class Full(Mask):
    @property
    def asks_query(self) -> bool:
        return False

    def _sees(self, q: Positions, k: Positions) -> Any:
        return (q >= 0) & (k >= 0)  # always true, in the shape of the answer

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return 2 + 0 * (q0 + k0)  # always FULL, in the shape of the answer

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions]:
        return []

    def __repr__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Band(Mask):
    """A strip along the diagonal: ``q - before <= k <= q + after``. causal, window and band are its three names."""

    before: int
    after: int
    name: str

    def _sees(self, q: Positions, k: Positions) -> Any:
        if self.before >= END and self.after == 0:  # causal: one comparison instead of two
            return k <= q
        distance = q - k
        return (distance <= self.before) & (distance >= -self.after)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        least, most = q0 - (k1 - 1), (q1 - 1) - k0  # every distance between the two occurs
        return verdict(
            full=(least >= -self.after) & (most <= self.before), empty=(most < -self.after) | (least > self.before)
        )

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions]:
        return [q0 - k0]

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class First(Mask):
    n: int

    @property
    def asks_query(self) -> bool:
        return False

    def _sees(self, q: Positions, k: Positions) -> Any:
        return (k < self.n) & (q >= 0)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return verdict(full=k1 <= self.n, empty=k0 >= self.n) + 0 * q0

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions]:
        return [np.clip(self.n - k0, 0, nk)]

    def __repr__(self) -> str:
        return f"first({self.n})"


@dataclass(frozen=True)
class Chunks(Mask):
    n: int

    def _sees(self, q: Positions, k: Positions) -> Any:
        return q // self.n == k // self.n

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return same(q0 // self.n, (q1 - 1) // self.n, k0 // self.n, (k1 - 1) // self.n)

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions]:
        return [q0 % self.n, k0 - q0]

    def __repr__(self) -> str:
        return f"chunks({self.n})"


@dataclass(frozen=True)
class Strided(Mask):
    n: int

    def _sees(self, q: Positions, k: Positions) -> Any:
        return (q - k) % self.n == 0

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        least, most = q0 - (k1 - 1), (q1 - 1) - k0
        newest = most // self.n * self.n  # the greatest multiple of n that could occur
        return verdict(
            full=(self.n == 1) | ((least == most) & (newest == most)),
            empty=newest < least if self.n > 1 else most < least,
        )

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions]:
        return [(q0 - k0) % self.n]

    def __repr__(self) -> str:
        return f"strided({self.n})"


def same(q_low: Any, q_high: Any, k_low: Any, k_high: Any) -> Answer:
    """The answer for `label of q == label of k`, from the least and greatest label on either side."""
    return verdict(
        full=(q_low == q_high) & (k_low == k_high) & (q_low == k_low), empty=(q_high < k_low) | (k_high < q_low)
    )
