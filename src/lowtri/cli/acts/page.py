"""The demo as one page: a plain file that needs nothing but its neighbours in the folder."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from lowtri.cli.acts.stage import Told

__all__ = ["Played", "as_html"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1a202c; background: #fff }
h2 { margin: 2.5rem 0 .2rem; border-top: 1px solid #e2e8f0; padding-top: 1.5rem }
pre { background: #f7fafc; border: 1px solid #e2e8f0; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.35 }
img { max-width: 100%; display: block; margin: 1rem 0 }
ul.promises { list-style: none; padding: 0 }
.kept::before { content: "✓ "; color: #2f855a } .broken::before { content: "✗ " } .broken { color: #c53030 }
.small { color: #4a5568; font-size: .9em }
"""


class Played(NamedTuple):
    """An act that was played."""

    name: str
    title: str
    sentence: str
    told: Told
    seconds: float


def as_html(acts: Sequence[Played], verdict: str, machine: str) -> str:
    """The page as text. Pictures and files are named as they lie beside it."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>lowtri demo: {escape(verdict)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>lowtri: {escape(verdict)}</h1>",
        "<p>You say once who may see whom, and that one statement gives the attention, a cache that fits it, a check that no "
        "model peeks, and a picture.</p>",
        f'<p class="small">{escape(machine)}</p>',
        "<ol>" + "".join(f'<li><a href="#{a.name}">{escape(a.title)}</a></li>' for a in acts) + "</ol>",
    ]
    for number, act in enumerate(acts, start=1):
        parts.append(f'<h2 id="{act.name}">{number}. {escape(act.title)}</h2><p>{escape(act.sentence)}</p>')
        parts.append('<ul class="promises">')
        parts += [f'<li class="{_kept(p.kept)}">{escape(p.text)}</li>' for p in act.told.promises]
        parts.append("</ul>")
        parts += [f'<img src="{escape(name)}" alt="{escape(act.title)}">' for name in act.told.pictures]
        parts.append(f"<pre>{escape(act.told.text)}</pre>")
        links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in act.told.files)
        parts.append(f'<p class="small">{links}{". " * bool(links)}{act.seconds:.1f} s</p>')
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _kept(kept: bool) -> str:
    return "kept" if kept else "broken"
