"""The parts of every SVG picture: the frame, its colours for light and dark screens, texts and legends.

Colours are SVG attributes, which every program reads, for a light background; a style sheet replaces them on dark screens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.palette import HATCH, INK, KEY, LEAK, LINE, PAPER, PARTLY, QUERY, SOFT, VALUE, VISIBLE

__all__ = [
    "HIDDEN",
    "LETTER",
    "document",
    "fill",
    "figure",
    "grid_lines",
    "legend",
    "legend_width",
    "page",
    "shaded",
    "text",
]

LETTER = 7.2  # width of one column of text at 12 px

_COLOURS = {  # class -> property, colour
    **{"ink": ("fill", INK), "paper": ("fill", PAPER), "line": ("stroke", LINE), "hatch": ("stroke", HATCH)},
    **{"visible": ("fill", VISIBLE), "partly": ("fill", PARTLY), "leak": ("fill", LEAK), "soft": ("fill", SOFT)},
    **{"query": ("fill", QUERY), "key": ("fill", KEY), "value": ("fill", VALUE)},
}
_HATCHING = (
    '<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M0 0V6" class="lowtri-hatch" stroke="{HATCH.light}" stroke-width="2"/></pattern></defs>'
)

HIDDEN = 'fill="url(#hidden)"'  # the attributes of a hatched cell


def fill(name: str) -> str:
    """The attributes of a shape or text in a colour: ink, paper, visible, partly, leak, soft, query, key or value.

    >>> fill("leak")
    'class="lowtri-leak" fill="#b3261e"'
    """
    return f'class="lowtri-{name}" fill="{_COLOURS[name][1].light}"'


def document(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """A whole SVG file; on a narrow screen it is smaller, in its own proportions."""
    content = "\n".join(body)
    if HIDDEN in content:
        content = f"{_HATCHING}\n{content}"
    used = {"ink", "paper", *re.findall(r'class="lowtri-(\w+)"', content)}
    dark = "".join(f".lowtri-{name}{{{c[0]}:{c[1].dark}}}" for name, c in _COLOURS.items() if name in used)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="ui-monospace, Menlo, Consolas, '
        f'\'DejaVu Sans Mono\', monospace" font-size="12" {fill("ink")} style="max-width:100%;height:auto">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>\n"
        f'<rect width="100%" height="100%" {fill("paper")}/>\n{content}\n</svg>\n'
    )


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text; ``words`` are escaped."""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(words)}</text>'


def shaded(
    shares: NDArray[np.float64], filling: str, x: float, y: float, wide: float, high: float, *, other: str = HIDDEN
) -> Iterator[str]:
    """Cells in 16 opacities of one colour, from transparent at 0 to full at 1.

    Cells of one opacity are one path, so that a picture does not grow with the attributes of its cells.

    >>> len(list(shaded(np.eye(3), fill("visible"), 0, 0, 10, 10)))
    1

    Args:
        shares: (rows, columns) in 0 .. 1; NaN for cells that are filled with ``other``.
    """
    levels = np.nan_to_num(np.ceil(shares * 16 - 1e-9), nan=-1)  # only 0 is level 0
    for level in np.unique(levels[levels != 0]).astype(int):
        outline = []
        for i, row in enumerate(levels):
            for first, end in np.flatnonzero(np.diff(np.r_[False, row == level, False])).reshape(-1, 2):
                across = f"{(end - first) * wide:.5g}"
                outline.append(f"M{x + first * wide:.5g} {y + i * high:.5g}h{across}v{high:.5g}h-{across}z")
        look = other if level < 0 else f'{filling} fill-opacity="{level / 16:.4g}"'
        yield f'<path d="{"".join(outline)}" {look}/>'


def grid_lines(x: float, y: float, rows: int, columns: int, wide: float, high: float) -> str:
    """The lines around the cells of a matrix."""
    lines = [f"M{x:.1f} {y + i * high:.1f}h{columns * wide:.1f}" for i in range(rows + 1)]
    lines += [f"M{x + j * wide:.1f} {y:.1f}v{rows * high:.1f}" for j in range(columns + 1)]
    return f'<path d="{"".join(lines)}" fill="none" class="lowtri-line" stroke="{LINE.light}" stroke-width="0.7"/>'


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A swatch for each way to fill a cell, (attributes, meaning), and its meaning on its right."""
    for filling, name in entries:
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="14" stroke="{LINE.light}" {filling}/>'
        yield text(x + 20, y + 11, name)
        x += 42 + LETTER * len(name)


def legend_width(entries: Sequence[tuple[str, str]]) -> float:
    return sum(42 + LETTER * len(name) for _, name in entries)


def figure(picture: str, caption: str) -> str:
    """What notebooks show: the picture and its caption, a text."""
    return f"<figure>{picture}<figcaption><code>{escape(caption)}</code></figcaption></figure>"


def page(picture: str, title: str) -> str:
    """A page of its own with one picture."""
    style = f"body{{margin:0;background:{PAPER.light}}}@media (prefers-color-scheme:dark){{body{{background:{PAPER.dark}}}}}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{style}</style></head><body>\n{picture}</body></html>\n'
    )
