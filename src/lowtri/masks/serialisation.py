"""Serialisation: a mask as a text with placeholders, ``causal & documents(_0)``, and the list of their arrays.

Compiled and exported programs contain masks in this form. While a program is traced the arrays are tensors without values, so
``pack`` reads only the structure of the mask, in Python that torch.compile can trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lowtri.masks.arrays import FrozenArray
from lowtri.masks.grammar import read
from lowtri.masks.mask import Mask
from lowtri.masks.text import mask

__all__ = ["pack", "unpack"]


def pack(mask: Mask) -> tuple[str | None, list[Any]]:
    """The text of a mask, and the arrays of its placeholders; the text is None if the mask holds a user's function.

    >>> from lowtri import causal, documents
    >>> pack(causal() & documents([0, 0, 1]))
    ('causal & documents(_0)', [array([0, 0, 1])])
    """
    arrays: list[Any] = []
    return mask._text(arrays), arrays


def unpack(text: str, arrays: Sequence[Any]) -> Mask:
    """The mask that was packed; the same object for the same content, as long as it is cached.

    >>> from lowtri import causal, documents
    >>> mask = causal() & documents([0, 0, 1])
    >>> unpack(*pack(mask)) == mask
    True

    Raises:
        MaskError: if ``pack`` does not write such a text.
    """
    global _recent
    for unpacked in _recent:
        if unpacked.text == text and unpacked.equals(arrays):
            return unpacked.mask
    frozen = tuple(FrozenArray(array) for array in arrays)
    _recent = (_Unpacked(text, frozen, _unpack(text, frozen)), *_recent[:1])
    return _recent[0].mask


@dataclass(frozen=True, eq=False)
class _Unpacked:
    text: str
    arrays: tuple[FrozenArray, ...]
    mask: Mask

    def equals(self, arrays: Sequence[Any]) -> bool:
        return len(self.arrays) == len(arrays) and all(
            a.array.dtype == b.dtype and np.array_equal(a.array, b) for a, b in zip(self.arrays, arrays, strict=True)
        )


# The layers of a model alternate between one or two masks, and comparing an array costs a tenth of hashing it.
_recent: tuple[_Unpacked, ...] = ()


@lru_cache(32)
def _unpack(text: str, frozen: tuple[FrozenArray, ...]) -> Mask:
    return read(text, [array.array for array in frozen]) if frozen else mask(text)
