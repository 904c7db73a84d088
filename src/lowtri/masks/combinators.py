"""The set operations on masks, ``&``, ``|``, ``~`` and ``-``, and the classes of the masks that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtri.errors import MaskError
from lowtri.masks.mask import CONSTRUCTORS, Mask, called, field_text
from lowtri.masks.positions import Positions, shown
from lowtri.masks.tile import Answer

__all__ = ["MAX_DEPTH", "And", "Join", "Not", "Or"]

MAX_DEPTH = 100  # operators inside operators: every question recurses through them
_MAX_SIZE = 1000  # masks under all operators together


@dataclass(frozen=True, repr=False)
class Join(Mask):
    """Two masks joined; a mask without heads answers for all heads, one without batch for all rows."""

    left: Mask
    right: Mask
    _sign = ""

    def __post_init__(self) -> None:
        _limit(self, self.left, self.right)
        object.__setattr__(self, "_batch", _common_batch(self.left, self.right))
        object.__setattr__(self, "depends_on_query", self.left.depends_on_query or self.right.depends_on_query)
        object.__setattr__(self, "row_lengths", self.left.row_lengths + self.right.row_lengths)

    @property
    def batch(self) -> tuple[int, ...]:
        return self._batch  # type: ignore[attr-defined]

    def _at(self, b: int, h: int) -> Mask:
        return type(self)(self.left.at(b, h), self.right.at(b, h))

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        left = _operand_text(self.left, self._strength, arrays)
        right = _operand_text(self.right, self._strength + 1, arrays)
        return None if left is None or right is None else f"{left} {self._sign} {right}"


class And(Join):
    """Visible where both masks are: the minimum of two answers."""

    _sign, _strength = "&", 2

    def _sees(self, q: Positions, k: Positions) -> Any:
        return self.left._sees(q, k) & self.right._sees(q, k)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        left, right = self.left._tile(q0, q1, k0, k1), self.right._tile(q0, q1, k0, k1)
        return min(left, right) if type(q0) is int else np.minimum(left, right)


class Or(Join):
    """Visible where either mask is: the maximum of two answers."""

    _sign, _strength = "|", 1

    def _sees(self, q: Positions, k: Positions) -> Any:
        return self.left._sees(q, k) | self.right._sees(q, k)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        left, right = self.left._tile(q0, q1, k0, k1), self.right._tile(q0, q1, k0, k1)
        return max(left, right) if type(q0) is int else np.maximum(left, right)


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Visible where the other mask is not: EMPTY and FULL swap."""

    inner: Mask

    def __post_init__(self) -> None:
        _limit(self, self.inner)
        object.__setattr__(self, "depends_on_query", self.inner.depends_on_query)
        object.__setattr__(self, "row_lengths", self.inner.row_lengths)

    @property
    def batch(self) -> tuple[int, ...]:
        return self.inner.batch

    def _sees(self, q: Positions, k: Positions) -> Any:
        visible = self.inner._sees(q, k)
        return not visible if isinstance(visible, bool) else ~visible

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return 2 - self.inner._tile(q0, q1, k0, k1)

    def _at(self, b: int, h: int) -> Mask:
        return Not(self.inner.at(b, h))

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        inner = _operand_text(self.inner, self._strength, arrays)
        return None if inner is None else f"~{inner}"


def _operand_text(mask: Mask, strength: int, arrays: list[Any] | None) -> str | None:
    """The text of an operand, in parentheses where it binds less strongly than ``strength``."""
    text = field_text(mask, arrays)
    return f"({text})" if text is not None and mask._strength < strength else text


def _limit(combined: Mask, *parts: Mask) -> None:
    """Store depth and size of a combination; reject one that is too deep to recurse through."""
    depth, size = 1 + max([part._depth for part in parts]), sum([part._size for part in parts])
    if depth > MAX_DEPTH or size > _MAX_SIZE:
        raise MaskError(
            f"mask: {size} masks under {depth} operators, one inside the other; at most {_MAX_SIZE} masks and "
            f"{MAX_DEPTH} operators can be joined.\nFix: one documents(ids), table(bools) or where(fn) instead."
        )
    object.__setattr__(combined, "_depth", depth)
    object.__setattr__(combined, "_size", size)


def _common_batch(left: Mask, right: Mask) -> tuple[int, ...]:
    """The batch of two masks together: sizes equal or 1, a mask without heads answers for all heads."""
    a, b = left.batch, right.batch
    if not a or not b:
        return a or b
    rank = max(len(a), len(b))
    sizes = []
    for m, n in zip(a + (1,) * (rank - len(a)), b + (1,) * (rank - len(b)), strict=True):
        if m != n and 1 not in (m, n):
            raise MaskError(f"{shown(left)} with {shown(right)}: their batches {a} and {b} do not fit together.")
        sizes.append(max(m, n))
    return tuple(sizes)


# The operators.


def _and(self: Mask, other: object) -> Mask:
    return And(self, _operand(other, "&"))


def _or(self: Mask, other: object) -> Mask:
    return Or(self, _operand(other, "|"))


def _sub(self: Mask, other: object) -> Mask:
    return And(self, Not(_operand(other, "-")))  # torch.compile traces classes, but not `~` of an object


def _operand(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    name = getattr(other, "__name__", None)
    if name in CONSTRUCTORS:
        raise MaskError(
            f"mask {sign} {name}: {name} is a function; the parentheses were forgotten.\nFix: {called(name)}."
        )
    raise MaskError(
        f"mask {sign} {type(other).__name__}: only masks can be joined.\n"
        "Fix: lowtri.table(bools) or lowtri.hidden(bools) for a table, lowtri.mask(text) for a text."
    )


Mask.__invert__ = lambda self: Not(self)  # type: ignore[method-assign]
for _name, _operator in (("and", _and), ("or", _or), ("sub", _sub)):
    setattr(Mask, f"__{_name}__", _operator)
    setattr(Mask, f"__r{_name}__", _operator)  # the left operand is not a mask: rejected, with the fix
