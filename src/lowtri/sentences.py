"""The sentences that readers meet in four languages: those of the lesson, of explain, and of the notebooks. One table for all.

A sentence is plain but for ``**strong**``, ``*emphasis*``, `` `code` ``, ``[q:a word in the hue of the queries]`` (q, k, v or w)
and ``{name}`` for what is filled in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lowtri.errors import DataError

LANGUAGES = {"en": "en", "id": "id", "th": "th", "zh": "zh-Hant"}  # option -> the lang attribute of a page


@cache
def texts(language: str, what: str = "lesson") -> dict[str, str]:
    """Key -> sentence.

    >>> texts("en")["name"]
    'English'

    Raises:
        DataError: if there is no such language; ``what`` names the function that was asked for it.
    """
    if language not in LANGUAGES:
        raise DataError(f"{what}: there is no language {language!r:.60}. Fix: one of {', '.join(LANGUAGES)}.")
    path = Path(__file__).parent / "assets" / "languages" / f"{language}.json"
    content: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return content


def filled(text: str, values: Mapping[str, str]) -> str:
    """A sentence with its ``{name}`` replaced; names without a value stay, because scripts of a page fill them.

    >>> filled("{a} of {b}", {"a": "1"})
    '1 of {b}'
    """
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)


def without_markup(text: str) -> str:
    """A sentence for a terminal.

    >>> without_markup("**a** `b` [q:c] *i*")
    'a b c i'
    """
    return re.sub(r"\*\*|[*`]", "", re.sub(r"\[[qkvw]:([^\]]+)\]", r"\1", text))


def sentence(language: str, key: str, what: str = "explain", **values: object) -> str:
    """One sentence, filled in.

    >>> sentence("en", "equation.pair", q=1, k=2)
    'query 1, key 2'
    """
    return filled(texts(language, what)[key], {name: str(value) for name, value in values.items()})
