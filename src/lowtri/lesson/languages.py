"""What the lesson's pages need of a language besides its sentences, and the little markup of these as HTML."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from lowtri.sentences import LANGUAGES as LANGUAGES
from lowtri.sentences import filled as filled
from lowtri.sentences import texts as texts

JOINTS = {"th": "", "zh": ""}  # what stands between the words of a sentence; a space in other languages
DECIMALS = {"id": ","}  # the sign before decimals; a point in other languages


def assets() -> Path:
    """The folder of the lesson's templates, scripts and measurements."""
    return Path(__file__).parent / "assets"


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
