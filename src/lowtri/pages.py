"""The output formats of reports: JSON that every parser accepts, and the texts and tables of HTML pages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from lowtri.masks.labels import spelled_out

__all__ = ["TABLE_STYLE", "html_table", "html_text", "json_text", "json_value"]

TABLE_STYLE = """:root .rows { border-collapse: collapse; font-size: var(--s1); line-height: 1.45 }
:root .rows :is(td, th) { text-align: left; padding: .5rem .9rem .5rem 0; vertical-align: top; border-bottom: 1px solid var(--line) }
:root .rows th { color: var(--soft); font-size: var(--s0); font-weight: 500 }
:root .rows :is(td, th):not(:last-child) { white-space: nowrap } :root .rows td:last-child { width: 100%; padding-right: 0 }
"""


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts that wraps its last column; :data:`TABLE_STYLE` belongs to it."""
    lines = ["".join(f"<th>{html_text(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html_text(cell)}</td>" for cell in row) for row in rows]
    first, *others = (f"<tr>{line}</tr>" for line in lines)
    return f'<table class="rows"><thead>{first}</thead><tbody>{"".join(others)}</tbody></table>'


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
