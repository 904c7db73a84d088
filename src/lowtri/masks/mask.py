"""Mask, the base class of all masks: tables, text, and the registry of functions that make masks by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.positions import shown
from lowtri.masks.tile import TileLaw, default_positions

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONSTRUCTORS", "Constructor", "Mask", "called", "constructor", "field_text"]

_PAIRS_AT_ONCE = 2**22  # of a table: about 32 MB of intermediate numbers
_Make = TypeVar("_Make", bound=Callable[..., Any])


class Constructor(NamedTuple):
    """A public function that makes masks."""

    make: Callable[..., Mask]
    in_text: bool  # whether texts of users may call it


CONSTRUCTORS: dict[str, Constructor] = {}
"""The functions that the text of a mask may call, by name."""


def constructor(in_text: bool = True) -> Callable[[_Make], _Make]:
    """Register a public function, unchanged, so that texts of masks (:func:`lowtri.mask`, serialisation) can call it by name.

    Args:
        in_text: False where its arguments cannot be written by a user: arrays, functions.
    """

    def register(make: _Make) -> _Make:
        CONSTRUCTORS[make.__name__] = Constructor(make, in_text)
        return make

    return register


def called(name: str) -> str:
    """The call of a constructor: `causal()`, `window(...)`."""
    return f"{name}({'...' if CONSTRUCTORS[name].make.__code__.co_argcount else ''})"


class Mask(TileLaw):
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

    _depth = 0  # the operators around the deepest mask inside
    _size = 1  # the masks inside
    _strength = 3  # how strongly its text binds: | 1, & 2, all others 3

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

    # Methods that lowtri/masks/__init__.py adds: they are defined in files that import this one.

    if TYPE_CHECKING:

        def pairs(self, nq: int, nk: int | None = None) -> Any:
            """How many pairs are visible: :func:`lowtri.masks.counts.pairs`."""

        def is_causal(self, n: int) -> bool:
            """Whether no query sees a later key: :func:`lowtri.masks.counts.is_causal`."""

        def draw(self, nq: int | None = None, nk: int | None = None, **options: Any) -> str:
            """The mask as text: :func:`lowtri.masks.draw.draw`."""

        def save(self, path: str | Path, nq: int | None = None, nk: int | None = None, **options: Any) -> None:
            """The mask as a file, .svg, .html, .png or .pdf: :func:`lowtri.masks.svg.save`."""

        def _repr_svg_(self) -> str | None:
            """What notebooks show."""

        def _repr_html_(self) -> str | None:
            """What notebooks show, with the mask's text."""

        def __and__(self, other: Mask) -> Mask: ...
        def __or__(self, other: Mask) -> Mask: ...
        def __sub__(self, other: Mask) -> Mask: ...
        def __invert__(self) -> Mask: ...

    # Pictures.

    def _extent(self) -> int:
        """How many positions show this mask: its greatest number and half as many again, all of its arrays and lists; of joined
        masks the most."""
        return max([0, *[_field_extent(getattr(self, field)) for field in self.__match_args__]])  # type: ignore[attr-defined]

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
        fields = [getattr(self, field) for field in self.__match_args__]  # type: ignore[attr-defined]
        texts = [field_text(value, arrays) for value in fields if value is not None]
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


def _field_extent(value: Any) -> int:
    """The positions that a field of a mask reaches; see :meth:`Mask._extent`."""
    if isinstance(value, Mask):
        return value._extent()
    if isinstance(value, FrozenArray):
        return int(value.array.shape[-1])
    if isinstance(value, tuple):
        return max(_field_extent(part) for part in value) if isinstance(value[0], Mask) else sum(value)
    return value + value // 2 if isinstance(value, int) else 0


def field_text(value: Any, arrays: list[Any] | None) -> str | None:
    """A field of a mask as text; see :meth:`Mask._text`."""
    if isinstance(value, FrozenArray):
        if arrays is None:
            return repr(value)
        arrays.append(value.memory)
        return f"_{len(arrays) - 1}"
    if isinstance(value, Mask):
        return repr(value) if arrays is None else value._text(arrays)
    if isinstance(value, tuple):
        texts = [field_text(entry, arrays) for entry in value]
        return None if None in texts else "[" + ", ".join([text for text in texts if text]) + "]"
    # index: while a program is traced a number may be symbolic; the text needs its value.
    return repr(value) if isinstance(value, bool) else f"{operator.index(value)}"
