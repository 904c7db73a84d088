"""Masks from a user's function, and masks with a separate mask for each query head."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtri.errors import MaskError
from lowtri.masks.mask import Mask, constructor
from lowtri.masks.text import as_mask
from lowtri.masks.tile import Interval, Positions, Truth, shown

_EXACT = 2**31  # sums of a few smaller positions fit into 64 bits


def _python_ints(x: Any) -> Any:
    return x if isinstance(x, int) else x.astype(object)


def _bools(x: Any) -> Any:
    return x if isinstance(x, bool) else np.asarray(x, bool)


@dataclass(frozen=True, repr=False)
class Where(Mask):
    """A user's formula. Of comparisons and sums its tile answers are known; other formulas are evaluated for every pair."""

    fn: Callable[[Any, Any], Any]

    def _sees(self, q: Positions, k: Positions) -> Any:
        if isinstance(q, Interval):
            # Sums of positions that stand for "any later one" exceed 64 bits; Python's ints do not overflow.
            exact = max(np.max(x.high, initial=0) for x in (q, k)) < _EXACT
            ends = (q, k) if exact else tuple(Interval(_python_ints(x.low), _python_ints(x.high)) for x in (q, k))
            with contextlib.suppress(Exception):  # whatever a user's function does with an Interval
                if isinstance(truth := self.fn(*ends), Truth):
                    return truth if exact else Truth(_bools(truth.every), _bools(truth.some))
            return Truth(False, True)
        try:
            visible = np.asarray(self.fn(q, k))
        except ValueError as error:
            if "truth value" in str(error):
                raise MaskError(
                    "where: the formula uses a whole array as a condition. "
                    "Fix: write & | ~ instead of and, or, not, and np.where instead of if."
                ) from error
            raise
        if visible.dtype != bool:
            raise MaskError(f"where: the formula gave {visible.dtype} values; it must give bools, True = may see.")
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
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

    def _at(self, b: int, h: int) -> Mask:
        return self.masks[h].at(b)


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
        raise MaskError(f"heads: masks is {shown(masks)}, but it takes a list: one mask for each query head.")
    if any(len(part.batch) > 1 for part in parts):
        raise MaskError("heads: one of the masks differs by head already; it takes masks with batch () or (B,).")
    rows = {part.batch[0] for part in parts if part.batch} - {1}
    if len(rows) > 1:
        raise MaskError(f"heads: the masks have batches of {sorted(rows)} rows, which do not fit together.")
    return Heads(parts)
