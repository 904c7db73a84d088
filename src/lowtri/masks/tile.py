"""Positions, and the three answers of a mask for a tile, which is a rectangle of queries and keys; the checks of users' positions.

The answers are EMPTY (no query sees any key), FULL (every query sees every key), PARTIAL (anything else). EMPTY and FULL must never
be wrong; PARTIAL is always allowed.

They are those of a mask's formula for pairs, evaluated on the range of the queries and the range of the keys (interval arithmetic):

>>> q, k = Interval(4, 7), Interval(0, 3)
>>> k <= q, k > q
(Truth(every=True, some=True), Truth(every=False, some=False))
>>> q - k, (q - k) % 4 == 0
(Interval(1, 7), Truth(every=False, some=True))
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.compat import integer_of, is_fixed, is_surely, tracer
from lowtri.errors import CallError, MaskError

POSITION_MAX = 2**62
"""Greater than any position, and small enough that the sum of two fits into int64. As the end of a tile it means no end."""

MAX_POSITIONS = 2**28  # positions in one array: 2 GB

Index: TypeAlias = Any  # a Python int, a NumPy array of ints, or an Interval of these: a formula takes all


def check_count(function: str, name: str, value: Any, least: int = 0) -> int:
    """A number of tokens, as a Python int between ``least`` and POSITION_MAX.

    Raises:
        MaskError: if it is not a whole number of that range; the message names ``function`` and its argument ``name``,
            which may be explained after a comma. One that a program computes from a tensor is checked when the program runs.
    """
    value = integer_of(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise MaskError(
            f"{function}: {name} is {short_repr(value)}, but it counts tokens: a whole number, at least {least}."
        )
    if is_surely(value < least) or is_surely(value > POSITION_MAX):
        raise MaskError(
            f"{function}: {name} is {short_repr(value)}, but it must lie in {least} .. 2**62. Fix: {name.split(',')[0]}={least}."
        )
    return int(value)


def check_flag(where: str, name: str, value: Any, error: type[Exception] = CallError) -> bool:
    """A switch as a bool: True or False, NumPy's own, 1 or 0, or None for False.

    Raises:
        error: for anything else, also an array, whose truth is that of its entries.
    """
    if value is None or isinstance(value, bool | np.bool_) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise error(f"{where}: {name} is {short_repr(value)}; expected True or False.")


def _numbers(where: str, name: str, value: Any) -> NDArray[Any]:
    """The numbers of a list, an array or a tensor."""
    try:
        return np.asarray(value)
    except (
        Exception
    ):  # a tensor on the device meta or of a sparse layout, rows of different lengths: their classes vary
        raise MaskError(
            f"{where}: {name} is {short_repr(value)}, whose numbers cannot be read.\n"
            "Fix: ints, or a NumPy array or dense tensor of integers."
        ) from None


def checked_edge(edge: Any) -> NDArray[np.int64]:
    """One edge of a tile as int64. Infinity is accepted, as POSITION_MAX."""
    array = _numbers("tile", "an edge", edge)
    if array.dtype.kind == "f" and np.all(array == np.floor(array)):
        return np.clip(array, -POSITION_MAX, POSITION_MAX).astype(np.int64)
    if array.dtype.kind not in "iu":
        raise MaskError(f"tile: an edge is {short_repr(edge)}, but positions are whole numbers (or inf).")
    return _int64(array)


def checked_positions(positions: Index) -> Index:
    """Ints unchanged, arrays of any integers as int64: differences of unsigned integers would wrap."""
    if type(positions) is int:
        return min(positions, POSITION_MAX)
    if type(positions) is np.ndarray and positions.dtype == np.int64:
        return positions
    array = _numbers("mask", "a position", positions)
    if array.dtype.kind not in "iu":
        raise MaskError(
            f"mask: the positions are {short_repr(positions)}, but a position is a whole number.\n"
            "Fix: ints, or NumPy arrays of integers."
        )
    return _int64(array)


def _int64(array: NDArray[Any]) -> NDArray[np.int64]:
    """Unsigned numbers beyond int64 become POSITION_MAX instead of wrapping to negative ones."""
    if array.dtype == np.uint64:
        return np.minimum(array, np.uint64(POSITION_MAX)).astype(np.int64)
    return array.astype(np.int64)


def short_repr(value: Any, longest: int = 60) -> str:
    """A value as errors print it, at most ``longest`` characters."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:  # Python refuses to print the largest ones
        return f"a whole number of {value.bit_length()} bits"
    if tracer() and (not is_fixed(value) or hasattr(value, "dtype")):  # it has no numbers to print
        return f"{type(value).__name__} of a program that is traced"
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def within(positions: Index, n: int) -> Any:
    """Positions as indices of an array of n entries; later positions get the index of its last entry."""
    if type(positions) is int:
        return min(max(positions, 0), n - 1)
    if isinstance(positions, Interval):
        return Interval(within(positions.low, n), within(positions.high, n))
    return np.clip(positions, 0, n - 1)


def ascending(function: Callable[[Any], Any], x: Any) -> Any:
    """A function whose values do not decrease, of ints, arrays, or an Interval."""
    return Interval(function(x.low), function(x.high)) if isinstance(x, Interval) else function(x)


class Interval:
    """The least and the greatest value of a term over a tile: ints, or arrays of ints.

    The ends of a result may lie further apart than the values that occur, where a term occurs twice. Comparisons give a :class:`Truth`.
    Operations without such a rule raise TypeError: that the ends are bounds says nothing about bits of the numbers between them.
    """

    __slots__ = ("high", "low")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy's functions raise a TypeError

    def __init__(self, low: Any, high: Any) -> None:
        self.low = low
        self.high = high

    def __add__(self, other: Any) -> Interval:
        low, high = _ends(other)
        return Interval(self.low + low, self.high + high)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Interval:
        low, high = _ends(other)
        return Interval(self.low - high, self.high - low)

    def __rsub__(self, other: Any) -> Interval:
        low, high = _ends(other)
        return Interval(low - self.high, high - self.low)

    def __floordiv__(self, n: int) -> Interval:
        return Interval(self.low // _divisor(n), self.high // n)

    def __mod__(self, n: int) -> Interval:
        same = self.low // _divisor(n) == self.high // n  # else every remainder may occur
        return Interval(self.low % n * same, self.high % n * same + (n - 1) * (1 - same))

    def __le__(self, other: Any) -> Truth:
        low, high = _ends(other)
        return Truth(self.high <= low, self.low <= high)

    def __lt__(self, other: Any) -> Truth:
        low, high = _ends(other)
        return Truth(self.high < low, self.low < high)

    def __ge__(self, other: Any) -> Truth:
        low, high = _ends(other)
        return Truth(self.low >= high, self.high >= low)

    def __gt__(self, other: Any) -> Truth:
        low, high = _ends(other)
        return Truth(self.low > high, self.high > low)

    def __eq__(self, other: object) -> Truth:  # type: ignore[override]
        low, high = _ends(other)
        every = (self.low == self.high) & (low == high) & (self.low == low)
        return Truth(every, (self.low <= high) & (low <= self.high))

    def __ne__(self, other: object) -> Truth:  # type: ignore[override]
        return ~(self == other)

    def __bool__(self) -> bool:
        raise TypeError("an interval is neither true nor false")

    def __repr__(self) -> str:
        return f"Interval({self.low!r}, {self.high!r})"


class Truth:
    """Whether a condition holds for every pair of a tile, and whether it may hold for some pair: bools, or arrays of bools."""

    __slots__ = ("every", "some")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None

    def __init__(self, every: Any, some: Any) -> None:
        self.every = every
        self.some = some

    def __and__(self, other: Truth | bool) -> Truth:
        every, some = _truth(other)
        return Truth(self.every & every, self.some & some)

    def __or__(self, other: Truth | bool) -> Truth:
        every, some = _truth(other)
        return Truth(self.every | every, self.some | some)

    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> Truth:
        return Truth(self.some ^ True, self.every ^ True)

    def __eq__(self, other: object) -> bool:
        raise TypeError("conditions of a tile are joined by & | ~, not compared")

    def __bool__(self) -> bool:
        raise TypeError("a condition of a tile is neither true nor false")

    def __repr__(self) -> str:
        return f"Truth(every={self.every!r}, some={self.some!r})"


def _ends(x: Any) -> tuple[Any, Any]:
    if isinstance(x, Interval):
        return x.low, x.high
    if isinstance(x, (int, float, np.number)):
        return x, x
    raise TypeError(f"intervals are compared with numbers, not with {short_repr(x)}")


def _truth(x: Any) -> tuple[Any, Any]:
    if isinstance(x, Truth):
        return x.every, x.some
    if isinstance(x, (bool, np.bool_)):
        return x, x
    raise TypeError(f"conditions of a tile are joined with conditions, not with {short_repr(x)}")


def _divisor(n: Any) -> int:
    if not isinstance(n, int) or n < 1:
        raise TypeError(f"intervals are divided by whole numbers of at least 1, not by {short_repr(n)}")
    return n


class TileAnswer(IntEnum):
    """The three answers for a tile, a rectangle of queries x keys: EMPTY (no visible pair), FULL (every pair), PARTIAL (otherwise)."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2

    def __repr__(self) -> str:
        return f"<Tile.{self.name}: {self.value}>"  # its public name


EMPTY = TileAnswer.EMPTY
PARTIAL = TileAnswer.PARTIAL
FULL = TileAnswer.FULL
TILE_ANSWERS = (EMPTY, PARTIAL, FULL)
"""By number: a look-up is five times faster than ``TileAnswer(number)``."""
