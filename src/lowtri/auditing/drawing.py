"""The declared, the observed and the leaking pairs, drawn as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtri.masks.svg_parts import HIDDEN, OUTLINED, cell_row, document, fill, grid_lines, legend, text

__all__ = ["cells", "draw_svg", "draw_text"]


class _Look(NamedTuple):
    fill: str  # the attributes of its cells
    meaning: str


_LOOKS = {
    "█": _Look(fill("visible"), "declared and seen"),
    "○": _Look(OUTLINED, "declared, never seen"),
    "▒": _Look(fill("partly"), "declared, not looked at"),
    "·": _Look(HIDDEN, "hidden"),
    "✗": _Look(fill("leak"), "leak"),
}
_MARGIN, _SIDE, _TOP, _LINE = 10, 34, 40, 20
_WIDE = 340  # its letters can still be read on a telephone


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


def draw_svg(lines: list[str], n: int) -> str:
    """The drawing with its axes and a legend in the colours that it uses, as SVG."""
    cell = min(24.0, (_WIDE - _SIDE - _MARGIN) / len(lines))
    side, step, used = cell * len(lines), -(-n // len(lines)), _used(lines)

    def body() -> Iterator[str]:
        yield text(_SIDE, 18, "keys →")
        yield f'<text transform="translate({_MARGIN + 2},{_TOP}) rotate(90)">queries →</text>'
        yield text(_SIDE, 35, "0")
        yield text(_SIDE + side, 35, f"{n - 1:,}", ' text-anchor="end"')
        for q, line in enumerate(lines):

            def title(k: int, count: int, q: int = q, line: str = line) -> str:
                keys = _span("key", "keys", k, count, step, n)
                return f"{_span('query', 'queries', q, 1, step, n)}, {keys}: {_LOOKS[line[k]].meaning}"

            yield from cell_row(_SIDE, _TOP + q * cell, [_LOOKS[sign].fill for sign in line], cell, cell, title)
        yield grid_lines(_SIDE, _TOP, len(lines), len(lines), cell, cell)
        y = _TOP + side + 12
        for sign in used:
            yield from legend(_SIDE, y, [_LOOKS[sign]])
            y += _LINE
        if step > 1:
            yield text(_SIDE, y + 11, f"a cell: {step:,} x {step:,} pairs")

    high = _TOP + side + 12 + _LINE * (len(used) + (step > 1))
    return document(max(_SIDE + side + _MARGIN, _SIDE + 200), high, "who sees whom: queries down, keys across", body())


def _used(lines: list[str]) -> list[str]:
    return [sign for sign in _LOOKS if any(sign in line for line in lines)]


def _span(one: str, several: str, first: int, count: int, step: int, n: int) -> str:
    """Which positions some cells stand for: "query 3", "keys 8 to 15"."""
    start, last = first * step, min((first + count) * step, n) - 1
    return f"{one} {start}" if start == last else f"{several} {start} to {last}"
