"""The grammar of mask texts, read in one pass from left to right; nothing is ever evaluated.

It is a subset of Python's: names, calls, whole numbers, lists, parentheses, and the operators ``& | ~ -`` with Python's precedence.
Python's own parser is not used, because a hostile text can exhaust its time and its stack.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

from lowtri.errors import MaskError
from lowtri.masks.combinators import MAX_DEPTH
from lowtri.masks.mask import CONSTRUCTORS, Mask
from lowtri.masks.positions import shown

__all__ = ["read"]

_STRENGTH = {"|": 1, "&": 2, "-": 3}
_JOINS: dict[str, Callable[[Mask, Mask], Mask]] = {
    "|": lambda left, right: left | right,
    "&": lambda left, right: left & right,
    "-": lambda left, right: left - right,
}
_WORDS = {"True": True, "False": False, "None": None}
_FIX = "Fix: masks are joined by & | ~ -, e.g. 'causal & window(256)'."
_LONGEST_WORD = 40  # characters of a name or a number
_MOST_TOKENS = 4096  # so that every text is answered within a few hundredths of a second

_TOKEN = re.compile(r"""\s*(\d[\w.]*|\w+|'[^']*'|"[^"]*"|\S|$)""")
# A list of numbers or of bools is read at once: it may hold the lengths of 10,000 documents.
_NUMBERS = re.compile(r"\[\s*(-?[0-9]{1,40}(?:\s*,\s*-?[0-9]{1,40})*)\s*,?\s*\]")
_BOOLS = re.compile(r"\[\s*((?:True|False)(?:\s*,\s*(?:True|False))*)\s*,?\s*\]")


def read(text: str, arrays: Sequence[Any] = ()) -> Mask:
    """The mask that a text says.

    Args:
        text: the text.
        arrays: what the placeholders ``_0, _1, ...`` stand for, as in ``causal & documents(_0)``.

    Raises:
        MaskError: if the text is none of the grammar.
    """
    reader = _Reader(text, arrays)
    made = reader.value(0)
    if not isinstance(made, Mask):
        raise MaskError(f"mask: {shown(text)} is no mask. {_FIX}")
    if reader.token:
        raise reader.no_mask(0)
    return made


class _Reader:
    def __init__(self, text: str, arrays: Sequence[Any]) -> None:
        self.text, self.arrays = text, arrays
        self.end = 0  # of the token before
        self.taken = 0
        self._scan(0)

    def _scan(self, at: int) -> None:
        match = _TOKEN.match(self.text, at)
        assert match is not None  # white space, then anything or nothing
        self.token, self.start, self.next = match.group(1), match.start(1), match.end()

    def take(self) -> str:
        token, self.end = self.token, self.next
        self.taken += 1
        if self.taken > _MOST_TOKENS:
            raise MaskError(
                f"mask: the text has more than {_MOST_TOKENS} names and signs (besides lists of numbers). "
                "Fix: build the mask in Python."
            )
        self._scan(self.next)
        return token

    def expect(self, sign: str, at: int) -> None:
        if self.token != sign:
            raise self.no_mask(at)
        self.take()

    def value(self, depth: int, least: int = 1) -> Any:
        """A mask, a whole number or a list; signs that bind at least as strongly as ``least`` join masks."""
        if depth > MAX_DEPTH:
            raise MaskError(f"mask: the text nests more than {MAX_DEPTH} operators.")
        at = self.start
        left = self.operand(depth)
        while _STRENGTH.get(self.token, 0) >= least:
            sign = self.take()
            right = self.value(depth + 1, _STRENGTH[sign] + 1)
            if not (isinstance(left, Mask) and isinstance(right, Mask)):
                raise self.no_mask(at)
            left = _JOINS[sign](left, right)
        if self.token in ("and", "or"):
            raise self.not_words(at)
        return left

    def operand(self, depth: int) -> Any:
        at = self.start
        if self.token == "[":
            for pattern, read_one in ((_NUMBERS, int), (_BOOLS, _bool)):
                if match := pattern.match(self.text, at):
                    self.end = match.end()
                    self._scan(self.end)
                    return [read_one(entry) for entry in match.group(1).split(",")]
        token = self.take()
        if token == "~":
            inner = self.value(depth + 1, least=4)
            if not isinstance(inner, Mask):
                raise self.no_mask(at)
            return ~inner
        if token == "-" and self.token[:1].isdecimal():
            return -_number(self.take())
        if token[:1].isdecimal():
            return _number(token)
        if token in ("(", "["):
            return self.entries(token, at, depth)
        if token[:1] in ("'", '"') and len(token) > 1:
            raise MaskError(f"mask: {shown(token[1:-1])} is no whole number.")
        if token == "not":
            raise self.not_words(at)
        if not (token[:1].isalpha() or token[:1] == "_"):
            raise self.no_mask(at)
        return self.named(token, at, depth)

    def entries(self, bracket: str, at: int, depth: int) -> Any:
        """What stands in brackets: a list; but one value in parentheses is the value itself."""
        closing, comma = ")" if bracket == "(" else "]", False
        values = []
        while self.token != closing:
            values.append(self.value(depth + 1))
            comma = self.token == ","
            if not comma:
                break
            self.take()
        self.expect(closing, at)
        return values[0] if bracket == "(" and len(values) == 1 and not comma else values

    def named(self, name: str, at: int, depth: int) -> Any:
        if self.arrays and name[0] == "_":
            if name[1:] in map(str, range(len(self.arrays))):
                return self.arrays[int(name[1:])]
            raise MaskError(f"unpack: {shown(self.text)} with {len(self.arrays)} arrays is not what pack writes.")
        if name in _WORDS:
            return _WORDS[name]
        make = _constructor(name, bool(self.arrays))
        values, named = self.arguments(at, depth) if self.token == "(" else ([], {})
        try:
            return make(*values, **named)
        except TypeError as error:  # too few or too many arguments, in Python's words
            said = str(error).split(") ", 1)[-1]
            raise MaskError(f"mask: {shown(self.text[at : self.end])}: {shown(said, 200)[1:-1]}.") from None

    def arguments(self, at: int, depth: int) -> tuple[list[Any], dict[str, Any]]:
        values: list[Any] = []
        named: dict[str, Any] = {}
        self.take()
        while self.token != ")":
            if self.token == "*":
                sign = "**" if self.text.startswith("**", self.start) else "*"
                raise MaskError(f"mask: {shown(self.text[at:])}: {sign} has no meaning here.")
            if self.token == "<":
                end = self.text.find(">", self.start) + 1 or len(self.text)
                raise MaskError(
                    f"mask: {shown(self.text[at:end])} stands for an array or a function, which a text cannot hold. "
                    "Fix: pass the mask."
                )
            is_name = self.token[:1].isalpha() and _TOKEN.match(self.text, self.next).group(1) == "="  # type: ignore[union-attr]
            if is_name:
                name = self.take()
                self.take()
                if name in named:
                    raise MaskError(f"mask: {shown(self.text[at:])}: {shown(name)} is given twice.")
                named[name] = self.value(depth + 1)
            else:
                values.append(self.value(depth + 1))
            if self.token != ",":
                break
            self.take()
        self.expect(")", at)
        return values, named

    def not_words(self, at: int) -> MaskError:
        return MaskError(f"mask: {shown(self.text[at:])}: masks are joined by & | ~ -, not by and, or, not.")

    def no_mask(self, at: int) -> MaskError:
        if not self.token:  # the text ends too early
            return MaskError(f"mask: {shown(self.text)} cannot be read. Fix: write e.g. 'causal & window(256)'.")
        return MaskError(f"mask: {shown(self.text[at:])} is no mask. {_FIX}")


def _bool(word: str) -> bool:
    return word.strip() == "True"


def _number(token: str) -> int:
    try:
        if len(token) <= _LONGEST_WORD:
            return int(token, 0)
    except ValueError:
        pass
    raise MaskError(f"mask: {token if len(token) <= _LONGEST_WORD else shown(token)} is no whole number.")


def _constructor(name: str, arrays: bool) -> Callable[..., Mask]:
    """The public function of this name; the ones that take arrays only where the text has placeholders."""
    known = CONSTRUCTORS.get(name)
    if known is None:
        near = difflib.get_close_matches(name, CONSTRUCTORS, 1) if len(name) <= _LONGEST_WORD else []
        meant = f" Did you mean {near[0]}?" if near else ""
        names = ", ".join(name for name, one in CONSTRUCTORS.items() if one.in_text)
        raise MaskError(f"mask: there is no mask {shown(name)}.{meant} There are: {names}.")
    if not (known.in_text or arrays):
        raise MaskError(
            f"mask: {name} holds an array or a function, which a text cannot hold. Fix: lowtri.{name}(...) in Python."
        )
    return known.make
