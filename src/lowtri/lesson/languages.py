"""The texts of the lesson in one language, and the little markup that they may contain.

A text is plain but for ``**strong**``, ``*emphasis*``, `` `code` ``, ``[q:a word in the hue of the queries]`` (q, k, v or w)
and ``{name}`` for a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from lowtri.errors import DataError

LANGUAGES = {"en": "en", "id": "id", "th": "th", "zh": "zh-Hant"}  # option -> the page's lang attribute


JOINTS = {"th": "", "zh": ""}  # what stands between the words of a sentence; a space in other languages
DECIMALS = {"id": ","}  # the sign before decimals; a point in other languages


def assets() -> Path:
    """The folder of the lesson's templates, scripts, texts and measurements."""
    return Path(__file__).parent / "assets"


def texts(language: str) -> dict[str, str]:
    """Key -> text.

    >>> texts("en")["name"]
    'English'

    Raises:
        DataError: if the lesson is not written in this language.
    """
    if language not in LANGUAGES:
        raise DataError(f"lesson: there is no language {language!r}. Fix: one of {', '.join(LANGUAGES)}.")
    content: dict[str, str] = json.loads((assets() / "languages" / f"{language}.json").read_text(encoding="utf-8"))
    return content


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with its ``{name}`` replaced; names without a value stay, because the page's scripts fill them.

    >>> filled("{a} of {b}", {"a": "1"})
    '1 of {b}'
    """
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)


def markup(text: str) -> str:
    """A text as HTML.

    >>> markup("**a** < `b` [q:c]")
    '<strong>a</strong> &lt; <code>b</code> <span class="q">c</span>'
    """
    parts = re.split(r"(`[^`]*`)", escape(text, quote=False))
    return "".join(f"<code>{part[1:-1]}</code>" if part.startswith("`") else _prose(part) for part in parts)


def _prose(html: str) -> str:
    html = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html)
    html = re.sub(r"\*([A-Za-z])\*", r"<var>\1</var>", html)  # a variable is italic in every script, emphasis is not
    html = re.sub(r"\*(.+?)\*", r"<em>\1</em>", html)
    return re.sub(r"\[([qkvw]):([^\]]+)\]", r'<span class="\1">\2</span>', html)
