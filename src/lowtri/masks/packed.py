"""A mask as a text and the arrays it holds: the form in which a compiled or stored program carries it.

The text has placeholders, ``causal & documents(_0)``; the arrays may be NumPy's, or tensors that have no numbers yet, since a
program is only being traced. So ``pack`` looks at nothing but the structure of the mask, in plain Python that torch.compile can
follow.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lowtri.masks.formulas import Band, Chunks, First, Full, Strided
from lowtri.masks.grammar import read
from lowtri.masks.held import Heads, Held, KeyLengths, Keys, Table
from lowtri.masks.ids import Documents, Packed
from lowtri.masks.joins import And, Join, Not
from lowtri.masks.mask import Mask
from lowtri.masks.text import mask

__all__ = ["pack", "unpack"]


def pack(what: Mask) -> tuple[str | None, list[Any]]:
    """The text of a mask, and the arrays that its placeholders stand for; None where it holds a function of the user's.

    >>> from lowtri import causal, documents
    >>> pack(causal() & documents([0, 0, 1]))
    ('causal & documents(_0)', [array([0, 0, 1])])
    """
    arrays: list[Any] = []
    return _text(what, arrays), arrays


def unpack(text: str, arrays: Sequence[Any]) -> Mask:
    """The mask that ``pack`` was given: equal, and the same object for the same content.

    >>> from lowtri import causal, documents
    >>> mask = causal() & documents([0, 0, 1])
    >>> unpack(*pack(mask)) == mask
    True

    Raises:
        MaskError: if the text is none that ``pack`` writes.
    """
    global _last
    for known in _last:
        if known.text == text and known.holds(arrays):
            return known.mask
    held = tuple(Held(array) for array in arrays)
    _last = (_Unpacked(text, held, _unpacked(text, held)), *_last[:1])
    return _last[0].mask


@dataclass(frozen=True, eq=False)
class _Unpacked:
    text: str
    held: tuple[Held, ...]
    mask: Mask

    def holds(self, arrays: Sequence[Any]) -> bool:
        pairs = zip(self.held, arrays, strict=False)
        return len(self.held) == len(arrays) and all(
            a.array.dtype == b.dtype and np.array_equal(a.array, b) for a, b in pairs
        )


# The layers of a model ask for the same one or two masks in turns, and to compare a table costs a tenth of hashing it.
_last: tuple[_Unpacked, ...] = ()


@lru_cache(32)
def _unpacked(text: str, held: tuple[Held, ...]) -> Mask:
    return read(text, [one.array for one in held]) if held else mask(text)


def _text(mask: Mask, arrays: list[Any]) -> str | None:
    if isinstance(mask, Join):
        left, right = _operand(mask.left, arrays), _operand(mask.right, arrays)
        sign = " & " if isinstance(mask, And) else " | "
        return None if left is None or right is None else left + sign + right
    if isinstance(mask, Not):
        inner = _operand(mask.inner, arrays)
        return None if inner is None else "~" + inner
    if isinstance(mask, Heads):
        texts = [_text(one, arrays) for one in mask.masks]
        return None if None in texts else "heads([" + ", ".join([text for text in texts if text]) + "])"
    if isinstance(mask, Packed):
        return f"documents(lengths={_list(mask.lengths)})"
    if isinstance(mask, Documents):
        labels = _held(mask.ids, arrays)
        return f"documents({labels})" if mask.key_ids is None else f"documents({labels}, {_held(mask.key_ids, arrays)})"
    if isinstance(mask, Keys):
        return f"keys({_held(mask.valid, arrays)})"
    if isinstance(mask, Table):
        return f"table({_held(mask.pairs_, arrays)})"
    if isinstance(mask, KeyLengths):
        return f"keys(lengths={_list(mask.lengths)})"
    if isinstance(mask, Band):
        return mask.name
    for name, kind in (("first", First), ("chunks", Chunks), ("strided", Strided)):
        if isinstance(mask, kind):
            return f"{name}({operator.index(mask.n)})"
    return "full" if isinstance(mask, Full) else None


def _operand(mask: Mask, arrays: list[Any]) -> str | None:
    text = _text(mask, arrays)
    return f"({text})" if text is not None and isinstance(mask, Join) else text


def _held(held: Held, arrays: list[Any]) -> str:
    arrays.append(held.memory)
    return f"_{len(arrays) - 1}"


def _list(numbers: Sequence[int]) -> str:
    # index: while a program is traced a number may be symbolic; the text wants the number itself.
    return "[" + ", ".join([f"{operator.index(n)}" for n in numbers]) + "]"
