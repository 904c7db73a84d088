"""The declared, the observed and the leaking pairs, drawn as text and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtri.masks.palette import HATCH, LEAK, PAPER, PARTLY, VISIBLE
from lowtri.pages import colours

__all__ = ["cells", "draw_svg", "draw_text"]


class _Look(NamedTuple):
    style: str  # the class in the style sheet
    meaning: str


_LOOKS = {
    "█": _Look("seen", "declared and seen"),
    "○": _Look("blind", "declared, never seen"),
    "▒": _Look("open", "declared, not looked at"),
    "·": _Look("hidden", "hidden"),
    "✗": _Look("leak", "leak"),
}
_OWN = {"paper": PAPER, "line": HATCH, "seen": VISIBLE, "blind": PAPER, "open": PARTLY, "leak": LEAK}
_STYLE = (
    colours("svg", _OWN)
    + ".seen{fill:var(--seen)}.open{fill:var(--open)}.leak{fill:var(--leak)}.blind{fill:var(--blind);stroke:var(--seen)}"
    ".hidden{fill:url(#hatch)}.frame{fill:none;stroke:var(--line)}text{fill:var(--ink);font:12px system-ui,sans-serif}"
)
_WIDE, _SIDE, _TOP, _LINE = 340.0, 34.0, 34.0, 18.0  # so that its letters can still be read on a telephone


def cells(
    allowed: npt.NDArray[np.bool_], seen: npt.NDArray[np.float64], leaks: Sequence[tuple[int, int]], most: int
) -> list[str]:
    """One line for each query (or for each block of queries, when there are more than `most`), one sign for each key."""
    n = len(allowed)
    leaking = np.zeros((n, n), bool)
    for query, key in leaks:
        if query < n and key < n:
            leaking[query, key] = True
    side = -(-n // most)

    def sign(q: int, k: int) -> str:
        block = np.s_[q : q + side, k : k + side]
        looked = seen[block][allowed[block]]
        if leaking[block].any():
            return "✗"
        if not looked.size:
            return "·"
        if np.isnan(looked).all():
            return "▒"
        return "█" if np.nan_to_num(looked).max() > 0 else "○"

    return ["".join(sign(q, k) for k in range(0, n, side)) for q in range(0, n, side)]


def draw_text(lines: list[str], n: int) -> str:
    """The drawing with its legend; queries go down, keys go right."""
    step = -(-n // len(lines))
    scale = f"   (each sign stands for {step} x {step} pairs)" if step > 1 else ""
    used = [f"{sign} {_LOOKS[sign].meaning}" for sign in _used(lines)]
    return "\n".join([*("  " + line for line in lines), "  " + "   ".join(used) + scale])


def draw_svg(lines: list[str], n: int, *, namespace: str = "") -> str:
    """The drawing with its axes and a legend in the colours that it uses; a file of its own names the namespace."""
    cell = min(24.0, (_WIDE - _SIDE - 8) / len(lines))
    side, step, used = cell * len(lines), -(-n // len(lines)), _used(lines)
    high = _TOP + side + 12 + _LINE * (len(used) + (step > 1))
    parts = [
        f'<svg{namespace} viewBox="0 0 {_WIDE:.0f} {high:.0f}" width="{_WIDE:.0f}" '
        f'height="{high:.0f}" role="img"><title>who sees whom: queries down, keys across</title><style>{_STYLE}</style>'
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
            style, meaning = _LOOKS[sign]
            queries, keys = _span("query", "queries", q, 1, step, n), _span("key", "keys", k, count, step, n)
            parts.append(
                f'<rect class="{style}" x="{_SIDE + k * cell:.2f}" y="{_TOP + q * cell:.2f}" width="{count * cell:.2f}" '
                f'height="{cell:.2f}"><title>{queries}, {keys}: {meaning}</title></rect>'
            )
            k += count
    parts.append(f'<rect class="frame" x="{_SIDE}" y="{_TOP}" width="{side:.1f}" height="{side:.1f}"/>')
    y = _TOP + side + 12
    for sign in used:
        style, meaning = _LOOKS[sign]
        parts.append(f'<rect class="{style}" x="{_SIDE}" y="{y}" width="12" height="12"/>')
        parts.append(f'<text x="{_SIDE + 20}" y="{y + 10.5}">{meaning}</text>')
        y += _LINE
    if step > 1:
        parts.append(f'<text x="{_SIDE}" y="{y + 10.5}">a cell stands for {step} x {step} pairs</text>')
    return "\n".join([*parts, "</svg>"])


def _used(lines: list[str]) -> list[str]:
    return [sign for sign in _LOOKS if any(sign in line for line in lines)]


def _span(one: str, several: str, first: int, count: int, step: int, n: int) -> str:
    """Which positions some cells stand for: "query 3", "keys 8 to 15"."""
    start, last = first * step, min((first + count) * step, n) - 1
    return f"{one} {start}" if start == last else f"{several} {start} to {last}"
