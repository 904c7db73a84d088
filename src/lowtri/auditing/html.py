"""The report as one page and as one picture: no network, no script, readable at 390 pixels and on a dark screen."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from lowtri.auditing.drawing import LOOKS
from lowtri.masks.labels import spelled_out

if TYPE_CHECKING:
    from lowtri.auditing.report import AuditReport

__all__ = ["as_html", "as_svg"]

_WIDE, _SIDE, _TOP = 340.0, 34.0, 34.0  # so that its letters can still be read on a telephone
_LINE = 18.0
_NAMESPACE = ' xmlns="http://www.w3.org/2000/svg"'
_COLOURS = (
    "svg{--ink:#1a202c;--paper:#fff;--line:#cbd5e0;--seen:#2b6cb0;--blind:#fff;--open:#bee3f8;--leak:#c53030}"
    "@media(prefers-color-scheme:dark){"
    "svg{--ink:#e2e8f0;--paper:#171923;--line:#4a5568;--seen:#63b3ed;--blind:#171923;--open:#2c5282;--leak:#fc5c5c}}"
    ".seen{fill:var(--seen)}.open{fill:var(--open)}.leak{fill:var(--leak)}.blind{fill:var(--blind);stroke:var(--seen)}"
    ".hidden{fill:url(#hatch)}.frame{fill:none;stroke:var(--line)}text{fill:var(--ink);font:12px system-ui,sans-serif}"
)
_PAGE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
    "overflow-wrap:anywhere;color:#1a202c;background:#fff}svg{width:100%;max-width:34em;height:auto}"
    "td{padding:.2em .8em .2em 0;vertical-align:top}td:not(:last-child){white-space:nowrap}"
    ".leak{color:#c53030}.clean{color:#2f855a}.undecided{color:#975a16}"
    "@media(prefers-color-scheme:dark){body{color:#e2e8f0;background:#171923}"
    ".leak{color:#fc8181}.clean{color:#68d391}.undecided{color:#f6ad55}}"
)


def as_html(report: AuditReport, lines: list[str]) -> str:
    """The whole page; `lines` is the drawing, one sign a cell."""
    rows = "".join(
        f"<tr><td>{_text(f.probe)}</td><td>{_text(f.status)}</td><td>{_text(f.message)}</td></tr>"
        for f in report.findings
    )
    kind = {"leak": "leak", "no leak found": "clean", "could not decide": "undecided"}[report.verdict]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>lowtri audit</title>'
        f'<style>{_PAGE}</style></head><body><h1 class="{kind}">{_text(report.verdict)}</h1><p>{_text(report.message)}</p>'
        f"<p>{_text(report.model)} against <code>{_text(report.mask)}</code></p>"
        f"{as_svg(lines, report.n)}<table>{rows}</table>"
        f"{''.join(f'<p>{_text(note)}</p>' for note in report.notes)}</body></html>\n"
    )


def as_svg(lines: list[str], n: int, *, alone: bool = False) -> str:
    """The drawing with its axes and a legend in the colours that it uses; `alone` as a file of its own."""
    cell = min(24.0, (_WIDE - _SIDE - 8) / len(lines))
    side = cell * len(lines)
    step = -(-n // len(lines))
    used = [sign for sign in LOOKS if any(sign in line for line in lines)]
    high = _TOP + side + 12 + _LINE * (len(used) + (step > 1))
    parts = [
        f'<svg{_NAMESPACE if alone else ""} viewBox="0 0 {_WIDE:.0f} {high:.0f}" width="{_WIDE:.0f}" '
        f'height="{high:.0f}" role="img"><title>who sees whom: queries down, keys across</title><style>{_COLOURS}</style>'
        '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0V5" style="stroke:var(--line)" stroke-width="2"/></pattern></defs>'
        '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
        f'<text x="{_SIDE}" y="14">keys across →</text>'
        f'<text transform="translate(12,{_TOP}) rotate(90)">queries down →</text>'
        f'<text x="{_SIDE}" y="29">0</text><text x="{_SIDE + side:.1f}" y="29" text-anchor="end">{n - 1}</text>'
    ]
    for q, line in enumerate(lines):
        k = 0
        for sign, alike in groupby(line):
            count = len(list(alike))
            look, name = LOOKS[sign]
            said = f"{_span('quer', 'y', 'ies', q, 1, step, n)}, {_span('key', '', 's', k, count, step, n)}: {name}"
            parts.append(
                f'<rect class="{look}" x="{_SIDE + k * cell:.2f}" y="{_TOP + q * cell:.2f}" width="{count * cell:.2f}" '
                f'height="{cell:.2f}"><title>{said}</title></rect>'
            )
            k += count
    parts.append(f'<rect class="frame" x="{_SIDE}" y="{_TOP}" width="{side:.1f}" height="{side:.1f}"/>')
    y = _TOP + side + 12
    for sign in used:
        look, name = LOOKS[sign]
        parts.append(f'<rect class="{look}" x="{_SIDE}" y="{y}" width="12" height="12"/>')
        parts.append(f'<text x="{_SIDE + 20}" y="{y + 10.5}">{name}</text>')
        y += _LINE
    if step > 1:
        parts.append(f'<text x="{_SIDE}" y="{y + 10.5}">a cell stands for {step} x {step} pairs</text>')
    return "\n".join([*parts, "</svg>"])


def _span(stem: str, one: str, more: str, first: int, count: int, step: int, n: int) -> str:
    """Which positions some cells stand for: "query 3", "keys 8 to 15"."""
    start, stop = first * step, min((first + count) * step, n) - 1
    return f"{stem}{one} {start}" if start == stop else f"{stem}{more} {start} to {stop}"


def _text(text: str) -> str:
    return escape(spelled_out(text))
