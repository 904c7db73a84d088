"""The grammar of mask texts and its parser, which reads a text once from left to right and never evaluates it as code.

It is a subset of Python's: names, calls, whole numbers, lists, parentheses, and the operators ``& | ~ -`` with Python's precedence.
Python's own parser is not used, because a hostile text can exhaust its time and its stack.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from lowtri.errors import MaskError
from lowtri.masks.mask import CONSTRUCTORS, MAX_DEPTH, Mask
from lowtri.masks.tile import shown

__all__ = ["read"]

_STRENGTH = {"|": 1, "&": 2, "-": 3}
_JOINS: dict[str, Callable[[Mask, Mask], Mask]] = {
    "|": lambda left, right: left | right,
    "&": lambda left, right: left & right,
    "-": lambda left, right: left - right,
}
_LITERALS = {"True": True, "False": False, "None": None}
_FIX = "Fix: masks are joined by & | ~ -, e.g. 'causal & window(256)'."
_MAX_TOKEN = 40  # characters of a name or a number
_MAX_TOKENS = 4096  # so that any text is read or rejected within a few hundredths of a second

_TOKEN = re.compile(r"""\s*(\d[\w.]*|\w+|'[^']*'|"[^"]*"|\S|$)""")
# A list of numbers or of bools is read at once: it may hold the lengths of 10,000 documents.
_NUMBERS = re.compile(r"\[\s*(-?[0-9]{1,40}(?:\s*,\s*-?[0-9]{1,40})*)\s*,?\s*\]")
_BOOLS = re.compile(r"\[\s*((?:True|False)(?:\s*,\s*(?:True|False))*)\s*,?\s*\]")


def read(text: str, arrays: Sequence[Any] = ()) -> Mask:
    """The mask of a text.

    Args:
        text: the text.
        arrays: the values of the placeholders ``_0, _1, ...``, as in ``causal & documents(_0)``.

    Raises:
        MaskError: if the grammar does not accept the text.
    """
    reader = _Reader(text, arrays)
    value = reader.value(0)
    if not isinstance(value, Mask):
        raise MaskError(f"mask: {shown(text)} is not a mask. {_FIX}")
    if reader.token:
        raise reader.unexpected("& | - or the end")
    return value


class _Reader:
    def __init__(self, text: str, arrays: Sequence[Any]) -> None:
        self.text, self.arrays = text, arrays
        self.end = 0  # of the previous token
        self.count = 0
        self.open: list[tuple[int, str]] = []  # the brackets around the token: where each stands, and what closes it
        self._scan(0)

    def _scan(self, start: int) -> None:
        match = _TOKEN.match(self.text, start)
        assert match is not None  # white space, then anything or nothing
        self.token, self.start, self.next = match.group(1), match.start(1), match.end()

    def take(self) -> str:
        token, self.end = self.token, self.next
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
                f"the {self.text[start]} at character {start + 1} is not closed", f"Fix: {shown(closed)}."
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
                raise MaskError(f"mask: {shown(self.text[start : self.end])} is not a mask. {_FIX}")
            left = _JOINS[sign](left, right)
        if self.token in ("and", "or"):
            raise self.word_operator(start)
        return left

    def operand(self, depth: int) -> Any:
        start = self.start
        if self.token == "[":
            for pattern, convert in ((_NUMBERS, int), (_BOOLS, _bool)):
                if match := pattern.match(self.text, start):
                    self.end = match.end()
                    self._scan(self.end)
                    return [convert(entry) for entry in match.group(1).split(",")]
        if not self.token or self.token in ")]&|=,":
            raise self.unexpected("a mask or a number" if self.open else "a mask")
        token = self.take()
        if token == "~":
            inner = self.value(depth + 1, least=4)
            if not isinstance(inner, Mask):
                raise MaskError(f"mask: {shown(self.text[start : self.end])} is not a mask. {_FIX}")
            return ~inner
        if token == "-" and self.token[:1].isdecimal():
            return -_number(self.take())
        if token[:1].isdecimal():
            return _number(token)
        if token in ("(", "["):
            return self.entries(token, start, depth)
        if token[:1] in ("'", '"') and len(token) > 1:
            raise MaskError(f"mask: {shown(token[1:-1])} is not a whole number.")
        if token == "not":
            raise self.word_operator(start)
        if not (token[:1].isalpha() or token[:1] == "_"):
            raise self.unreadable(f"{shown(self.text[start:], 30)} at character {start + 1} is not a mask", _FIX)
        return self.named(token, start, depth)

    def entries(self, bracket: str, start: int, depth: int) -> Any:
        """The content of brackets: a list; but one value in parentheses is the value itself."""
        closing, comma = ")" if bracket == "(" else "]", False
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
            raise MaskError(f"unpack: {shown(self.text)} with {len(self.arrays)} arrays is not what pack writes.")
        if name in _LITERALS:
            return _LITERALS[name]
        make = _constructor(name, bool(self.arrays))
        has_arguments = self.token == "("
        values, named = self.arguments(start, depth) if has_arguments else ([], {})
        try:
            return make(*values, **named)
        except TypeError as error:  # too few or too many arguments, in Python's words
            if not has_arguments and (self.token[:1].isdecimal() or self.token == "["):
                argument = self.token if self.token != "[" else "..."
                why = f"{shown(self.text[self.start :], 30)} at character {self.start + 1} is not in parentheses"
                raise self.unreadable(why, f"Fix: {name}({shown(argument, 20)[1:-1]}).") from None
            reason = str(error).split(") ", 1)[-1]
            raise MaskError(f"mask: {shown(self.text[start : self.end])}: {shown(reason, 200)[1:-1]}.") from None

    def arguments(self, start: int, depth: int) -> tuple[list[Any], dict[str, Any]]:
        values: list[Any] = []
        named: dict[str, Any] = {}
        self.open.append((self.start, ")"))
        self.take()
        while self.token != ")":
            if self.token == "*":
                sign = "**" if self.text.startswith("**", self.start) else "*"
                raise MaskError(f"mask: {shown(self.text[start:])}: {sign} has no meaning here.")
            if self.token == "<":
                end = self.text.find(">", self.start) + 1 or len(self.text)
                raise MaskError(
                    f"mask: {shown(self.text[start:end])} stands for an array or a function, which a text cannot hold. "
                    "Fix: pass the mask."
                )
            is_name = self.token[:1].isalpha() and _TOKEN.match(self.text, self.next).group(1) == "="  # type: ignore[union-attr]
            if is_name:
                name = self.take()
                self.take()
                if name in named:
                    raise MaskError(f"mask: {shown(self.text[start:])}: {shown(name)} is given twice.")
                named[name] = self.value(depth + 1)
            else:
                values.append(self.value(depth + 1))
            if self.token != ",":
                break
            self.take()
        self.close()
        return values, named

    def word_operator(self, start: int) -> MaskError:
        return MaskError(f"mask: {shown(self.text[start:])}: masks are joined by & | ~ -, not by and, or, not.")

    def unexpected(self, expected: str) -> MaskError:
        """The error for the next token, or for the end of the text."""
        if self.token:
            return self.unreadable(
                f"{shown(self.text[self.start :], 30)} at character {self.start + 1}, where {expected} is expected",
                _FIX,
            )
        why = f"it ends where {expected} is expected" if self.text.strip() else "it is empty"
        return self.unreadable(why, "Fix: write e.g. 'causal & window(256)'.")

    def unreadable(self, why: str, fix: str) -> MaskError:
        return MaskError(f"mask: {shown(self.text)} cannot be read: {why}. {fix}")


def _bool(word: str) -> bool:
    return word.strip() == "True"


def _number(token: str) -> int:
    try:
        if len(token) <= _MAX_TOKEN:
            return int(token, 0)
    except ValueError:
        pass
    raise MaskError(f"mask: {token if len(token) <= _MAX_TOKEN else shown(token)} is not a whole number.")


def _constructor(name: str, arrays: bool) -> Callable[..., Mask]:
    """The public function of this name; the ones that take arrays only where the text has placeholders."""
    constructor = CONSTRUCTORS.get(name)
    if constructor is None:
        matches = difflib.get_close_matches(name, CONSTRUCTORS, 1) if len(name) <= _MAX_TOKEN else []
        suggestion = f" Did you mean {matches[0]}?" if matches else ""
        names = ", ".join(name for name, known in CONSTRUCTORS.items() if known.in_text)
        raise MaskError(f"mask: there is no mask {shown(name)}.{suggestion} There are: {names}.")
    if not (constructor.in_text or arrays):
        raise MaskError(
            f"mask: {name} holds an array or a function, which a text cannot hold. Fix: lowtri.{name}(...) in Python."
        )
    return constructor.make
