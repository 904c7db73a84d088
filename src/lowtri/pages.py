"""The output formats of reports: JSON that every parser accepts, and self-contained HTML pages without network, script or font."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from lowtri.masks.labels import spelled_out
from lowtri.masks.palette import INK, PAPER

__all__ = ["colours", "html_text", "json_text", "json_value", "page"]

_LIGHT = {"ink": INK.light, "paper": PAPER.light}
_DARK = {"ink": INK.dark, "paper": PAPER.dark}
# The page's own body has its class: in a notebook, where only the <div> stays, nothing else is coloured.
_STYLE = """
.lowtri, .lowtri-page { color-scheme: light dark }
.lowtri-page { margin: 0; background: var(--paper) }
.lowtri { font: 15px/1.5 system-ui, sans-serif; box-sizing: border-box; max-width: 70rem; margin: 0 auto;
  padding: 2rem 1rem; color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
"""


def page(title: str, parts: Iterable[str], style: str, light: Mapping[str, str], dark: Mapping[str, str]) -> str:
    """A page for narrow and wide, light and dark screens; `light` and `dark` are colours that `style` and `parts` use."""
    palette = colours(".lowtri, .lowtri-page", {**_LIGHT, **light}, {**_DARK, **dark})
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html_text(title)}</title>'
    lines = [
        "<!doctype html>",
        f'<html lang="en"><head>{head}<style>{palette}{_STYLE}{style}</style></head>',
        '<body class="lowtri-page"><div class="lowtri">',
        *parts,
        "</div></body></html>",
    ]
    return "\n".join(lines) + "\n"


def colours(selector: str, light: Mapping[str, str], dark: Mapping[str, str]) -> str:
    """CSS variables with one value for light screens and one for dark ones."""
    rules = [f"{selector} {{ {'; '.join(f'--{name}: {value}' for name, value in c.items())} }}" for c in (light, dark)]
    return f"{rules[0]}\n@media (prefers-color-scheme: dark) {{ {rules[1]} }}\n"


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
