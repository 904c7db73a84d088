"""The output formats of reports: JSON that every parser accepts, and self-contained HTML pages without network, script or font."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from lowtri.masks.labels import spelled_out
from lowtri.masks.palette import GROUND, HATCH, INK, KEY, LEAK, LINE, PAPER, QUERY, SOFT, VALUE, VISIBLE, Colour

__all__ = ["colours", "declared", "html_text", "json_text", "json_value", "page", "shared_style"]

_PALETTE = {  # the names that style sheets use
    **{
        "paper": GROUND,
        "card": PAPER,
        "ink": INK,
        "soft": SOFT,
        "line": LINE,
        "hatch": HATCH,
        "bad": LEAK,
        "good": VALUE,
    },
    **{"q-hue": QUERY, "k-hue": KEY, "v-hue": VALUE, "w-hue": VISIBLE},
}
# The page's own body has its class: in a notebook, where only the <div> stays, nothing else is coloured.
_STYLE = """
.lowtri, .lowtri-page { color-scheme: light dark }
.lowtri-page { margin: 0; background: var(--paper) }
.lowtri { font: var(--s2)/1.6 var(--sans); box-sizing: border-box; max-width: 76rem; margin: 0 auto;
  padding: 2rem clamp(1rem, 3vw, 2rem) 4rem; color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
.lowtri > p { max-width: 46rem }
"""


def page(title: str, parts: Iterable[str], style: str, own: Mapping[str, Colour] | None = None) -> str:
    """A page for narrow and wide, light and dark screens; ``own`` are colours that only this page has."""
    sheet = colours(".lowtri, .lowtri-page", own) + shared_style(".lowtri") + _STYLE + style
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html_text(title)}</title>'
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head>{head}<style>{sheet}</style></head>',
        '<body class="lowtri-page"><div class="lowtri">',
        *parts,
        "</div></body></html>",
    ]
    return "\n".join(lines) + "\n"


def shared_style(scope: str) -> str:
    """The type scale, headings and cards of the lesson and of all pages, for what is inside of ``scope``."""
    sheet = (Path(__file__).parent / "assets" / "shared.css").read_text(encoding="utf-8")
    return sheet.replace(":root", scope)


def colours(selector: str, own: Mapping[str, Colour] | None = None) -> str:
    """CSS variables for the palette, with one value for light screens and one for dark ones.

    >>> colours("svg").splitlines()[0][:27]
    'svg { --paper: #fbfaf7; --c'
    """
    rules = [f"{selector} {{ {declared(theme, own)} }}" for theme in ("light", "dark")]
    return f"{rules[0]}\n@media (prefers-color-scheme: dark) {{ {rules[1]} }}\n"


def declared(theme: str, own: Mapping[str, Colour] | None = None) -> str:
    """The declarations of the palette's variables for one theme, "light" or "dark"."""
    return "; ".join(f"--{name}: {getattr(colour, theme)}" for name, colour in {**_PALETTE, **(own or {})}.items())


def html_text(text: str, keep: str = "") -> str:
    """Text for a page: markup escaped, invisible characters (but those in `keep`) spelled out."""
    return escape(spelled_out(text, keep))


def json_text(value: Any) -> str:
    """Indented JSON in which every character is visible; see :func:`json_value`."""
    text = json.dumps(json_value(value), ensure_ascii=False, indent=2, allow_nan=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def json_value(value: Any) -> Any:
    """Dicts, lists, texts and numbers alone: arrays as lists, "inf", "-inf" and "nan" as texts.

    >>> json_value({"size": (1.0, float("inf"))})
    {'size': [1.0, 'inf']}
    """
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
