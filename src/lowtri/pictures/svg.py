"""The parts of every SVG picture: its colours for light and dark screens, the frame, texts, cells, legends, rows of cells.

Queries are blue, keys vermilion, values green, visible pairs and weights purple, leaks red, hidden pairs hatched: they differ in
lightness and in texture too, so that no picture depends on seeing hues. Colours are SVG attributes, which every program reads, for
a light background; a style sheet replaces them on dark screens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.pictures.labels import display_width, shortened


class Colour(NamedTuple):
    """One colour on a light and on a dark screen."""

    light: str  # "#rrggbb"
    dark: str

    @property
    def both(self) -> str:
        """The value in CSS that follows the color-scheme of the page."""
        return f"light-dark({self.light}, {self.dark})"


GROUND = Colour("#fbfaf7", "#15161a")  # of a page, below its cards
INK = Colour("#1d1c1a", "#e9e6df")
PAPER = Colour("#ffffff", "#1c1e24")
SOFT = Colour("#5c5952", "#a9a69d")  # remarks
LINE = Colour("#dedad1", "#34363e")
HATCH = Colour("#d9d5cb", "#3b3e47")
VISIBLE = Colour("#7a3c9e", "#cb9fe8")
PARTLY = Colour("#cdb4dc", "#5d4a6d")
LEAK = Colour("#b3261e", "#f2877e")
UNSURE = Colour("#975a16", "#f6ad55")
QUERY = Colour("#0b5fa5", "#7db7f0")
KEY = Colour("#a8480a", "#eea56a")
VALUE = Colour("#0a6b50", "#5fcaa5")

_VARIABLES = {  # the names that style sheets use
    **{"paper": GROUND, "card": PAPER, "ink": INK, "soft": SOFT, "line": LINE, "hatch": HATCH},
    **{"bad": LEAK, "good": VALUE, "unsure": UNSURE},
    **{"q-hue": QUERY, "k-hue": KEY, "v-hue": VALUE, "w-hue": VISIBLE},
}


def declared(theme: str) -> str:
    """The colours as declarations of CSS variables, for one theme, "light" or "dark", or for "both".

    >>> declared("light")[:30], declared("both")[:38]
    ('--paper: #fbfaf7; --card: #fff', '--paper: light-dark(#fbfaf7, #15161a);')
    """
    return "; ".join(f"--{name}: {getattr(colour, theme)}" for name, colour in _VARIABLES.items())


MAX_CELLS = 64  # rows, and columns, of one picture
LETTER = 7.2  # width of one column of text at 12 px

_COLOURS = {  # class -> property, colour
    **{"ink": ("fill", INK), "paper": ("fill", PAPER), "line": ("stroke", LINE), "hatch": ("stroke", HATCH)},
    **{"visible": ("fill", VISIBLE), "partly": ("fill", PARTLY), "leak": ("fill", LEAK), "soft": ("fill", SOFT)},
    **{"query": ("fill", QUERY), "key": ("fill", KEY), "value": ("fill", VALUE)},
    "outline": ("stroke", VISIBLE),
    "dark": ("fill", Colour(INK.light, PAPER.dark)),
}
_HATCHING = (
    '<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M0 0V6" class="lowtri-hatch" stroke="{HATCH.light}" stroke-width="2"/></pattern></defs>'
)

HIDDEN = 'fill="url(#hidden)"'  # the attributes of a hatched cell
OUTLINED = f'class="lowtri-outline" fill="none" stroke="{VISIBLE.light}"'


def fill(name: str) -> str:
    """The attributes of a shape or text in a colour: ink, paper, dark, visible, partly, leak, soft, query, key or value.

    >>> fill("leak")
    'class="lowtri-leak" fill="#b3261e"'
    """
    return f'class="lowtri-{name}" fill="{_COLOURS[name][1].light}"'


def ink_over(share: float) -> str:
    """The attributes of a number in a cell with this share of the colour of weights: ink, paper, or what is dark in both schemes.

    >>> [ink_over(share).split('"')[1] for share in (0.3, 0.7, 0.9)]
    ['lowtri-ink', 'lowtri-dark', 'lowtri-paper']
    """
    return fill("ink" if not share > 0.6 else "dark" if share < 0.77 else "paper")


def document(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """A whole SVG file; on a narrow screen it is smaller, in its own proportions."""
    content = "\n".join(body)
    if HIDDEN in content:
        content = f"{_HATCHING}\n{content}"
    used = {"ink", "paper", *re.findall(r'class="lowtri-(\w+)"', content)}
    dark = "".join(f".lowtri-{name}{{{c[0]}:{c[1].dark}}}" for name, c in _COLOURS.items() if name in used)
    dark += f":where(rect[stroke]){{stroke:{LINE.dark}}}"  # the frames of legends
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


def shades(shares: NDArray[np.float64], filling: str, hidden: NDArray[np.bool_]) -> NDArray[np.object_]:
    """The attributes of cells in 16 opacities of one colour, from blank at 0 to full at 1; hidden cells are hatched, NaN is a leak.

    >>> shades(np.array([[0.0, 0.5]]), fill("key"), np.zeros((1, 2), bool)).tolist()
    [['', 'class="lowtri-key" fill="#a8480a" fill-opacity="0.5"']]

    Args:
        shares, hidden: (rows, columns).
    """
    levels = np.nan_to_num(np.ceil(np.minimum(shares, 1) * 16 - 1e-9), nan=-1).astype(int)  # only 0 is level 0
    looks = ["", *(f'{filling} fill-opacity="{level / 16:.4g}"' for level in range(1, 17)), fill("leak")]
    return np.where(hidden, HIDDEN, np.array(looks, object)[levels])


def cell_row(
    x: float,
    y: float,
    fillings: Iterable[str],
    wide: float,
    high: float,
    title: Callable[[int, int], str] | None = None,
) -> Iterator[str]:
    """A row of cells with these attributes, equal neighbours as one rectangle.

    >>> len(list(cell_row(0, 0, [HIDDEN, HIDDEN, fill("visible")], 10, 10)))
    2

    Args:
        title: what to say where the pointer is over a rectangle, by its first cell and its number of cells.
    """
    j = 0
    for filling, equal in groupby(fillings):
        n = len(list(equal))
        place = f'x="{x + j * wide:.1f}" y="{y:.1f}" width="{n * wide:.1f}" height="{high:.1f}"'
        yield (
            f"<rect {place} {filling}/>"
            if title is None
            else (f"<rect {place} {filling}><title>{escape(title(j, n))}</title></rect>")
        )
        j += n


def grid_lines(x: float, y: float, rows: int, columns: int, wide: float, high: float) -> str:
    """The lines around the cells of a matrix."""
    lines = [f"M{x:.1f} {y + i * high:.1f}h{columns * wide:.1f}" for i in range(rows + 1)]
    lines += [f"M{x + j * wide:.1f} {y:.1f}v{rows * high:.1f}" for j in range(columns + 1)]
    return f'<path d="{"".join(lines)}" fill="none" class="lowtri-line" stroke="{LINE.light}" stroke-width="0.7"/>'


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A swatch for each way to fill a cell, (attributes, meaning), and its meaning on its right."""
    for filling, name in entries:
        frame = "" if "stroke=" in filling else f'stroke="{LINE.light}" '
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="14" {frame}{filling}/>'
        yield text(x + 20, y + 11, name)
        x += 42 + LETTER * len(name)


def legend_width(entries: Sequence[tuple[str, str]]) -> float:
    return sum(42 + LETTER * len(name) for _, name in entries)


@dataclass(frozen=True)
class Grid:
    """A matrix of cells with its labels: what pictures of masks, weights and steps consist of.

    Attributes:
        cells: (rows, columns), the attributes of each cell; "" leaves it blank.
        wide, high: the size of a cell.
        rows, columns: a label for each, or none; those of columns are slanted.
        numbers: for each cell a text and its attributes, or none.
        title: what to say where the pointer is, by a row, its first column and the number of columns; or None.
        shaded: whether cells have many colours: all cells of one colour are then one path, so that a picture does not grow with the
            attributes of its cells.
        lines: whether there are lines between the cells.
    """

    cells: NDArray[np.object_]
    wide: float
    high: float
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    numbers: Sequence[Sequence[tuple[str, str]]] = ()
    title: Callable[[int, int, int], str] | None = None
    shaded: bool = False
    lines: bool = True

    @property
    def side(self) -> float:
        """The width of the labels of rows."""
        return LETTER * max(map(display_width, self.rows), default=0)

    @property
    def slanted(self) -> float:
        """The height of the labels of columns; the last one leans to the right of the cells by nine tenths of it."""
        return LETTER * max(map(display_width, self.columns), default=0) * 0.71 + 8 if self.columns else 0

    @property
    def width(self) -> float:
        return self.cells.shape[1] * self.wide

    @property
    def height(self) -> float:
        return len(self.cells) * self.high

    def svg(self, x: float, y: float) -> Iterator[str]:
        """The labels, the cells, the lines between them, and the numbers; ``x`` and ``y`` are the corner of the first cell."""
        for i, label in enumerate(self.rows):
            yield text(x - 8, y + (i + 0.5) * self.high + 4, label, ' text-anchor="end"')
        for j, label in enumerate(self.columns):
            position = f"{x + (j + 0.5) * self.wide:.1f},{y - 6:.1f}"
            yield f'<text transform="translate({position}) rotate(-45)">{escape(label)}</text>'
        if self.shaded:
            yield from self._paths(x, y)
        else:
            for i, row in enumerate(self.cells.tolist()):
                title = None if self.title is None else partial(self.title, i)
                yield from cell_row(x, y + i * self.high, row, self.wide, self.high, title)
        if self.lines:
            rows, columns = self.cells.shape
            yield grid_lines(x, y, rows, columns, self.wide, self.high)
        for i, line in enumerate(self.numbers):
            for j, (number, look) in enumerate(line):
                if number:
                    style = f' text-anchor="middle" font-size="11" {look}'
                    yield text(x + (j + 0.5) * self.wide, y + (i + 0.5) * self.high + 4, number, style)

    def _paths(self, x: float, y: float) -> Iterator[str]:
        for look in sorted({*self.cells.flat} - {""}):
            outline = []
            for i, row in enumerate(self.cells == look):
                for first, end in np.flatnonzero(np.diff(np.r_[False, row, False])).reshape(-1, 2):
                    across = f"{(end - first) * self.wide:.5g}"
                    outline.append(
                        f"M{x + first * self.wide:.5g} {y + i * self.high:.5g}h{across}v{self.high:.5g}h-{across}z"
                    )
            yield f'<path d="{"".join(outline)}" {look}/>'

    def keys_word(self, x: float, y: float) -> str:
        """The name of the axis of keys, below the cells."""
        return text(x + self.width / 2, y + self.height + 16, "keys →", ' text-anchor="middle"')

    def queries_word(self, x: float, y: float) -> str:
        """The name of the axis of queries, at ``x``, on the left of the cells that begin at ``y``."""
        position = f"{x},{y + self.height / 2:.1f}"
        return f'<text transform="translate({position}) rotate(90)" text-anchor="middle">queries →</text>'


_MARGIN, _ROW = 16, 24


class State(NamedTuple):
    """What a cell may show."""

    sign: str  # in text
    fill: str  # the attributes of its cells in SVG
    meaning: str


class Strip(NamedTuple):
    """A row of cells."""

    label: str
    cells: Sequence[int]  # indices of states
    remark: str = ""


def strips_svg(
    title: str, strips: Sequence[Strip], states: Sequence[State], below: str, note: str = "", last: str = ""
) -> str:
    """The rows, all of one length, with a legend of the states that occur.

    Args:
        below: words directly below the rows.
        note: words below the legend.
        last: the number of the last position, at the end of an axis that begins at 0; without it there is no axis.
    """
    title, columns = shortened(title, 110), len(strips[0].cells)
    cell = min(24.0, 480 / max(columns, 1))
    left = _MARGIN + LETTER * max(len(strip.label) + bool(strip.label) for strip in strips)
    right, top = left + columns * cell, 44 + 6 * bool(last)
    bottom = top + len(strips) * _ROW + 34
    grid = Grid(np.array([[states[state].fill for state in strip.cells] for strip in strips], object), cell, _ROW)
    entries = [(states[i].fill, states[i].meaning) for i in sorted({int(i) for strip in strips for i in strip.cells})]

    def body() -> Iterator[str]:
        yield text(_MARGIN, 24, title, ' font-weight="bold"')
        if columns and last:
            yield text(left, top - 6, "0")
            yield from [text(right, top - 6, last, ' text-anchor="end"')] * (columns > 1)
        for i, strip in enumerate(strips):
            y = top + i * _ROW
            yield from [text(_MARGIN, y + 16, strip.label)] * bool(strip.label)
            yield from [text(right + 10, y + 16, strip.remark)] * bool(strip.remark)
        yield from grid.svg(left, top) if columns else ()
        yield text(left, bottom - 18, below)
        for i, entry in enumerate(entries):
            yield from legend(_MARGIN, bottom + 20 * i, [entry])
        yield from [text(_MARGIN, bottom + 20 * len(entries) + 11, note)] * bool(note)

    remarks = max(LETTER * len(strip.remark) + 10 for strip in strips)
    words = max([legend_width([entry]) for entry in entries] + [LETTER * len(line) for line in (title, below, note)])
    height = bottom + 20 * (len(entries) + bool(note)) + 10
    return document(max(right + remarks, left + words) + _MARGIN, height, title, body())
