"""What reports are written as: HTML for notebooks and pages of their own, its tables, and JSON that every parser accepts.

The HTML has its own colours, which no style sheet of a notebook reaches.

Notebooks put an output into their own page, so that the style sheets of both meet:

- The style sheet of an output names its own class with the specificity of an id, and takes back what others say. Each kind of output
  has a class of its own, so that two outputs of one notebook leave each other alone.
- Colours follow the page, and never the system, which may be dark where the page is light: JupyterLab, VS Code, Colab, Sphinx and
  MkDocs mark dark pages; any other page counts as light.
- A picture is an image, of which a page sees no part.
- GitHub, and notebooks that are not trusted, remove style sheets, classes and ``hidden``. What is left can be read: sentences, tables,
  and each picture as text, which the style sheet hides.

A page of its own follows the reader's system.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lowtri.pictures.labels import spelled_out
from lowtri.pictures.svg import declared

_DARK_PAGES = (
    *('[data-jp-theme-light="false"]', ".vscode-dark", ".vscode-high-contrast:not(.vscode-high-contrast-light)"),
    *('html[theme="dark"]', '[data-theme="dark"]', '[data-md-color-scheme="slate"]'),
)
_STYLE = """
:root { all: initial; display: block; box-sizing: border-box; max-width: 76rem; padding: clamp(.5rem, 2vw, 1rem); color-scheme: light;
  COLOURS; font: var(--s1)/1.6 var(--sans); color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
DARK { color-scheme: dark }
:root :where(:not(svg, svg *)) { all: revert; box-sizing: border-box }
:root p { max-width: 46rem; margin: .6rem 0 } :root figure { margin: 0 }
:root table { color: inherit; font: inherit; border-spacing: 0 }
:root .scroll { max-width: 100%; overflow-x: auto } :root .text { display: none }
"""
_PAGE = """
.lowtri-page { margin: 0; color-scheme: light dark; COLOURS; background: var(--paper) }
.lowtri-page > :root { color-scheme: light dark; font-size: var(--s2); margin: 0 auto; padding: 2rem clamp(1rem, 3vw, 2rem) 4rem }
"""
_OUTPUT = ":root h1 { font-size: var(--s4) }"
_CARD = ":root { width: fit-content; max-width: 100%; padding: .3rem } :root figcaption { margin: .2rem .6rem; max-width: none }"
_SCROLLED_BELOW = 0.6  # an image is drawn no smaller than this: letters of 12 px stay readable


def scope(kind: str) -> str:
    """The selector of a kind of output; its ``:not`` has the specificity of an id.

    >>> scope("mask")
    '.lowtri-mask:not(#_)'
    """
    return f".lowtri-{kind}:not(#_)"


def output(kind: str, parts: Iterable[str], style: str = "") -> str:
    """What a notebook shows.

    Args:
        kind: names the class, and so the reach of ``style``.
        parts: the content.
        style: more rules; in all of them ``:root`` stands for the output.
    """
    # A notebook's page may have a root with letters of another size than 16 px.
    sheet = re.sub(r"([\d.]+)rem", lambda size: f"{16 * float(size[1]):g}px", _sheet(kind, _OUTPUT + style))
    return f'<style>{sheet}</style><div class="lowtri-{kind}">\n' + "\n".join(parts) + "\n</div>"


def page(kind: str, title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole HTML page with these parts: self-contained, without network, script or font."""
    # A page needs no namespace for its pictures.
    content = "\n".join(parts).replace(' xmlns="http://www.w3.org/2000/svg"', "")
    body = f'<body class="lowtri-page"><div class="lowtri-{kind}">\n{content}\n</div></body>'
    return html_document(title, _sheet(kind, style + _PAGE), body)


def html_document(title: str, sheet: str, body: str, language: str = "en", head: str = "") -> str:
    """An HTML file: its head, with a style sheet, and the element ``body``; ``head`` is what its head has besides."""
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html>\n<html lang="{language}"><head>{meta}{head}<title>{escape(title)}</title>'
        f"<style>{sheet}</style></head>\n{body}</html>\n"
    )


def card(kind: str, picture: str, caption: str, text: str) -> str:
    """The output of a single picture: an image with a caption; ``text`` is the same picture as text."""
    words = f"<figcaption><code>{escape(caption)}</code></figcaption>"
    return output(kind, [f"<figure>{image(picture, text)}{words}</figure>"], _CARD)


def image(picture: str, text: str = "") -> str:
    """An SVG picture as an image, and as text for where style sheets are removed."""
    size = re.search(r'width="(\d+)" height="(\d+)"', picture)
    assert size is not None
    title = re.search(r"<title>(.*?)</title>", picture)
    width = int(size[1])
    least = _SCROLLED_BELOW * width
    source = base64.b64encode(picture.encode()).decode()
    words = f'<pre class="text">{escape(text)}</pre>' if text else ""
    return (
        f'<div class="scroll"><img width="{width}" height="{size[2]}" alt="{title[1] if title else ""}" '
        f'style="max-width:100%;min-width:{least:.0f}px;height:auto" src="data:image/svg+xml;base64,{source}"></div>{words}'
    )


def shared_style(selector: str) -> str:
    """The type scale, headings and cards of the lesson and of all pages, for what is inside of ``selector``."""
    sheet = (Path(__file__).parents[1] / "assets" / "shared.css").read_text(encoding="utf-8")
    return sheet.replace(":root", selector)


def _sheet(kind: str, style: str) -> str:
    name = scope(kind)
    dark = ", ".join(f"{dark_page} {name}" for dark_page in _DARK_PAGES)
    rules = _STYLE.replace("DARK", dark) + shared_style(name).replace(f":where({name})", name) + style
    return rules.replace("COLOURS", declared("both")).replace(":root", name)


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
