"""Masks joined: ``&`` is the minimum of two answers, ``|`` the maximum, ``~`` swaps EMPTY and FULL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtri.errors import MaskError
from lowtri.masks.mask import Answer, Mask, Positions, shown

__all__ = ["And", "Join", "Not", "Or"]

DEEPEST = 100  # operators inside operators: every question goes down all of them
MOST_JOINED = 1000  # masks under all operators together


@dataclass(frozen=True)
class Join(Mask):
    """Two masks joined; a mask without heads answers for all heads, one without batch for all rows."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _limit(self, self.left, self.right)
        object.__setattr__(self, "_batch", _common_batch(self.left, self.right))

    @property
    def batch(self) -> tuple[int, ...]:
        return self._batch  # type: ignore[attr-defined]

    @property
    def asks_query(self) -> bool:
        return self.left.asks_query or self.right.asks_query

    def _at(self, b: int, h: int) -> Mask:
        return type(self)(self.left.at(b, h), self.right.at(b, h))


class And(Join):
    """Seen when both see: the minimum of two answers."""

    def _sees(self, q: Positions, k: Positions) -> Any:
        return self.left._sees(q, k) & self.right._sees(q, k)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        left, right = self.left._tile(q0, q1, k0, k1), self.right._tile(q0, q1, k0, k1)
        return min(left, right) if type(q0) is int else np.minimum(left, right)

    def __repr__(self) -> str:
        left = f"({self.left!r})" if isinstance(self.left, Or) else repr(self.left)
        right = f"({self.right!r})" if isinstance(self.right, Join) else repr(self.right)
        return f"{left} & {right}"


class Or(Join):
    """Seen when either sees: the maximum of two answers."""

    def _sees(self, q: Positions, k: Positions) -> Any:
        return self.left._sees(q, k) | self.right._sees(q, k)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        left, right = self.left._tile(q0, q1, k0, k1), self.right._tile(q0, q1, k0, k1)
        return max(left, right) if type(q0) is int else np.maximum(left, right)

    def __repr__(self) -> str:
        right = f"({self.right!r})" if isinstance(self.right, Or) else repr(self.right)
        return f"{self.left!r} | {right}"


@dataclass(frozen=True)
class Not(Mask):
    """Seen when the other does not see: EMPTY and FULL change places."""

    inner: Mask

    def __post_init__(self) -> None:
        _limit(self, self.inner)

    @property
    def batch(self) -> tuple[int, ...]:
        return self.inner.batch

    @property
    def asks_query(self) -> bool:
        return self.inner.asks_query

    def _sees(self, q: Positions, k: Positions) -> Any:
        seen = self.inner._sees(q, k)
        return not seen if isinstance(seen, bool) else ~seen

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return 2 - self.inner._tile(q0, q1, k0, k1)

    def _at(self, b: int, h: int) -> Mask:
        return Not(self.inner.at(b, h))

    def __repr__(self) -> str:
        return f"~({self.inner!r})" if isinstance(self.inner, Join) else f"~{self.inner!r}"


def _limit(made: Mask, *parts: Mask) -> None:
    """Count what is joined, and refuse what would be too deep to walk through."""
    depth, joined = 1 + max([part._depth for part in parts]), sum([part._joined for part in parts])
    if depth > DEEPEST or joined > MOST_JOINED:
        raise MaskError(
            f"mask: {joined} masks under {depth} operators, one inside the other; at most {MOST_JOINED} masks and "
            f"{DEEPEST} operators can be joined.\nFix: one documents(ids), table(bools) or where(fn) that says the same."
        )
    object.__setattr__(made, "_depth", depth)
    object.__setattr__(made, "_joined", joined)


def _common_batch(left: Mask, right: Mask) -> tuple[int, ...]:
    """The batch of two masks together: sizes equal or 1, a mask without heads answers for all heads."""
    a, b = left.batch, right.batch
    if not a or not b:
        return a or b
    long = max(len(a), len(b))
    sizes = []
    for m, n in zip(a + (1,) * (long - len(a)), b + (1,) * (long - len(b)), strict=True):
        if m != n and 1 not in (m, n):
            raise MaskError(f"{shown(left)} with {shown(right)}: their batches {a} and {b} do not fit together.")
        sizes.append(max(m, n))
    return tuple(sizes)
