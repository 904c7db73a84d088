"""A mask is a formula over positions: who may see whom.

``mask(q, k)`` is true when the query at position ``q`` may see the key at position ``k``. Everything else in lowtri is built
on one question with three answers, asked of a rectangle of positions: does nobody see anything there (EMPTY), does everybody
see everything (FULL), or must one look closer (PARTIAL)? The law: EMPTY and FULL never lie.

A subclass writes two formulas, ``_sees`` and ``_tile``, for positions that exist. What holds for every mask stands here, once:
negative positions (no token there), empty rectangles, the end of time, and one answer for each batch row and head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "EMPTY",
    "END",
    "FULL",
    "PARTIAL",
    "Answer",
    "Mask",
    "Positions",
    "Tile",
    "check_count",
    "default_positions",
    "first_position",
    "shown",
    "verdict",
]

END = 2**62
"""The end of time: later than any position, and small enough that sums of two stay inside int64."""

MOST_POSITIONS = 2**28  # written out one by one they are 2 GB
_ROWS_AT_ONCE = 2**22  # pairs of a table that are computed together: about 32 MB of intermediate numbers

Positions: TypeAlias = Any  # a Python int or a NumPy array of ints; formulas are written once for both
Answer: TypeAlias = Any  # 0, 1, 2 or an array of them


class Tile(IntEnum):
    """The three answers about a rectangle of positions. ``&`` of masks is their minimum, ``|`` their maximum."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


EMPTY, PARTIAL, FULL = Tile.EMPTY, Tile.PARTIAL, Tile.FULL
_TILES = (EMPTY, PARTIAL, FULL)  # a look-up is five times faster than Tile(answer)


def verdict(full: Any, empty: Any) -> Answer:
    """The answer from two facts that exclude each other; ints and arrays alike."""
    return 1 + full - empty


class Mask:
    """Who may see whom. Made by the functions of :mod:`lowtri.masks`, joined by ``&``, ``|``, ``~`` and ``-``.

    >>> from lowtri import causal, window, first
    >>> sinks = causal() & (window(2) | first(1))
    >>> sinks(5, 0), sinks(5, 3), sinks(5, 4)
    (True, False, True)
    >>> sinks.tile(4, 8, 1, 3)
    <Tile.EMPTY: 0>
    >>> print(sinks.draw(5))
    █····
    ██···
    ███··
    █·██·
    █··██

    Masks are values: immutable, equal when they are built alike, hashable, picklable. ``m.batch`` is ``()``, ``(B,)`` or
    ``(B, H)``; the answers of a batched mask carry it in front.
    """

    @property
    def batch(self) -> tuple[int, ...]:
        """``()``, ``(B,)`` or ``(B, H)``: for which batch rows and heads the mask differs."""
        return ()

    @property
    def asks_query(self) -> bool:
        """Whether the answer depends on where the query stands (``full``, ``first`` and ``keys`` do not ask)."""
        return True

    _depth = 0  # operators on the way to the deepest mask inside
    _joined = 1  # masks joined

    # What a subclass writes, for non-negative positions and non-empty rectangles.

    def _sees(self, q: Positions, k: Positions) -> Any:
        raise TypeError(f"{type(self).__name__} has no formula")

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        raise TypeError(f"{type(self).__name__} has no tile formula")

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions] | None:
        """Numbers such that tiles (nq, nk) with the same numbers hold the same pairs; None where nothing is known.

        Written for single masks only: a plan looks into joined masks itself.
        """
        return None

    def _at(self, b: int, h: int) -> Mask:
        return self

    # Asking.

    def __call__(self, q: Positions, k: Positions) -> Any:
        """True where the query at ``q`` may see the key at ``k``.

        Args:
            q, k: positions, ints or integer arrays that broadcast against each other. A negative position holds no token:
                it sees nothing and is seen by nobody, under any mask.

        Returns:
            a bool for two ints, else a bool array of shape ``m.batch + broadcast(q, k)``.

        Raises:
            MaskError: if the positions are no whole numbers.
        """
        if self.batch:
            return self._each(lambda one: one(q, k))
        q, k = _checked_positions(q), _checked_positions(k)
        seen = self._sees(q, k) & (q >= 0) & (k >= 0)
        return bool(seen) if type(q) is int and type(k) is int else seen

    def tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Any:
        """The question with three answers, for the queries ``q0 <= q < q1`` and the keys ``k0 <= k < k1``.

        >>> from lowtri import causal, END
        >>> causal().tile(0, 4, 4, 8), causal().tile(4, 8, 0, 5), causal().tile(0, 4, 0, 4)
        (<Tile.EMPTY: 0>, <Tile.FULL: 2>, <Tile.PARTIAL: 1>)

        Args:
            q0, q1, k0, k1: ints, or integer arrays that broadcast: many tiles at once. ``END`` and ``inf`` mean for ever.

        Returns:
            a :class:`Tile` for ints and an unbatched mask, else an int8 array of shape ``m.batch + broadcast``.
        """
        if self.batch:
            return self._each(lambda one: one.tile(q0, q1, k0, k1)).astype(np.int8)
        if type(q0) is int and type(q1) is int and type(k0) is int and type(k1) is int:
            if q0 < 0 or k0 < 0:  # the negative part holds no token, so the rest cannot be FULL
                return min(self.tile(max(q0, 0), q1, max(k0, 0), k1), PARTIAL)
            if q1 > END or k1 > END:  # later than END there is nothing, and other numbers may leave int64
                return self.tile(q0, min(q1, END), k0, min(k1, END))
            if q1 <= q0 or k1 <= k0:
                return EMPTY
            return _TILES[self._tile(q0, q1, k0, k1)]
        edges = [_edge(edge) for edge in (q0, q1, k0, k1)]
        if all(edge.ndim == 0 for edge in edges):
            return self.tile(*(int(edge) for edge in edges))
        q0, q1, k0, k1 = np.broadcast_arrays(*edges)
        missing = (q0 < 0) | (k0 < 0)
        q0, k0 = np.maximum(q0, 0), np.maximum(k0, 0)
        none = (q1 <= q0) | (k1 <= k0)
        # Formulas may look at the last position of a rectangle: give the empty ones a position to look at.
        answer = self._tile(q0, np.maximum(q1, q0 + 1), k0, np.maximum(k1, k0 + 1))
        answer = np.where(missing, np.minimum(answer, 1), answer)
        return np.where(none, 0, answer).astype(np.int8)

    def at(self, b: int = 0, h: int = 0) -> Mask:
        """The unbatched mask of batch row ``b`` and head ``h``; a mask that does not differ there answers for all."""
        if not self.batch:
            return self
        rows, heads = (*self.batch, 1)[:2]
        if not (0 <= b < rows or rows == 1) or not (0 <= h < heads or heads == 1):
            raise MaskError(f"at: batch row {b}, head {h} asked of a mask with batch {self.batch}.")
        return self._at(0 if rows == 1 else b, 0 if heads == 1 else h)

    def _each(self, ask: Callable[[Mask], Any]) -> NDArray[Any]:
        """Ask every batch row (and head) alone and put the answers side by side."""
        if len(self.batch) == 1:
            return np.stack([ask(self.at(b)) for b in range(self.batch[0])])
        rows, heads = self.batch
        return np.stack([np.stack([ask(self.at(b, h)) for h in range(heads)]) for b in range(rows)])

    # Tables.

    def dense(self, nq: int, nk: int | None = None) -> NDArray[np.bool_]:
        """The table of all pairs, True = may see.

        >>> from lowtri import causal
        >>> causal().dense(2, 3).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])

        Args:
            nq, nk: how many queries and keys; ``nk`` defaults to ``nq``. Keys stand at ``0 .. nk-1``, queries at the last
                ``nq`` of them, as in a call of attention.

        Returns:
            bool array, ``m.batch + (nq, nk)``.

        Raises:
            MaskError: if the table does not fit into memory.
        """
        q, k = default_positions(self, nq, nk)
        shape = (*self.batch, len(q), len(k))
        try:
            out = np.empty(shape, bool)
        except (MemoryError, ValueError):
            size = f"{float(math.prod(shape)):,.0f} bytes"
            raise MaskError(
                f"dense: a table of {shape} pairs takes {size}, which this machine does not give.\n"
                "Fix: pairs(), tile() and draw() need no table, and attention takes the mask itself."
            ) from None
        rows = max(1, _ROWS_AT_ONCE // max(1, len(k)))
        for at in range(0, len(q), rows):
            out[..., at : at + rows, :] = self(q[at : at + rows, None], k[None, :])
        return out

    def additive(
        self, nq: int, nk: int | None = None, *, dtype: Any = np.float32, hidden: float = -np.inf, like: Any = None
    ) -> Any:
        """The table to add to scores: 0 where visible, ``hidden`` where not.

        >>> from lowtri import causal
        >>> causal().additive(2, hidden=-1e9)
        array([[ 0.e+00, -1.e+09],
               [ 0.e+00,  0.e+00]], dtype=float32)

        Args:
            nq, nk: as in :meth:`dense`.
            dtype: a NumPy floating dtype.
            hidden: what stands at hidden pairs: -inf, or a large negative number.
            like: a torch tensor; the table then comes as a tensor of its dtype on its device.

        Raises:
            MaskError: if ``hidden`` is not negative, or is a number that the dtype does not have (-1e9 in float16).
        """
        if not isinstance(hidden, int | float | np.number) or not hidden < 0:
            raise MaskError(
                f"additive: hidden is {shown(hidden)}, but it must lie below 0 to hide anything. Fix: hidden=-inf."
            )
        values = np.where(self.dense(nq, nk), 0.0, hidden)
        if like is not None:
            kind, out = like.dtype, like.new_tensor(values)
        else:
            try:
                kind = np.dtype(dtype)
            except TypeError:
                raise MaskError(f"additive: dtype is {dtype}; it takes NumPy dtypes. Fix: like=tensor.") from None
            with np.errstate(over="ignore"):
                out = values.astype(kind)
        if np.isfinite(hidden) and bool((abs(out) == float("inf")).any()):
            raise MaskError(f"additive: {kind} has no {hidden:g}: it would become -inf. Fix: hidden=-inf, or -1e4.")
        return out

    def pairs(self, nq: int, nk: int | None = None) -> Any:
        """How many pairs are visible among ``nq`` queries and ``nk`` keys; an array over ``m.batch`` if there is one.

        >>> from lowtri import causal
        >>> causal().pairs(1_000_000)
        500000500000
        """
        from lowtri.masks.plan import plan

        def count(one: Mask) -> int:
            q, k = default_positions(one, nq, nk)
            return plan(one, q, k).pairs

        return self._each(count) if self.batch else count(self)

    def is_causal(self, n: int) -> bool:
        """Whether no query among the first ``n`` positions sees a later key, in any batch row and head.

        >>> from lowtri import first, window
        >>> window(4).is_causal(100), first(4).is_causal(100)
        (True, False)
        """
        from lowtri.masks.atoms import causal

        return not np.any((self - causal()).pairs(n))

    # Pictures.

    def draw(self, nq: int, nk: int | None = None, **options: Any) -> str:
        """The mask as text, a line for each query: see :func:`lowtri.masks.draw.draw`."""
        from lowtri.masks.draw import draw

        return draw(self, nq, nk, **options)

    def save(self, path: str | Path, nq: int = 16, nk: int | None = None, **options: Any) -> None:
        """The mask as an SVG picture in the file ``path``: see :func:`lowtri.masks.draw.save`."""
        from lowtri.masks.draw import save

        save(self, path, nq, nk, **options)

    def __str__(self) -> str:
        try:
            return f"{self!r}\n{self.draw(12)}"
        except MaskError:  # a table that is asked about places of its own only
            return repr(self)

    # Set operations.

    def __and__(self, other: object) -> Mask:
        return _joins().And(self, _operand(other, "&"))

    def __or__(self, other: object) -> Mask:
        return _joins().Or(self, _operand(other, "|"))

    def __sub__(self, other: object) -> Mask:
        return self & _operand(other, "-").__invert__()

    def __invert__(self) -> Mask:
        return _joins().Not(self)

    # An operand that is no mask stands on the left: refused, with the fix.

    def __rand__(self, other: object) -> Mask:
        return _operand(other, "&") & self

    def __ror__(self, other: object) -> Mask:
        return _operand(other, "|") | self

    def __rsub__(self, other: object) -> Mask:
        return _operand(other, "-") - self

    __array_ufunc__ = None  # array & mask comes here and is refused, instead of being tried element by element

    def __bool__(self) -> bool:
        raise MaskError(
            "a mask is neither true nor false: `m and n`, `m or n`, `not m` and `if m` would drop a mask in silence.\n"
            "Fix: write m & n, m | n, ~m; `m is None` asks whether there is one."
        )


def default_positions(mask: Mask, nq: int, nk: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where ``nq`` queries and ``nk`` keys stand when nobody says: keys at 0 .. nk-1, queries at the last nq of them.

    More queries than keys have no such place. Where the mask does not ask for the query's place they count from 0; else it
    has to be said, since two libraries mean two things by it.
    """
    start, nq, nk = first_position(mask, nq, nk)
    if max(nq, nk) > MOST_POSITIONS:
        raise MaskError(
            f"{nq} queries and {nk} keys: at most {MOST_POSITIONS} (2**28) positions are written out. "
            "Fix: tile() answers for rectangles of any size."
        )
    return np.arange(start, start + nq, dtype=np.int64), np.arange(nk, dtype=np.int64)


def first_position(mask: Mask, nq: int, nk: int | None = None) -> tuple[int, int, int]:
    """Where the first of ``nq`` queries stands, and the two numbers, checked; see :func:`default_positions`."""
    nq = check_count("mask", "nq, a number of queries,", nq)
    nk = nq if nk is None else check_count("mask", "nk, a number of keys,", nk)
    if nq > nk and mask.asks_query:
        raise MaskError(
            f"{nq} queries and {nk} keys under {shown(mask)}: the queries cannot stand at the last {nq} of {nk} keys.\n"
            "Fix: say where they stand, q_positions=range(nq) if query i stands beside key i."
        )
    return max(nk - nq, 0), nq, nk


def check_count(what: str, name: str, value: Any, least: int = 0) -> int:
    """A number of tokens, as a Python int between ``least`` and END."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise MaskError(f"{what}: {name} is {shown(value)}, but it counts tokens: a whole number, at least {least}.")
    if not least <= value <= END:
        raise MaskError(f"{what}: {name} is {shown(value)}, but it must lie in {least} .. END (2**62).")
    return int(value)


def shown(value: Any, longest: int = 60) -> str:
    """A value as an error shows it: short, whatever it is."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:  # Python refuses to print the largest ones
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _joins() -> Any:
    from lowtri.masks import joins

    return joins


def _operand(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise MaskError(
        f"mask {sign} {type(other).__name__}: only masks can be joined.\n"
        "Fix: lowtri.table(bools) or lowtri.hidden(bools) for a table, lowtri.mask(text) for a text."
    )


def _edge(edge: Any) -> NDArray[np.int64]:
    """One edge of a rectangle as int64; here, and only here, infinity is accepted and becomes END."""
    array = np.asarray(edge)
    if array.dtype.kind == "f" and np.all(array == np.floor(array)):
        return np.clip(array, -END, END).astype(np.int64)
    if array.dtype.kind not in "iu":
        raise MaskError(f"tile: an edge is {shown(edge)}, but positions are whole numbers (or inf).")
    return _int64(array)


def _checked_positions(positions: Positions) -> Positions:
    """Ints as they are, and arrays of any integers as int64, in which differences are right."""
    if type(positions) is int:
        return min(positions, END)
    if type(positions) is np.ndarray and positions.dtype == np.int64:
        return positions
    array = np.asarray(positions)
    if array.dtype.kind not in "iu":
        raise MaskError(
            f"mask: the positions are {shown(positions)}, but a position is a whole number.\n"
            "Fix: ints, or NumPy arrays of integers."
        )
    return _int64(array)


def _int64(array: NDArray[Any]) -> NDArray[np.int64]:
    """Unsigned numbers beyond int64 are later than END, not negative."""
    return np.minimum(array, np.uint64(END)).astype(np.int64) if array.dtype == np.uint64 else array.astype(np.int64)
