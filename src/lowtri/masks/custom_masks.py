"""Masks from a user's function, and masks with a separate mask for each query head."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.mask import Mask, constructor
from lowtri.masks.text import as_mask
from lowtri.masks.tile import Index, Interval, Truth, short_repr

_INT64 = 2**63 - 1
_WHOLE = 2**53  # a float64 does not hold all greater whole numbers
_LARGE = 2**50  # sums of a few smaller positions are below _WHOLE


@dataclass(frozen=True, repr=False)
class Where(Mask):
    """A user's formula. Of comparisons and sums its tile answers are known; other formulas are evaluated for every pair."""

    fn: Callable[[Any, Any], Any]

    def _sees(self, q: Index, k: Index) -> Any:
        if isinstance(q, Interval):
            with contextlib.suppress(Exception):  # whatever a user's function does with an interval
                if isinstance(truth := self.fn(_of_tile(q), _of_tile(k)), Truth):
                    return truth
            return Truth(False, True)
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
        try:
            with np.errstate(over="ignore"):  # of scalars, as of arrays
                visible = np.asarray(self.fn(_in_int64(q), _in_int64(k)))
        except ValueError as error:
            if "truth value" in str(error):
                raise MaskError(
                    "where: the formula uses a whole array as a condition. "
                    "Fix: write & | ~ instead of and, or, not, and np.where instead of if."
                ) from error
            raise
        except OverflowError as error:  # what NumPy raises depends on its version
            raise MaskError(
                "where: the formula has a number that does not fit into 64 bits, in which positions are computed.\n"
                "Fix: numbers below 2**63."
            ) from error
        except Exception as error:
            if not _involves_tensor(error):
                raise  # the formula's own
            raise MaskError(
                f"where: the formula mixes NumPy's arrays, which positions are, with a torch tensor: {short_repr(str(error), 90)}.\n"
                "Fix: tensor.numpy() for what the formula captures, made once outside of it."
            ) from error
        if visible.dtype != bool:
            raise MaskError(f"where: the formula gave {visible.dtype} values; it must give bools, True = may see.")
        try:
            visible = np.broadcast_to(visible, shape)
        except ValueError:
            raise MaskError(
                f"where: the formula gave shape {visible.shape} for positions that broadcast to {shape}. "
                "Fix: compute with q and k, element by element."
            ) from None
        return visible if shape else bool(visible)

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        if arrays is not None:
            return None
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"where(<{'formula' if name == '<lambda>' else name}>)"


def _involves_tensor(error: Exception) -> bool:
    """Whether an operation failed since one of its operands was a tensor of torch."""
    return isinstance(error, TypeError | NotImplementedError | RuntimeError) and any(
        word in str(error) for word in ("Tensor", "torch", "tensor", "_cpu")
    )


@constructor(in_text=False)
def where(fn: Callable[[Any, Any], Any]) -> Mask:
    """A mask defined by your own function ``fn(q, k)``, made of comparisons and arithmetic that work on NumPy arrays.

    >>> print(where(lambda q, k: (k <= q) & (k % 2 == 0)).draw(4))
    █···
    █···
    █·█·
    █·█·

    Args:
        fn: takes positions (ints, or integer arrays that broadcast) and returns bools, True = may see. It must be pure, since
            plans are cached.

    Positions are int64, whatever the dtype of NumPy's scalars in the formula. Floats are refused where positions exceed 2**53.

    Formulas of ``+ - // %``, comparisons and ``& | ~`` with whole numbers have tile answers: whole tiles are skipped, or need no
    mask. Any other formula is evaluated for every pair. Restrict it, where possible: ``window(n) & where(fn)``.

    Raises:
        MaskError: if ``fn`` is not callable or does not take two positions; on evaluation, if it does not return bools.

    FlexAttention's ``mask_mod(b, h, q, k)`` becomes ``where(lambda q, k: mask_mod(0, 0, q, k))``; if it differs by head, pass one
    such mask for each head to :func:`heads`.
    """
    if not callable(fn):
        raise MaskError(
            f"where: fn is {type(fn).__name__}; it takes a function of two positions. Fix: lowtri.table(bools)."
        )
    _check_two_positions(fn)
    try:
        hash(fn)
    except TypeError:
        raise MaskError(
            f"where: fn is {type(fn).__name__}, which cannot be hashed. Fix: give it __hash__, or wrap it in a function."
        ) from None
    return Where(fn)


# One number system. A user's formula may hold NumPy's scalars: a Python int with one of them has the scalar's dtype, and wraps in
# uint8. So positions of pairs are always int64 arrays, and the ends of a tile are computed as those are, or not at all.


def _in_int64(positions: Index) -> NDArray[np.int64]:
    array = np.asarray(positions, np.int64)
    return array.view(_LargePositions) if array.max(initial=0) >= _LARGE else array


class _LargePositions(np.ndarray[Any, np.dtype[Any]]):
    """Positions near or beyond those that floats can tell apart: floats that meet these raise."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]
        result = getattr(ufunc, method)(*arrays, **options)
        kinds = [np.asarray(x).dtype.kind for x in (*arrays, result)]
        if "f" in kinds or "c" in kinds:
            for x, kind in zip(map(np.asarray, arrays), kinds, strict=False):
                if kind in "iu" and x.size and max(-int(x.min()), int(x.max())) > _WHOLE:
                    raise MaskError(
                        f"where: the formula has floats, which cannot tell whole numbers beyond 2**53 apart; it met {x.max()}.\n"
                        "Fix: whole numbers, of Python or np.int64."
                    )
        return result.view(_LargePositions) if isinstance(result, np.ndarray) else result


def _of_tile(positions: Interval) -> _FormulaInterval:
    low, high = positions.low, positions.high
    return _FormulaInterval(low, high, Interval(int(np.min(low, initial=_INT64)), int(np.max(high, initial=0))))


class _FormulaInterval(Interval):
    """An interval in a user's formula. What pairs would compute otherwise raises, so that the tile is PARTIAL.

    Attributes:
        bounds: the least and the greatest end of all tiles, Python numbers: int64 wraps in arrays without a sign.
        is_float: whether the ends are float64.
    """

    __slots__ = ("bounds", "is_float")

    def __init__(self, low: Any, high: Any, bounds: Interval, is_float: bool = False) -> None:
        super().__init__(low, high)
        self.bounds, self.is_float = bounds, is_float
        if not is_float and not -_INT64 - 1 <= bounds.low <= bounds.high <= _INT64:
            raise TypeError("whole numbers beyond 64 bits")

    def _computed(self, other: Any, operation: Callable[[Any, Any], Interval]) -> _FormulaInterval:
        number = self._operand(other)
        result, bounds = operation(self._plain(), number._plain()), operation(self.bounds, number.bounds)
        return _FormulaInterval(result.low, result.high, bounds, self.is_float or number.is_float)

    def _compared(self, other: Any, operation: Callable[[Any, Any], Truth]) -> Truth:
        return operation(self._plain(), self._operand(other)._plain())

    def _plain(self) -> Interval:
        return Interval(self.low, self.high)

    def _operand(self, other: Any) -> _FormulaInterval:
        """The other side of an operation, where both are computed as for pairs."""
        number = other if isinstance(other, _FormulaInterval) else _constant(other)
        if self.is_float or number.is_float:
            for x in (self, number):
                if not x.is_float and max(-x.bounds.low, x.bounds.high) > _WHOLE:
                    raise TypeError("floats do not hold such whole numbers")
        return number

    def _divided(self, other: Any, operation: Callable[[Any, Any], Interval]) -> _FormulaInterval:
        number = _constant(other)
        if self.is_float or number.is_float:  # the remainders of floats have no greatest one
            raise TypeError("floats are not divided into whole parts")
        result, bounds = operation(self._plain(), number.low), operation(self.bounds, number.low)
        return _FormulaInterval(result.low, result.high, bounds)

    def __add__(self, other: Any) -> _FormulaInterval:
        return self._computed(other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> _FormulaInterval:
        return self._computed(other, operator.sub)

    def __rsub__(self, other: Any) -> _FormulaInterval:
        return self._computed(other, lambda a, b: b - a)

    def __floordiv__(self, n: Any) -> _FormulaInterval:
        return self._divided(n, operator.floordiv)

    def __mod__(self, n: Any) -> _FormulaInterval:
        return self._divided(n, operator.mod)

    def __le__(self, other: Any) -> Truth:
        return self._compared(other, operator.le)

    def __lt__(self, other: Any) -> Truth:
        return self._compared(other, operator.lt)

    def __ge__(self, other: Any) -> Truth:
        return self._compared(other, operator.ge)

    def __gt__(self, other: Any) -> Truth:
        return self._compared(other, operator.gt)

    def __eq__(self, other: object) -> Truth:  # type: ignore[override]
        return self._compared(other, operator.eq)

    __hash__ = None


def _constant(x: Any) -> _FormulaInterval:
    """A number of a formula as NumPy computes it with int64 positions: as int64, or as float64."""
    if isinstance(x, bool | np.bool_):
        raise TypeError("NumPy does not compute with bools as with numbers")
    if isinstance(x, int | np.integer) and not isinstance(x, np.uint64):
        return _FormulaInterval(int(x), int(x), Interval(int(x), int(x)))
    if isinstance(x, float | np.float16 | np.float32 | np.uint64):  # np.float64 is a float
        return _FormulaInterval(float(x), float(x), Interval(float(x), float(x)), is_float=True)
    raise TypeError(f"intervals are computed with plain numbers, not with {short_repr(x)}")


def _check_two_positions(fn: Callable[..., Any]) -> None:
    try:
        takes = inspect.signature(fn)
    except (TypeError, ValueError):  # some compiled functions have no signature
        return
    try:
        takes.bind(0, 0)
    except TypeError:
        fix = "where(lambda q, k: fn(...))"
        with contextlib.suppress(TypeError):
            takes.bind(0, 0, 0, 0)
            fix = (
                "where(lambda q, k: fn(0, 0, q, k)) for FlexAttention's (b, h, q, k); "
                "one of them for each head in heads([...]) where they differ"
            )
        raise MaskError(f"where: fn takes {takes}, but it is given two positions, (q, k).\nFix: {fix}.") from None


@dataclass(frozen=True, repr=False)
class Heads(Mask):
    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        rows = max([1, *[mask.batch[0] for mask in self.masks if mask.batch]])
        self._combine(self.masks, (rows, len(self.masks)), operators=0)

    def _for_row(self, b: int, h: int) -> Mask:
        return self.masks[h].for_row(b)


@constructor()
def heads(masks: Sequence[Mask | str]) -> Mask:
    """A separate mask for each query head.

    >>> from lowtri import causal, window
    >>> heads([causal(), window(2)]).dense(3).astype(int)[0, 1].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]

    Args:
        masks: one mask or its text for each of the H query heads, in order. Each may differ by batch row, but not by head.

    Raises:
        MaskError: if the list is empty, or a mask in it already differs by head.
    """
    try:
        # Arrays are rejected here: torch makes all rows of a tensor before the first one can be checked.
        entries = iter(() if isinstance(masks, str | Mask) or hasattr(masks, "dtype") else masks)
    except TypeError:
        entries = iter(())
    parts = tuple([as_mask(entry) for entry in entries])  # raises at the first that is not a mask
    if not parts:
        raise MaskError(f"heads: masks is {short_repr(masks)}, but it takes a list: one mask for each query head.")
    if any(len(part.batch) > 1 for part in parts):
        raise MaskError("heads: one of the masks differs by head already; it takes masks with batch () or (B,).")
    rows = {part.batch[0] for part in parts if part.batch} - {1}
    if len(rows) > 1:
        raise MaskError(f"heads: the masks have batches of {sorted(rows)} rows, which do not fit together.")
    return Heads(parts)
