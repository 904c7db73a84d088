"""A mask from its text, or from a user's argument. The text of a mask is its ``repr``.

Operators have Python's precedence: ``-`` binds tighter than ``&``, and ``&`` tighter than ``|``; see
:mod:`lowtri.masks.grammar`.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from lowtri.compat.torch_marks import constant_while_traced
from lowtri.errors import MaskError
from lowtri.masks.arrays import in_numpy
from lowtri.masks.grammar import read
from lowtri.masks.mask import CONSTRUCTORS, Mask, called
from lowtri.masks.tile import shown

__all__ = ["as_mask", "mask"]

MAX_LENGTH = 65_536  # characters: enough for the lengths of ten thousand documents


def mask(text: str | Mask) -> Mask:
    """A mask from its text.

    >>> mask("causal & (window(4) | first(1))")
    causal & (window(4) | first(1))
    >>> mask("causal - documents(lengths=[2, 2])") == mask("causal & ~documents(lengths=[2, 2])")
    True

    Args:
        text: names of masks (``causal`` or ``causal()``), numbers and lists of them, joined by ``& | ~ -`` and parentheses.
            A mask is returned unchanged.

    Raises:
        MaskError: if the text is not such an expression; the message shows the part that is wrong.
    """
    if isinstance(text, Mask):
        return text
    if not isinstance(text, str):
        raise MaskError(
            f"mask: a text is expected, but {type(text).__name__} came. Fix: lowtri.table(bools) for a table."
        )
    if _is_traced():
        traced: Mask = getattr(_TRACED, _read_while_tracing(text))
        return traced
    return _parsed(text) if "[" in text else _cached(text)


def _parsed(text: str) -> Mask:
    if len(text) > MAX_LENGTH:
        raise MaskError(f"mask: the text has {len(text)} characters, but at most {MAX_LENGTH} are read.")
    try:
        return read(text)
    except RecursionError:  # the caller's own stack is nearly used up
        raise MaskError(f"mask: {shown(text)} nests deeper than Python's stack allows here.") from None


class _Traced:
    """Masks of texts in programs that torch.compile traces: an attribute for each of the newest ``_MAX_TRACED`` texts.

    A program whose text has been dropped is traced again, and its text read again.
    """


_TRACED, _MAX_TRACED = _Traced(), 1024


@constant_while_traced  # torch.compile can trace ordinary Python, but not the parser
def _read_while_tracing(text: str) -> str:
    """Read a text; returns the name of the attribute of ``_TRACED`` that holds its mask."""
    name = "_" + text.encode(errors="surrogatepass").hex()
    setattr(_TRACED, name, _parsed(text))
    while len(vars(_TRACED)) > _MAX_TRACED:
        delattr(_TRACED, next(iter(vars(_TRACED))))
    return name


def _is_traced() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


_cached = lru_cache(64)(_parsed)  # for texts without lists: their masks hold no arrays


def as_mask(value: Any, name: str = "mask") -> Mask:
    """The mask of a user's argument: a mask, or its text. Bare arrays are rejected, because True may mean either visible or hidden."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, str):
        return mask(value)
    if value is None:
        raise MaskError(
            f"{name}: a mask is required, but None came. Fix: lowtri.full() if every query may see every key."
        )
    function = getattr(value, "__name__", None)
    if function in CONSTRUCTORS:
        raise MaskError(f"{name}: {function} is a function; the parentheses were forgotten.\nFix: {called(function)}.")
    given = f"{name}: a bare {type(value).__name__}"
    if type(value).__name__ == "CausalBias":  # before torch 2.8 it raises where its dtype is read
        raise MaskError(f'{given} came. Fix: the mask "causal".')
    dtype = str(getattr(value, "dtype", ""))
    if "float" in dtype:
        raise MaskError(_float_error(given, value))
    m = "m" if "bool" in dtype or not dtype else "m != 0"
    raise MaskError(
        f"{given} came. True hides in many notebooks and in nn.MultiheadAttention, and shows in SDPA:\n"
        f"write lowtri.table({m}) if True = may see, lowtri.hidden({m}) if True = hidden."
    )


def _float_error(given: str, value: Any) -> str:
    """The error for an array of floats; its values distinguish flags, an additive mask and a bias."""
    numbers = "m" if _is_traced() else in_numpy("m", value)
    if not isinstance(numbers, str) and numbers.any():
        if np.isin(numbers, (0, 1)).all():
            return (
                f"{given} of zeros and ones came. Added to scores these would hide nothing.\n"
                "Fix: lowtri.table(m != 0) if 1 = may see, lowtri.hidden(m != 0) if 1 = hidden."
            )
        if ((numbers == 0) | (numbers <= -1000)).all():
            return (
                f"{given} of 0 and {numbers.min():g} came, which hides where it is added to scores.\n"
                'Fix: lowtri.table(m == 0) as the mask, or bias=m with the mask "full".'
            )
    return f"{given} of floats came. Fix: numbers to add to the scores belong in bias=."
