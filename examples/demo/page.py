"""The demo as one page: a plain file that needs nothing but its neighbours in the folder."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from demo.context import Result
from lowtri.pictures.labels import spelled_out

__all__ = ["Part", "as_html"]

_STYLE = """
:root { --ink: #1a202c; --paper: #fff; --line: #e2e8f0; --box: #f7fafc; --faint: #4a5568; --good: #276749; --bad: #c53030;
  --link: #2b6cb0; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --paper: #111827; --line: #374151; --box: #1a2230;
  --faint: #a3aab8; --good: #68d391; --bad: #fc8181; --link: #7ab8f5 } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere }
a { color: var(--link) }
h2 { margin: 2.5rem 0 .2rem; border-top: 1px solid var(--line); padding-top: 1.5rem }
pre { background: var(--box); border: 1px solid var(--line); padding: .8rem; overflow-x: auto; font-size: 13px;
  line-height: 1.35; overflow-wrap: normal }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0 }
ul.checks { list-style: none; padding: 0 }
.passed::before { content: "✓ "; color: var(--good) } .failed::before { content: "✗ " } .failed { color: var(--bad) }
.small { color: var(--faint); font-size: .9em }
"""


class Part(NamedTuple):
    """A part of the demo after its run."""

    name: str
    title: str
    sentence: str
    result: Result
    seconds: float


def as_html(parts: Sequence[Part], verdict: str, machine: str) -> str:
    """The page as text, with relative links to the pictures and files in its folder."""
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>lowtri demo: {escape(verdict)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>lowtri: {escape(verdict)}</h1>",
        "<p>You say once who may see whom, and that one statement gives the attention, a cache that fits it, a check that no "
        "model peeks, and a picture.</p>",
        f'<p class="small">{escape(machine)}</p>',
        "<ol>" + "".join(f'<li><a href="#{a.name}">{escape(a.title)}</a></li>' for a in parts) + "</ol>",
    ]
    for number, part in enumerate(parts, start=1):
        lines.append(f'<h2 id="{part.name}">{number}. {escape(part.title)}</h2><p>{escape(part.sentence)}</p>')
        lines.append('<ul class="checks">')
        lines += [f'<li class="{"passed" if c.passed else "failed"}">{_text(c.text)}</li>' for c in part.result.checks]
        lines.append("</ul>")
        lines += [f'<img src="{escape(name)}" alt="{escape(part.title)}">' for name in part.result.pictures]
        lines.append(f"<pre>{_text(part.result.text)}</pre>")
        links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in part.result.files)
        lines.append(f'<p class="small">{links}{". " * bool(links)}{part.seconds:.1f} s</p>')
    return "\n".join([*lines, "</body></html>"]) + "\n"


def _text(text: str) -> str:
    return escape(spelled_out(text, keep="\n"))
