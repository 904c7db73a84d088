"""Labels of pictures and tables: splits a text into tokens, and makes sure that a token can neither break a line nor reorder it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Chinese and Japanese with their punctuation.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f\U00020000-\U0003ffff]"
)
_ATTACHED = "\u0e33\u0eb3"  # the vowel am of Thai and Lao: a letter to Unicode, written on the consonant before it


def display_width(text: str) -> int:
    """Columns of a terminal: two for Chinese characters, none for the marks that Thai puts above and below a letter.

    >>> display_width("black"), display_width("黑猫"), display_width("ที่นี่")
    (5, 4, 2)
    """
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def spelled_out(text: str, keep: str = "") -> str:
    """The text with control characters, direction overrides and other invisible characters written as escapes.

    >>> print(spelled_out("a\\x1b[2J"), spelled_out("abc\\u202ecba"))
    a\\x1b[2J abc\\u202ecba
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, longest: int = 24) -> str:
    """The text :func:`spelled_out`, cut to ``longest`` columns.

    >>> shortened("a line\\n"), shortened("causal & window(4)", 10)
    ('a line\\\\n', 'causal & …')
    """
    limit = 4 * longest  # characters: a letter may carry marks that take no column, but not any number of them
    short = spelled_out(text[: limit + 1])
    if len(text) <= limit and display_width(short) <= longest:
        return short
    short = short[:limit]
    while display_width(short) > longest - 1:
        short = short[:-1]
    return short + "…"


def split(text: str) -> tuple[list[str], str]:
    """A text as tokens, cut at spaces, and by characters where a script has none; and a description of the cuts.

    Marks stay with the character that carries them.

    >>> split("The black cat <end>")
    (['The', 'black', 'cat', '<end>'], 'cut at spaces')
    >>> split("我爱 NLP"), split("ที่นี่")
    ((['我', '爱', 'NLP'], 'cut at spaces and by characters'), (['ที่', 'นี่'], 'cut at spaces and by characters'))
    """
    tokens: list[str] = []
    for word in text.split():
        base = ""  # the last character of this word that is not a mark
        for c in word:
            is_mark = unicodedata.category(c)[0] == "M" or c in _ATTACHED
            if base and (is_mark or not (_UNSPACED.match(c) or _UNSPACED.match(base))):
                tokens[-1] += c
            else:
                tokens.append(c)
            base = base if base and is_mark else c
    return tokens, "cut at spaces and by characters" if _UNSPACED.search(text) else "cut at spaces"


def aligned(rows: Sequence[Sequence[str]], gap: str, *, right: bool = False) -> list[str]:
    """Rows of texts as lines, each column as wide as its widest text; ``right`` aligns all but the first column to the right.

    >>> aligned([("", "a"), ("黑猫", "12")], " ", right=True)
    ['      a', '黑猫 12']
    """
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        spaces = [" " * (width - display_width(text)) for text, width in zip(row, widths, strict=True)]
        texts = [x[::-1] if right and j else x for j, x in enumerate(zip(row, spaces, strict=True))]
        lines.append(gap.join(map("".join, texts)).rstrip())
    return lines


def ruled(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows :func:`aligned` to the right, with a line below the first, which has the headings.

    >>> print(*ruled([("", "a"), ("black", "12")]), sep="\\n")
             a
    ──────────
    black   12
    """
    head, *body = aligned(rows, "   ", right=True)
    return [head, "─" * max(map(display_width, (head, *body))), *body]
