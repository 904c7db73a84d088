"""A mask from text, and back: the text of a mask is its ``repr``.

The grammar is Python's own, so ``-`` binds tighter than ``&``, and ``&`` tighter than ``|``; it is read in
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
from lowtri.masks.mask import Mask
from lowtri.masks.positions import shown

__all__ = ["as_mask", "mask"]

LONGEST = 65_536  # characters: enough for the lengths of ten thousand documents


def mask(text: str | Mask) -> Mask:
    """The mask that a text says.

    >>> mask("causal & (window(4) | first(1))")
    causal & (window(4) | first(1))
    >>> mask("causal - documents(lengths=[2, 2])") == mask("causal & ~documents(lengths=[2, 2])")
    True

    Args:
        text: names of masks (``causal`` or ``causal()``), numbers and lists of them, joined by ``& | ~ -`` and parentheses.
            A mask is returned unchanged.

    Raises:
        MaskError: if the text is not such a formula; the message shows where.
    """
    if isinstance(text, Mask):
        return text
    if not isinstance(text, str):
        raise MaskError(
            f"mask: a text is expected, but {type(text).__name__} came. Fix: lowtri.table(bools) for a table."
        )
    if _is_traced():
        found: Mask = getattr(_TRACED, _read_while_tracing(text))
        return found
    return _parsed(text) if "[" in text else _formula(text)


def _parsed(text: str) -> Mask:
    if len(text) > LONGEST:
        raise MaskError(f"mask: the text has {len(text)} characters, but at most {LONGEST} are read.")
    try:
        return read(text)
    except RecursionError:  # the caller's own stack is nearly used up
        raise MaskError(f"mask: {shown(text)} nests deeper than Python's stack allows here.") from None


class _Traced:
    """Masks of texts in programs that torch.compile traces: an attribute for each of the newest ``_MOST_TRACED`` texts.

    A program whose text has been dropped is traced again, and its text read again.
    """


_TRACED, _MOST_TRACED = _Traced(), 1024


@constant_while_traced  # torch.compile can trace ordinary Python, but not the parser
def _read_while_tracing(text: str) -> str:
    """Read a text; returns the name of the attribute of ``_TRACED`` that holds its mask."""
    name = "_" + text.encode(errors="surrogatepass").hex()
    setattr(_TRACED, name, _parsed(text))
    while len(vars(_TRACED)) > _MOST_TRACED:
        delattr(_TRACED, next(iter(vars(_TRACED))))
    return name


def _is_traced() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


_formula = lru_cache(64)(_parsed)  # a text without lists holds no arrays: small enough to keep


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
    came = f"{name}: a bare {type(value).__name__}"
    if type(value).__name__ == "CausalBias":  # it raises where its dtype is read, in torch before 2.8
        raise MaskError(f'{came} came. Fix: the mask "causal".')
    kind = str(getattr(value, "dtype", ""))
    if "float" in kind:
        raise MaskError(_of_floats(came, value))
    m = "m" if "bool" in kind or not kind else "m != 0"
    raise MaskError(
        f"{came} came. True hides in many notebooks and in nn.MultiheadAttention, and shows in SDPA:\n"
        f"write lowtri.table({m}) if True = may see, lowtri.hidden({m}) if True = hidden."
    )


def _of_floats(came: str, value: Any) -> str:
    """The error for an array of floats; its values tell flags, an additive mask and a bias apart."""
    numbers = "m" if _is_traced() else in_numpy("m", value)
    if not isinstance(numbers, str) and numbers.any():
        if np.isin(numbers, (0, 1)).all():
            return (
                f"{came} of zeros and ones came. Added to scores these would hide nothing.\n"
                "Fix: lowtri.table(m != 0) if 1 = may see, lowtri.hidden(m != 0) if 1 = hidden."
            )
        if ((numbers == 0) | (numbers <= -1000)).all():
            return (
                f"{came} of 0 and {numbers.min():g} came, which hides where it is added to scores.\n"
                'Fix: lowtri.table(m == 0) as the mask, or bias=m with the mask "full".'
            )
    return f"{came} of floats came. Fix: numbers to add to the scores belong in bias=."
