"""What the command line writes: the one function that writes it, and the streams that it writes to.

A model, a file and a folder name may hold escape sequences, which a terminal obeys, and characters that reorder a line. Whatever
verbs print passes :func:`write`, and what libraries print on stderr passes a stream that spells out the same characters.
"""

from __future__ import annotations

import codecs
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lowtri.pictures.labels import spelled_out

_JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji are written with them; they move and hide nothing
_COLOURS = re.compile("(\x1b\\[[012]m)")  # those that verbs write themselves: bold, dim and plain
_PROGRESS = re.compile("(\r|\x1b\\[K)")  # a line of progress that is written over

# For encodings without them, each sign of pictures and tables has one of ASCII that stands for nothing else.
_ASCII_SIGNS = str.maketrans("·░▒▓█╱✓✗…─␣⏎⇥→∅×", ".:+%#/vx~-_$|>=*")
_ERRORS = "lowtri.ascii_signs"


def clean(text: str) -> str:
    """The text with control characters spelled out, other than tabs and line ends, and with those that reorder or hide text.

    They are spelled out as in pictures (:func:`lowtri.pictures.labels.spelled_out`). Spaces of any width stay.

    >>> print(clean("a\\x1b[2Jb"), clean("abc\\u202ecba"), clean("黑\\u3000猫"))
    a\\x1b[2Jb abc\\u202ecba 黑　猫
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line if line.isprintable() else _clean_line(line) for line in lines)


def _clean_line(line: str) -> str:
    spaces = {c for c in line if unicodedata.category(c) == "Zs"}
    return spelled_out(line, keep="".join(("\t", _JOINERS, *spaces)))


def clean_json(text: str) -> str:
    """JSON that is read as before, in which every character that :func:`clean` spells out is an escape of JSON's.

    >>> print(clean_json('["\\x9b2J", "\\u202e"]'))
    ["\\u009b2J", "\\u202e"]
    """
    return "\n".join(line if line.isprintable() else "".join(map(_json_letter, line)) for line in text.split("\n"))


def _json_letter(letter: str) -> str:
    if clean(letter) == letter:
        return letter
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[i : i + 2], 'big'):04x}" for i in range(0, len(units), 2))


def write(
    text: str, *, end: str = "\n", stream: TextIO | None = None, json: bool = False, colours: bool = False
) -> None:
    """Write a text to stdout, or to another stream, at once.

    Args:
        json: the text is JSON, and stays it.
        colours: the text is printable already, but for bold and dim words.
    """
    if json:
        text = clean_json(text)
    elif colours:
        text = "".join(part if _COLOURS.fullmatch(part) else clean(part) for part in _COLOURS.split(text))
    else:
        text = clean(text)
    print(text, end=end, file=sys.stdout if stream is None else stream, flush=True)


@contextmanager
def streams() -> Iterator[None]:
    """Inside, stderr spells out what libraries write to it, and encodings without the signs of pictures get those of ASCII."""
    codecs.register_error(_ERRORS, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if "utf" not in (stream.encoding or "utf").lower() and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ERRORS)
    raw = sys.stderr
    sys.stderr = _Cleaned(raw)
    try:
        yield
    finally:
        sys.stderr = raw


class _Cleaned:
    """A stream of text in which the lines of libraries are cleaned, too; a line of progress may be written over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        parts = _PROGRESS.split(text.replace("\r\n", "\n"))
        self._stream.write("".join(part if _PROGRESS.fullmatch(part) else clean(part) for part in parts))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end].translate(_ASCII_SIGNS)
    return letters.encode("ascii", "backslashreplace").decode("ascii"), error.end
