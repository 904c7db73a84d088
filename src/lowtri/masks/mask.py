"""Mask: its answers for pairs and tiles, its tables, texts and operators; and the registry of functions that make masks by name.

``mask(q, k)`` is true when the query at position ``q`` may see the key at position ``k``. A kind of mask implements one formula,
``_sees``, for non-negative positions: ints, arrays, and the intervals of a tile. Mask adds what holds for every mask: negative
positions (no token), empty tiles, POSITION_MAX, and one answer for each batch row and head.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtri.compat import tracer
from lowtri.drawing import with_drawings
from lowtri.errors import MaskError
from lowtri.masks.arrays import FrozenArray, is_tensor
from lowtri.masks.positions import default_positions
from lowtri.masks.tile import (
    EMPTY,
    FULL,
    PARTIAL,
    POSITION_MAX,
    TILE_ANSWERS,
    Index,
    Interval,
    checked_edge,
    checked_positions,
    short_repr,
)

if TYPE_CHECKING:
    from pathlib import Path

MAX_DEPTH = 100  # operators inside operators: every question recurses through them
_MAX_SIZE = 1000  # masks under all operators together
_PAIRS_AT_ONCE = 2**22  # of a table: about 32 MB of intermediate numbers
_Make = TypeVar("_Make", bound=Callable[..., Any])


CONSTRUCTORS: dict[str, Callable[..., Mask]] = {}
"""The public functions that make masks, by name: texts of masks call them."""
NOT_IN_TEXT: set[str] = set()
"""Those whose arguments a user cannot write in a text: arrays, functions."""


def constructor(in_text: bool = True) -> Callable[[_Make], _Make]:
    """Register a public function, unchanged, so that texts of masks (:func:`lowtri.mask`, serialisation) can call it by name.

    Args:
        in_text: False where its arguments cannot be written by a user: arrays, functions.
    """

    def register(make: _Make) -> _Make:
        CONSTRUCTORS[make.__name__] = make
        NOT_IN_TEXT.update([] if in_text else [make.__name__])
        return make

    return register


def called(name: str) -> str:
    """The call of a constructor: `causal()`, `window(...)`."""
    return f"{name}({'...' if CONSTRUCTORS[name].__code__.co_argcount else ''})"


@with_drawings
class Mask:
    """Which query may see which key. The functions of :mod:`lowtri.masks` make masks; ``&``, ``|``, ``~`` and ``-`` combine them.

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

    Masks are values: immutable, hashable, picklable, and equal if they are built in the same way. ``m.batch`` is ``()``, ``(B,)``
    or ``(B, H)``; the results of a batched mask have these dimensions in front.
    """

    operands: tuple[Mask, ...] = ()  # the masks that this one combines
    _batch: tuple[int, ...] = ()
    _rank = 1  # dimensions of a mask's arrays for one batch row and head
    _depth = 0  # the operators around the deepest mask inside
    _size = 1  # the masks inside
    _strength = 3  # how strongly its text binds: | 1, & 2, all others 3

    @property
    def batch(self) -> tuple[int, ...]:
        """``()``, ``(B,)`` or ``(B, H)``: for which batch rows and heads the mask differs."""
        return self._batch

    depends_on_query: bool = True
    """Whether the answer depends on the query's position (not for ``full``, ``first`` and ``keys``)."""

    @property
    def packed_totals(self) -> tuple[int, ...]:
        """The tokens of a row by each ``documents(lengths=...)`` of the mask that has an end; calls compare them with their keys."""
        return tuple([n for part in self.operands for n in part.packed_totals])

    def _fields(self) -> list[Any]:
        return [getattr(self, name) for name in self.__match_args__]  # type: ignore[attr-defined]

    def __post_init__(self) -> None:
        """Derive operands, batch, depth and flags from the fields of the dataclass."""
        fields = self._fields()
        operands = [x for x in fields if isinstance(x, Mask)]
        if operands:
            self._combine(operands, _common_batch(operands[0], operands[-1]))
        elif fields and isinstance(fields[0], FrozenArray):
            object.__setattr__(self, "_batch", fields[0].array.shape[: -self._rank])

    def _combine(self, parts: Sequence[Mask], batch: tuple[int, ...], operators: int = 1) -> None:
        """Derive operands, batch, depth and flags from the parts of a mask; reject one whose operators are too deep to recurse through.

        Args:
            operators: 1 for an operator; 0 for a list of masks, of which one answers for each head.
        """
        # Lists: torch.compile does not follow max() of a generator.
        depth = operators + max([part._depth for part in parts])
        sizes = [part._size for part in parts]
        size = sum(sizes) if operators else max(sizes)
        if depth > MAX_DEPTH or size > _MAX_SIZE:
            raise MaskError(
                f"mask: {size} masks under {depth} operators, one inside the other; at most {_MAX_SIZE} masks and "
                f"{MAX_DEPTH} operators can be joined.\nFix: one documents(ids), table(bools) or where(fn) instead."
            )
        object.__setattr__(self, "operands", tuple(parts))
        object.__setattr__(self, "_batch", batch)
        object.__setattr__(self, "_depth", depth)
        object.__setattr__(self, "_size", size)
        object.__setattr__(self, "depends_on_query", any([part.depends_on_query for part in parts]))

    # What a subclass implements, for non-negative positions.

    def _sees(self, q: Index, k: Index) -> Any:
        """Whether queries at ``q`` see keys at ``k``: a bool, an array of bools, or a :class:`Truth` for intervals."""
        raise TypeError(f"{type(self).__name__} has no formula")

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index] | None:
        """Numbers such that tiles (nq, nk) with the same numbers hold the same pairs; None where that is unknown.

        For single masks only: plans combine the patterns of joined masks themselves.
        """
        return None

    def _packed(self, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        """All pairs of the queries ``q`` (Nq,) and keys ``k`` (Nk,) as bits, where that takes less time than to ask tile by tile.

        (rows, Nk): a word for each key and 64 queries, bit i is the row's query i, and 0 past the last query.
        """
        return None

    @property
    def for_plan(self) -> Mask:
        """A mask with the same pairs, whose parts a plan joins more cheaply than it evaluates this one."""
        return self

    def _for_row(self, b: int, h: int) -> Mask:
        """The mask of a batch row and head, for a mask with a batch: that of its fields there."""
        leading = (b, h)
        index = leading[: len(self.batch)]
        parts = [x.for_row(b, h) if isinstance(x, Mask) else x for x in self._fields()]
        return type(self)(*[FrozenArray(x.array[index]) if isinstance(x, FrozenArray) else x for x in parts])

    # Answers for any positions.

    def __call__(self, q: Index, k: Index) -> Any:
        """True where the query at ``q`` may see the key at ``k``.

        Args:
            q, k: positions, ints or integer arrays that broadcast against each other. A negative position means no token:
                under every mask it sees no key, and no query sees it.

        Returns:
            a bool for two ints, else a bool array of shape ``m.batch + broadcast(q, k)``.

        Raises:
            MaskError: if the positions are not whole numbers.
        """
        if self.batch:
            return self._each(lambda row: row(q, k))
        q = checked_positions(q)
        k = checked_positions(k)
        visible = self._sees(q, k) & (q >= 0) & (k >= 0)
        return bool(visible) if type(q) is int and type(k) is int else visible

    def visible_unchecked(self, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``m(q, k)`` of an unbatched mask without the checks, which take a generated token longer than the comparison itself.

        Args:
            q, k: (Nq, 1) and (1, Nk). The answer at a negative position has no meaning.
        """
        visible: NDArray[np.bool_] = self._sees(q, k)
        shape = len(q), k.shape[1]
        return visible if visible.shape == shape else np.broadcast_to(visible, shape)

    def tile(self, q0: Index, q1: Index, k0: Index, k1: Index) -> Any:
        """EMPTY, PARTIAL or FULL for the queries ``q0 <= q < q1`` and the keys ``k0 <= k < k1``.

        >>> from lowtri import causal
        >>> causal().tile(0, 4, 4, 8), causal().tile(4, 8, 0, 5), causal().tile(0, 4, 0, 4)
        (<Tile.EMPTY: 0>, <Tile.FULL: 2>, <Tile.PARTIAL: 1>)

        Args:
            q0, q1, k0, k1: ints, or, for many tiles at once, integer arrays that broadcast. ``POSITION_MAX`` and ``inf`` mean no end.

        Returns:
            a :class:`Tile` for ints and an unbatched mask, else an int8 array of shape ``m.batch + broadcast``.
        """
        if self.batch:
            return self._each(lambda row: row.tile(q0, q1, k0, k1)).astype(np.int8)
        if type(q0) is int and type(q1) is int and type(k0) is int and type(k1) is int:
            if q0 < 0 or k0 < 0:  # the negative part holds no token, so the rest cannot be FULL
                return min(self.tile(max(q0, 0), q1, max(k0, 0), k1), PARTIAL)
            if q1 > POSITION_MAX or k1 > POSITION_MAX:  # positions end there, and larger numbers may leave int64
                return self.tile(q0, min(q1, POSITION_MAX), k0, min(k1, POSITION_MAX))
            if q1 <= q0 or k1 <= k0:
                return EMPTY
            visible = self._sees(Interval(q0, q1 - 1), Interval(k0, k1 - 1))
            return TILE_ANSWERS[int(visible.every) + int(visible.some)]
        edges = [checked_edge(edge) for edge in (q0, q1, k0, k1)]
        if all(edge.ndim == 0 for edge in edges):
            return self.tile(*(int(edge) for edge in edges))
        arrays = np.broadcast_arrays(*edges)
        q0, q1 = arrays[:2]
        k0, k1 = arrays[2:]
        has_negative = (q0 < 0) | (k0 < 0)
        q0 = np.maximum(q0, 0)
        k0 = np.maximum(k0, 0)
        no_pairs = (q1 <= q0) | (k1 <= k0)
        # Intervals have at least one position; the answers for tiles without pairs are replaced.
        visible = self._sees(Interval(q0, np.maximum(q1 - 1, q0)), Interval(k0, np.maximum(k1 - 1, k0)))
        answer = np.add(visible.every, visible.some, dtype=np.int8)
        answer = np.where(has_negative, np.minimum(answer, PARTIAL), answer)
        return np.where(no_pairs, EMPTY, answer).astype(np.int8)

    def full_unchecked(self, q_low: int, q_high: int, k_low: int, k_high: int) -> bool:
        """Whether the tile of these queries and keys, all at 0 or later, the last ones included, is FULL, of a mask without batch."""
        return self.tile(q_low, q_high + 1, k_low, k_high + 1) is FULL

    def for_row(self, b: int = 0, h: int = 0) -> Mask:
        """The unbatched mask of batch row ``b`` and head ``h``; a mask that does not differ there answers for all."""
        if not self.batch:
            return self
        rows = self.batch[0]
        heads = self.batch[1] if len(self.batch) > 1 else 1
        if not (0 <= b < rows or rows == 1) or not (0 <= h < heads or heads == 1):
            raise MaskError(
                f"for_row: got batch row {b}, head {h}; the mask has the batch {self.batch}. "
                f"Fix: a row from 0 to {rows - 1}, a head from 0 to {heads - 1}."
            )
        row = 0 if rows == 1 else b
        head = 0 if heads == 1 else h
        index = (row, head)
        if index not in self._unbatched:
            self._unbatched[index] = self._for_row(*index)
        return self._unbatched[index]

    @cached_property
    def _unbatched(self) -> dict[tuple[int, int], Mask]:
        """The masks of single batch rows and heads that were used, kept because their indices and plans are."""
        return {}

    def _each(self, function: Callable[[Any], Any]) -> NDArray[Any]:
        """The function's results for the unbatched masks of all batch rows and heads, ``m.batch + ...``."""
        results = np.stack([function(self.for_row(*index)) for index in np.ndindex(self.batch)])
        return results.reshape(*self.batch, *results.shape[1:])

    # Tables.

    def dense(self, nq: int, nk: int | None = None) -> NDArray[np.bool_]:
        """The table of all pairs, True = may see.

        >>> from lowtri import causal
        >>> causal().dense(2, 3).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])

        Args:
            nq, nk: how many queries and keys; ``nk`` defaults to ``nq``. Keys are at positions ``0 .. nk-1``, queries at the last
                ``nq`` of these, as in a call of attention.

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
                f"dense: a table of {shape} pairs takes {size}, which is more than this machine has.\n"
                "Fix: pairs(), tile() and draw() need no table, and attention takes the mask itself."
            ) from None
        rows = max(1, _PAIRS_AT_ONCE // max(1, len(k)))
        for row in range(0, len(q), rows):
            out[..., row : row + rows, :] = self(q[row : row + rows, None], k[None, :])
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
            hidden: the value at hidden pairs: -inf, or a large negative number.
            like: a torch tensor; the table is then a tensor of its dtype on its device.

        Raises:
            MaskError: if ``hidden`` is not negative, or is a finite number outside the dtype's range (-1e9 in float16).
        """
        if not isinstance(hidden, int | float | np.number) or not hidden < 0:
            raise MaskError(
                f"additive: hidden is {short_repr(hidden)}, but it must lie below 0 to hide anything. Fix: hidden=-inf."
            )
        values = np.where(self.dense(nq, nk), 0.0, hidden)
        if like is not None and not is_tensor(like):
            raise MaskError(
                f"additive: like is {short_repr(like)}; expected a torch tensor. Fix: dtype= for a NumPy table."
            )
        if like is not None:
            kind = like.dtype
            out = like.new_tensor(values)
        else:
            try:
                kind = np.dtype(dtype)
            except (TypeError, ValueError):
                raise MaskError(
                    f"additive: dtype is {short_repr(dtype)}; it takes NumPy dtypes. Fix: like=tensor."
                ) from None
            with np.errstate(over="ignore"):
                out = values.astype(kind)
        if np.isfinite(hidden) and bool((abs(out) == float("inf")).any()):
            raise MaskError(f"additive: {kind} has no {hidden:g}: it would become -inf. Fix: hidden=-inf, or -1e4.")
        return out

    # Methods that lowtri/masks/__init__.py adds: they are defined in files that import this one.

    if TYPE_CHECKING:

        def pairs(self, nq: int, nk: int | None = None) -> Any:
            """How many pairs are visible: :func:`lowtri.masks.plan.pairs`."""

        def is_causal(self, n: int) -> bool:
            """Whether no query sees a later key: :func:`lowtri.masks.plan.is_causal`."""

    # Methods of lowtri.pictures.masks, which knows this file.

    if TYPE_CHECKING:

        def draw(self, nq: int | None = None, nk: int | None = None, **options: Any) -> str:
            """The mask as text: :func:`lowtri.pictures.masks.draw`."""

        def save(self, path: str | Path, nq: int | None = None, nk: int | None = None, **options: Any) -> None:
            """The mask as a file, .svg, .html, .png or .pdf: :func:`lowtri.pictures.masks.save`."""

        def _repr_svg_(self) -> str | None:
            """What notebooks show."""

        def _repr_html_(self) -> str | None:
            """What notebooks show, with the mask's text."""

    def _extent(self) -> int:
        """How many positions show this mask: its greatest number and half as many again, all of its arrays and lists; of joined
        masks the most."""
        return max([0, *[_field_extent(x) for x in self._fields()]])

    # Text.

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        """The call that makes this mask, ``window(4)``: its class in lower case, and the fields of its dataclass.

        Args:
            arrays: if given, arrays are appended to it and written as ``_0, _1, ...``; else as shape and digest.

        Returns:
            the text; None if no text can say this mask (it holds a function, or has no public constructor).
        """
        name = type(self).__name__.lower()
        if name not in CONSTRUCTORS:
            return None
        texts = [field_text(value, arrays) for value in self._fields() if value is not None]
        if None in texts:
            return None
        return f"{name}({', '.join([text for text in texts if text])})" if texts else name

    def __repr__(self) -> str:
        return self._text() or object.__repr__(self)

    def __str__(self) -> str:
        try:
            return f"{self!r}\n{self.draw()}"
        except MaskError:  # tables of different sizes
            return repr(self)

    __array_ufunc__ = None  # NumPy then leaves array & mask to __rand__, instead of applying it element by element

    def __bool__(self) -> bool:
        raise MaskError(
            "a mask is neither true nor false: `m and n`, `m or n`, `not m` and `if m` would silently drop a mask.\n"
            "Fix: write m & n, m | n, ~m; `m is None` tests for a missing mask."
        )

    # Operators.

    def __and__(self, other: Mask) -> Mask:
        return And(self, _operand(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _operand(other, "|"))

    def __sub__(self, other: Mask) -> Mask:
        return And(self, Not(_operand(other, "-")))  # torch.compile traces classes, but not `~` of an object

    def __invert__(self) -> Mask:
        return Not(self)

    # The left operand is not a mask: rejected, with the fix.
    __rand__ = __and__
    __ror__ = __or__
    __rsub__ = __sub__


def _field_extent(value: Any) -> int:
    """The positions that a field of a mask reaches; see :meth:`Mask._extent`."""
    if isinstance(value, Mask):
        return value._extent()
    if isinstance(value, FrozenArray):
        return int(value.array.shape[-1])
    if isinstance(value, tuple):
        return max(_field_extent(part) for part in value) if isinstance(value[0], Mask) else sum(value)
    return value + value // 2 if isinstance(value, int) else 0


def array_text(value: Any, arrays: list[Any]) -> str:
    """The placeholder of an array or a number, which is appended to ``arrays``."""
    arrays.append(value)
    return f"_{len(arrays) - 1}"


def field_text(value: Any, arrays: list[Any] | None) -> str | None:
    """A field of a mask as text; see :meth:`Mask._text`."""
    if isinstance(value, FrozenArray):
        if arrays is None:
            return repr(value)
        return array_text(value.memory, arrays)
    if isinstance(value, Mask):
        return repr(value) if arrays is None else value._text(arrays)
    if isinstance(value, tuple):
        texts = [field_text(entry, arrays) for entry in value]
        return None if None in texts else "[" + ", ".join([text for text in texts if text]) + "]"
    if isinstance(value, bool):
        return repr(value)
    if arrays is not None and tracer() == "compile":  # a program then serves other numbers, too
        return array_text(value, arrays)
    return f"{operator.index(value)}"


def quoted(inner: Mask, arrays: list[Any] | None) -> str | None:
    """A mask as an argument of another mask's text, in quotes, as Python takes it; quotes inside of quotes are left out."""
    text = field_text(inner, arrays)
    return None if text is None else '"' + text.replace('"', "") + '"'


@dataclass(frozen=True, repr=False)
class Join(Mask):
    """Two masks joined; a mask without heads answers for all heads, one without batch for all rows."""

    left: Mask
    right: Mask
    _sign = ""

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        left = _operand_text(self.left, self._strength, arrays)
        right = _operand_text(self.right, self._strength + 1, arrays)
        return None if left is None or right is None else f"{left} {self._sign} {right}"


class And(Join):
    """Visible where both masks are."""

    _sign = "&"
    _strength = 2

    def _sees(self, q: Index, k: Index) -> Any:
        return self.left._sees(q, k) & self.right._sees(q, k)


class Or(Join):
    """Visible where either mask is."""

    _sign = "|"
    _strength = 1

    def _sees(self, q: Index, k: Index) -> Any:
        return self.left._sees(q, k) | self.right._sees(q, k)


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Visible where the other mask is not."""

    inner: Mask

    def _sees(self, q: Index, k: Index) -> Any:
        visible = self.inner._sees(q, k)
        return not visible if isinstance(visible, bool) else ~visible

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        inner = _operand_text(self.inner, self._strength, arrays)
        return None if inner is None else f"~{inner}"


def _operand_text(mask: Mask, strength: int, arrays: list[Any] | None) -> str | None:
    """The text of an operand, in parentheses where it binds less strongly than ``strength``."""
    text = field_text(mask, arrays)
    return f"({text})" if text is not None and mask._strength < strength else text


def _common_batch(left: Mask, right: Mask) -> tuple[int, ...]:
    """The batch of two masks together: sizes equal or 1, a mask without heads answers for all heads."""
    a = left.batch
    b = right.batch
    if a and b:
        if len(a) < len(b):
            a = (*a, 1)
        elif len(b) < len(a):
            b = (*b, 1)
        if any([m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)]):
            raise MaskError(
                f"{short_repr(left)} with {short_repr(right)}: their batches {left.batch} and {right.batch} do not fit together."
            )
        return tuple([max(m, n) for m, n in zip(a, b, strict=True)])
    return a or b


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
