"""A mask from text, and back: the text of a mask is its ``repr``.

The grammar is Python's own, so ``-`` binds tighter than ``&``, and ``&`` tighter than ``|``. It is read by :mod:`ast` and a
white list; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from lowtri.errors import MaskError
from lowtri.masks.arrays import in_numpy
from lowtri.masks.atoms import band, causal, chunks, first, full, strided, window
from lowtri.masks.holders import documents, heads, keys
from lowtri.masks.mask import Mask

__all__ = ["as_mask", "mask", "read"]

LONGEST = 65_536  # characters: enough for the lengths of ten thousand documents
DEEPEST = 100  # nested operators

_ATOMS: dict[str, Callable[..., Mask]] = {
    make.__name__: make for make in (full, causal, window, band, first, documents, chunks, strided, keys, heads)
}
_ARRAYS = ("table", "hidden", "where")
_JOINS: dict[type[ast.operator], Callable[[Mask, Mask], Mask]] = {
    ast.BitAnd: lambda left, right: left & right,
    ast.BitOr: lambda left, right: left | right,
    ast.Sub: lambda left, right: left - right,
}


def mask(text: str | Mask) -> Mask:
    """The mask that a text says.

    >>> mask("causal & (window(4) | first(1))")
    causal & (window(4) | first(1))
    >>> mask("causal - documents(lengths=[2, 2])") == mask("causal & ~documents(lengths=[2, 2])")
    True

    Args:
        text: names of masks (``causal`` or ``causal()``), numbers and lists of them, joined by ``& | ~ -`` and parentheses.
            A mask is handed back as it is.

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
        found: Mask = getattr(_READ, _read_apart(text))
        return found
    return _parsed(text) if "[" in text else _formula(text)


def _parsed(text: str) -> Mask:
    if len(text) > LONGEST:
        raise MaskError(f"mask: the text has {len(text)} characters, but at most {LONGEST} are read.")
    held = re.search(r"\w+\([^()<]*<[^>]*>", text)
    if held:
        raise MaskError(
            f"mask: {held.group()}) stands for an array or a function, which a text cannot hold. Fix: pass the mask."
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return read(tree)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, MaskError):
            raise
        raise MaskError(f"mask: {_short(text)} cannot be read. Fix: write e.g. 'causal & window(256)'.") from None


class _Read:
    """Masks of texts that stand in programs which torch.compile traced, an attribute for each."""


_READ = _Read()


def _read_apart(text: str) -> str:
    """Read a text, and say under which name the mask lies in ``_READ``."""
    name = "_" + text.encode(errors="surrogatepass").hex()
    setattr(_READ, name, _parsed(text))
    return name


# torch.compile follows ordinary Python, but not the parser: it calls what is marked so, takes the string that comes for a
# constant, and then finds an ordinary object. torch has a decorator that does no more, but masks come without torch.
_read_apart._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_traced() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


_formula = lru_cache(64)(_parsed)  # a text without lists holds no arrays: small enough to keep


def read(node: ast.expr) -> Mask:
    """The mask that a parsed text says; it may hold whole masks, as constants."""
    return _read(node, 0)


def as_mask(value: Any, name: str = "mask") -> Mask:
    """What a user gave where a mask belongs: a mask, or its text. A bare table is refused, since it does not say which way round."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, str):
        return mask(value)
    if value is None:
        raise MaskError(f"{name}: who may see whom is always said. Fix: lowtri.full() if everybody may see everybody.")
    kind, came = str(getattr(value, "dtype", "")), f"{name}: a bare {type(value).__name__}"
    if "float" in kind:
        raise MaskError(_of_floats(came, value))
    m = "m" if "bool" in kind or not kind else "m != 0"
    raise MaskError(
        f"{came} came. True hides in many notebooks and in nn.MultiheadAttention, and shows in SDPA:\n"
        f"write lowtri.table({m}) if True = may see, lowtri.hidden({m}) if True = hidden."
    )


def _of_floats(came: str, value: Any) -> str:
    """What a table of floats means is read from its numbers: flags, what hides when it is added, or anything else."""
    if type(value).__name__ == "CausalBias":
        return f'{came} came. Fix: the mask "causal".'
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


def _read(node: ast.expr, depth: int) -> Mask:
    if depth > DEEPEST:
        raise MaskError(f"mask: the text nests more than {DEEPEST} operators.")
    if isinstance(node, ast.Constant) and isinstance(node.value, Mask):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _JOINS:
        return _JOINS[type(node.op)](_read(node.left, depth + 1), _read(node.right, depth + 1))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_read(node.operand, depth + 1)
    if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        raise MaskError(f"mask: {_short(ast.unparse(node))}: masks are joined by & | ~ -, not by and, or, not.")
    if isinstance(node, ast.Name):
        return _made(_atom(node.id), node, [], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        make = _atom(node.func.id)
        values: list[Any] = [_value(argument, depth) for argument in node.args]
        named = {keyword.arg: _value(keyword.value, depth) for keyword in node.keywords if keyword.arg is not None}
        if len(named) != len(node.keywords):
            raise MaskError(f"mask: {_short(ast.unparse(node))}: ** has no meaning here.")
        return _made(make, node, values, named)
    raise MaskError(
        f"mask: {_short(ast.unparse(node))} is no mask. Fix: masks are joined by & | ~ -, e.g. 'causal & window(256)'."
    )


def _made(make: Callable[..., Mask], node: ast.expr, values: list[Any], named: dict[str, Any]) -> Mask:
    try:
        return make(*values, **named)
    except TypeError as error:  # too few or too many arguments, in Python's words
        raise MaskError(f"mask: {_short(ast.unparse(node))}: {str(error).split(') ', 1)[-1]}.") from None


def _atom(name: str) -> Callable[..., Mask]:
    if name in _ARRAYS:
        raise MaskError(
            f"mask: {name} holds an array or a function, which a text cannot hold. Fix: lowtri.{name}(...) in Python."
        )
    if name not in _ATOMS:
        raise MaskError(f"mask: there is no mask {name!r}. There are: {', '.join(_ATOMS)}.")
    return _ATOMS[name]


def _value(node: ast.expr, depth: int) -> Any:
    """An argument: a whole number, a bool, a list of arguments, or (in heads) a mask."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -_value(node.operand, depth)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(entry, depth + 1) for entry in node.elts]
    if isinstance(node, ast.Constant) and not isinstance(node.value, Mask):
        raise MaskError(f"mask: {node.value!r} is no whole number.")
    return _read(node, depth + 1)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
