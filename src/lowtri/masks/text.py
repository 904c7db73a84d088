"""Masks and texts: a mask from its text or from a user's argument, and masks as texts with arrays, for compiled programs.

The text of a mask is its ``repr``. Its grammar is a subset of Python's: names, calls, whole numbers, lists, parentheses, a mask inside
another in quotes, and the operators ``& | ~ -`` with Python's precedence: ``-`` binds tighter than ``&``, and ``&`` tighter than ``|``.
A text is read once from left to right and never evaluated as code. Python's own parser is not used, because a hostile text can exhaust
its time and its stack, and because its errors name neither the place nor the fix.

Compiled and exported programs contain a mask as a text with placeholders, ``causal & documents(_0)``, and the list of their arrays.
While a program is traced the arrays are tensors without values, so ``pack`` reads only the structure of the mask, in Python that
torch.compile can trace.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import numpy as np

from lowtri.compat import COMPILER, constant_while_traced, tracer
from lowtri.errors import MaskError
from lowtri.masks.arrays import FrozenArray, in_numpy
from lowtri.masks.mask import CONSTRUCTORS, MAX_DEPTH, NOT_IN_TEXT, Mask, called
from lowtri.masks.tile import short_repr

MAX_LENGTH = 65_536  # characters: enough for the lengths of ten thousand documents
_STRENGTH = {"|": 1, "&": 2, "-": 3}
_JOINS: dict[str, Callable[[Mask, Mask], Mask]] = {"|": operator.or_, "&": operator.and_, "-": operator.sub}
_LITERALS = {"True": True, "False": False, "None": None}
_FIX = "Fix: masks are joined by & | ~ -, e.g. 'causal & window(256)'."
_QUOTED = "inner"  # the argument that takes a mask, in quotes or without
_MAX_TOKEN = 40  # characters of a name or a number
_MAX_TOKENS = 4096  # so that any text is read or rejected within a few hundredths of a second

_TOKEN = re.compile(r"""\s*(\d[\w.]*|\w+|'[^']*'|"[^"]*"|\S|$)""")
# A list of numbers or of bools is read at once: it may hold the lengths of 10,000 documents. No pattern has two ways to match the same
# characters, so that each reads a text in linear time.
_LIST = re.compile(r"\[([-\s0-9,TrueFals]*)\]")
_NUMBER = re.compile(rf"-?[0-9]{{1,{_MAX_TOKEN}}}")


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
        raise MaskError(f"mask: got {type(text).__name__}; expected a text. Fix: lowtri.table(bools) for a table.")
    if tracer() in COMPILER:
        traced: Mask = getattr(_TRACED, _read_while_tracing(text))
        return traced
    return _parsed(text) if "[" in text else _cached(text)


def _parsed(text: str) -> Mask:
    if len(text) > MAX_LENGTH:
        raise MaskError(f"mask: the text has {len(text)} characters, but at most {MAX_LENGTH} are read.")
    try:
        return _read(text)
    except RecursionError:  # the caller's own stack is nearly used up
        raise MaskError(f"mask: {short_repr(text)} nests deeper than Python's stack allows here.") from None


class _Traced:
    """Masks of texts in programs that torch.compile traces: an attribute for each of the newest ``_MAX_TRACED`` texts.

    A program whose text has been dropped is traced again, and its text read again.
    """


_TRACED = _Traced()
_MAX_TRACED = 1024


@constant_while_traced  # torch.compile can trace ordinary Python, but not the parser
def _read_while_tracing(text: str) -> str:
    """Read a text; returns the name of the attribute of ``_TRACED`` that holds its mask."""
    name = "_" + text.encode(errors="surrogatepass").hex()
    setattr(_TRACED, name, _parsed(text))
    while len(vars(_TRACED)) > _MAX_TRACED:
        delattr(_TRACED, next(iter(vars(_TRACED))))
    return name


_cached = lru_cache(64)(_parsed)  # for texts without lists: their masks hold no arrays


def as_mask(value: Any, name: str = "mask") -> Mask:
    """The mask of a user's argument: a mask, or its text. Bare arrays are rejected, because True may mean either visible or hidden."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, str):
        return mask(value)
    if value is None:
        raise MaskError(f"{name}: got None; expected a mask. Fix: lowtri.full() if every query may see every key.")
    function = getattr(value, "__name__", None)
    if function in CONSTRUCTORS:
        raise MaskError(f"{name}: {function} is a function; the parentheses were forgotten.\nFix: {called(function)}.")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        n = short_repr(int(value)) if isinstance(value, int) else value  # Python does not print the largest ones
        raise MaskError(f"{name}: got {n}; expected a mask or its text. Fix: for a window of {n} keys 'window({n})'.")
    given = f"{name}: got a bare {type(value).__name__}"
    if type(value).__name__ == "CausalBias":  # before torch 2.8 it raises where its dtype is read
        raise MaskError(f'{given}. Fix: the mask "causal".')
    dtype = str(getattr(value, "dtype", ""))
    if "float" in dtype:
        raise MaskError(_float_error(given, value))
    if isinstance(value, FunctionType):
        raise MaskError(f"{given}. Fix: lowtri.where(f), where f(q, k) says which positions q see which positions k.")
    m = "m" if "bool" in dtype or not dtype else "m != 0"
    raise MaskError(
        f"{given}. True hides in many notebooks and in nn.MultiheadAttention, and shows in SDPA:\n"
        f"write lowtri.table({m}) if True = may see, lowtri.hidden({m}) if True = hidden."
    )


def _float_error(given: str, value: Any) -> str:
    """The error for an array of floats; its values distinguish flags, an additive mask and a bias."""
    numbers = "m" if tracer() else in_numpy("m", value)
    if not isinstance(numbers, str) and numbers.any():
        if np.isin(numbers, (0, 1)).all():
            return (
                f"{given} of zeros and ones. Added to scores these would hide nothing.\n"
                "Fix: lowtri.table(m != 0) if 1 = may see, lowtri.hidden(m != 0) if 1 = hidden."
            )
        if ((numbers == 0) | (numbers <= -1000)).all():
            return (
                f"{given} of 0 and {numbers.min():g}, which hides where it is added to scores.\n"
                'Fix: lowtri.table(m == 0) as the mask, or bias=m with the mask "full".'
            )
    return f"{given} of floats. Fix: numbers to add to the scores belong in bias=."


# Serialisation.


def to_text(mask: Mask) -> tuple[str | None, list[Any]]:
    """The text of a mask, and the arrays of its placeholders; the text is None if the mask holds a user's function.

    While torch.compile traces, numbers have placeholders, too, since one program then serves masks of other numbers.

    >>> from lowtri import causal, documents
    >>> to_text(causal() & documents([0, 0, 1]))
    ('causal & documents(_0)', [array([0, 0, 1])])
    """
    arrays: list[Any] = []
    return mask._text(arrays), arrays


def from_text(text: str, arrays: Sequence[Any]) -> Mask:
    """The mask of what :func:`to_text` returns; the same object for the same content, as long as it is cached.

    >>> from lowtri import causal, documents
    >>> mask = causal() & documents([0, 0, 1])
    >>> from_text(*to_text(mask)) == mask
    True

    Raises:
        MaskError: if ``to_text`` does not write such a text.
    """
    global _recent
    for known_text, known, known_mask in _recent:
        if known_text == text and len(known) == len(arrays):
            pairs = zip(known, arrays, strict=True)
            if all(_is_equal(a, b) for a, b in pairs):
                return known_mask
    frozen = tuple(x if isinstance(x, int) else FrozenArray(x) for x in arrays)
    result = _from_text(text, frozen)
    _recent = ((text, frozen, result), *_recent[:1])
    return result


# The layers of a model alternate between one or two masks, and comparing an array costs a tenth of hashing it.
_recent: tuple[tuple[str, tuple[FrozenArray | int, ...], Mask], ...] = ()


def _is_equal(known: FrozenArray | int, given: Any) -> bool:
    if isinstance(known, int) or isinstance(given, int):
        return known is given or known == given
    return bool(known.array.dtype == given.dtype and np.array_equal(known.array, given))


@lru_cache(32)
def _from_text(text: str, frozen: tuple[FrozenArray | int, ...]) -> Mask:
    if not frozen:
        return mask(text)
    return _read(text, [x if isinstance(x, int) else x.array for x in frozen])


# The parser.


def _read(text: str, arrays: Sequence[Any] = ()) -> Mask:
    """The mask of a text, in which ``_0, _1, ...`` stand for arrays and numbers, as in ``causal & documents(_0)``."""
    return _Reader(text, arrays).whole()


class _Reader:
    def __init__(self, text: str, arrays: Sequence[Any], count: int = 0) -> None:
        self.text = text
        self.arrays = arrays
        self.end = 0  # of the previous token
        self.count = count  # of the tokens read
        self.open: list[tuple[int, str]] = []  # the brackets around the token: where each stands, and what closes it
        self._scan(0)

    def _scan(self, start: int) -> None:
        match = _TOKEN.match(self.text, start)
        assert match is not None  # white space, then anything or nothing
        self.token = match.group(1)
        self.start = match.start(1)
        self.next = match.end()

    def whole(self) -> Mask:
        """The mask that the text is."""
        value = self.value(0)
        if not isinstance(value, Mask):
            raise MaskError(f"mask: {short_repr(self.text)} is not a mask. {_FIX}")
        if self.token:
            raise self.unexpected("& | - or the end")
        return value

    def take(self) -> str:
        token = self.token
        self.end = self.next
        self.count += 1
        if self.count > _MAX_TOKENS:
            raise MaskError(
                f"mask: the text has more than {_MAX_TOKENS} names and signs (besides lists of numbers). "
                "Fix: build the mask in Python."
            )
        self._scan(self.next)
        return token

    def close(self) -> None:
        """Read what closes the innermost bracket."""
        start, sign = self.open[-1]
        if not self.token:
            closed = self.text.rstrip() + "".join(sign for _, sign in reversed(self.open))
            raise self.unreadable(
                f"the {self.text[start]} at character {start + 1} is not closed", f"Fix: {short_repr(closed)}."
            )
        if self.token != sign:
            raise self.unexpected(f"a comma or {sign}")
        self.take()
        self.open.pop()

    def value(self, depth: int, least: int = 1) -> Any:
        """A mask, a whole number or a list; signs that bind at least as strongly as ``least`` join masks."""
        if depth > MAX_DEPTH:
            raise MaskError(f"mask: the text nests more than {MAX_DEPTH} operators.")
        start = self.start
        left = self.operand(depth)
        while _STRENGTH.get(self.token, 0) >= least:
            sign = self.take()
            right = self.value(depth + 1, _STRENGTH[sign] + 1)
            if not (isinstance(left, Mask) and isinstance(right, Mask)):
                raise MaskError(f"mask: {short_repr(self.text[start : self.end])} is not a mask. {_FIX}")
            left = _JOINS[sign](left, right)
        if self.token in ("and", "or"):
            raise self.word_operator(start)
        return left

    def operand(self, depth: int) -> Any:
        start = self.start
        if self.token == "[":
            values = self.plain_list(start)
            if values is not None:
                return values
        if not self.token or self.token in ")]&|=,":
            raise self.unexpected("a mask or a number" if self.open else "a mask")
        token = self.take()
        if token == "~":
            inner = self.value(depth + 1, least=4)
            if not isinstance(inner, Mask):
                raise MaskError(f"mask: {short_repr(self.text[start : self.end])} is not a mask. {_FIX}")
            return ~inner
        if token == "-" and self.token[:1].isdecimal():
            return -_number(self.take())
        if token[:1].isdecimal():
            return _number(token)
        if token in ("(", "["):
            return self.entries(token, start, depth)
        if token[:1] in ("'", '"') and len(token) > 1:
            raise MaskError(
                f"mask: {short_repr(token[1:-1])} is not a whole number or a mask, because it is in quotes.\nFix: drop the quotes."
            )
        if token == "not":
            raise self.word_operator(start)
        if not (token[:1].isalpha() or token[:1] == "_"):
            raise self.unreadable(f"{short_repr(self.text[start:], 30)} at character {start + 1} is not a mask", _FIX)
        return self.named(token, start, depth)

    def plain_list(self, start: int) -> list[int] | list[bool] | None:
        """A list of whole numbers alone, or of bools alone; None for any other, of which nothing is read."""
        match = _LIST.match(self.text, start)
        if match is None:
            return None
        entries = [entry.strip() for entry in match.group(1).split(",")]
        if len(entries) > 1 and not entries[-1]:  # a comma at the end
            entries.pop()
        values: list[int] | list[bool]
        if all([_NUMBER.fullmatch(entry) for entry in entries]):
            values = [int(entry) for entry in entries]
        elif all([entry in ("True", "False") for entry in entries]):
            values = [entry == "True" for entry in entries]
        else:
            return None
        self.end = match.end()
        self._scan(self.end)
        return values

    def entries(self, bracket: str, start: int, depth: int) -> Any:
        """The content of brackets: a list; but one value in parentheses is the value itself."""
        closing = ")" if bracket == "(" else "]"
        comma = False
        self.open.append((start, closing))
        values = []
        while self.token != closing:
            values.append(self.value(depth + 1))
            comma = self.token == ","
            if not comma:
                break
            self.take()
        self.close()
        return values[0] if bracket == "(" and len(values) == 1 and not comma else values

    def named(self, name: str, start: int, depth: int) -> Any:
        if self.arrays and name[0] == "_":
            if name[1:] in map(str, range(len(self.arrays))):
                return self.arrays[int(name[1:])]
            raise MaskError(
                f"from_text: {short_repr(self.text)} with {len(self.arrays)} arrays is not what to_text returns."
            )
        if name in _LITERALS:
            return _LITERALS[name]
        make = _maker(name, bool(self.arrays))
        has_arguments = self.token == "("
        values, named = self.arguments(start, depth) if has_arguments else ([], {})
        try:
            return make(*values, **named)
        except TypeError as error:  # too few or too many arguments, in Python's words
            if not has_arguments and (self.token[:1].isdecimal() or self.token == "["):
                argument = self.token if self.token != "[" else "..."
                why = f"{short_repr(self.text[self.start :], 30)} at character {self.start + 1} is not in parentheses"
                raise self.unreadable(why, f"Fix: {name}({short_repr(argument, 20)[1:-1]}).") from None
            reason = str(error).split(") ", 1)[-1]
            given = short_repr(self.text[start : self.end])
            parameters = signature(make).parameters.values()
            arguments = ", ".join(f"{x.name}=..." if x.kind is Parameter.KEYWORD_ONLY else x.name for x in parameters)
            raise MaskError(f"mask: {given}: {short_repr(reason, 200)[1:-1]}.\nFix: {name}({arguments}).") from None

    def arguments(self, start: int, depth: int) -> tuple[list[Any], dict[str, Any]]:
        values: list[Any] = []
        named: dict[str, Any] = {}
        self.open.append((self.start, ")"))
        self.take()
        while self.token != ")":
            if self.token == "*":
                sign = "**" if self.text.startswith("**", self.start) else "*"
                raise MaskError(f"mask: {short_repr(self.text[start:])}: {sign} has no meaning here.")
            if self.token == "<":
                end = self.text.find(">", self.start) + 1 or len(self.text)
                raise MaskError(
                    f"mask: {short_repr(self.text[start:end])} stands for an array or a function, which a text cannot hold. "
                    "Fix: pass the mask."
                )
            is_name = self.token[:1].isalpha() and _TOKEN.match(self.text, self.next).group(1) == "="  # type: ignore[union-attr]
            if is_name:
                name = self.take()
                self.take()
                if name in named:
                    raise MaskError(f"mask: {short_repr(self.text[start:])}: {short_repr(name)} is given twice.")
                is_quoted = name == _QUOTED and self.token[:1] in ("'", '"') and len(self.token) > 1
                named[name] = self.quoted() if is_quoted else self.value(depth + 1)
            else:
                values.append(self.value(depth + 1))
            if self.token != ",":
                break
            self.take()
        self.close()
        return values, named

    def quoted(self) -> Mask:
        """A mask in quotes, as Python takes it."""
        text = self.take()[1:-1]
        inside = _Reader(text, self.arrays, self.count)
        mask = inside.whole()
        self.count = inside.count
        return mask

    def word_operator(self, start: int) -> MaskError:
        return MaskError(
            f"mask: {short_repr(self.text[start:])}: masks are joined by & | ~ -, not by and, or, not. Fix: 'causal & window(256)'."
        )

    def unexpected(self, expected: str) -> MaskError:
        """The error for the next token, or for the end of the text."""
        if self.token:
            return self.unreadable(
                f"{short_repr(self.text[self.start :], 30)} at character {self.start + 1}, where {expected} is expected",
                _FIX,
            )
        why = f"it ends where {expected} is expected" if self.text.strip() else "it is empty"
        return self.unreadable(why, "Fix: write e.g. 'causal & window(256)'.")

    def unreadable(self, why: str, fix: str) -> MaskError:
        return MaskError(f"mask: {short_repr(self.text)} cannot be read: {why}. {fix}")


def _number(token: str) -> int:
    try:
        if len(token) <= _MAX_TOKEN:
            return int(token, 0)
    except ValueError:
        pass
    raise MaskError(f"mask: {token if len(token) <= _MAX_TOKEN else short_repr(token)} is not a whole number.")


def _maker(name: str, arrays: bool) -> Callable[..., Mask]:
    """The public function of this name; the ones that take arrays only where the text has placeholders."""
    if name not in CONSTRUCTORS:
        matches = difflib.get_close_matches(name, CONSTRUCTORS, 1) if len(name) <= _MAX_TOKEN else []
        suggestion = f" Did you mean {matches[0]}?" if matches else ""
        names = ", ".join(name for name in CONSTRUCTORS if name not in NOT_IN_TEXT)
        raise MaskError(f"mask: there is no mask {short_repr(name)}.{suggestion} There are: {names}.")
    if name in NOT_IN_TEXT and not arrays:
        raise MaskError(
            f"mask: {name} holds an array or a function, which a text cannot hold. Fix: lowtri.{name}(...) in Python."
        )
    return CONSTRUCTORS[name]
