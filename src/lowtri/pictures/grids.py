"""Grids of cells with labels: the one model of all pictures, drawn as text and as SVG.

A cell is an index of a :class:`Look`, which says its sign in text, its colour in SVG and its meaning in the legend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.pictures.labels import aligned, display_width, shortened
from lowtri.pictures.svg import BOLD, HIDDEN, LETTER, LINE, document, fill, ink_over, text, turned

MAX_CELLS = 64  # rows, and columns, of one picture
_MARGIN = 16  # around everything
_AXIS = 18  # the width of the turned word on the left
_BETWEEN = 20  # two grids
_LINE = 20  # the height of a line of the legend and of the notes
_FEW_LOOKS = 5  # of more, all cells of one look are one path, so that a picture does not grow with its colours


class Look(NamedTuple):
    """How a kind of cell looks."""

    sign: str  # in text
    style: str  # the attributes of its cells in SVG
    meaning: str = ""  # in the legend
    ink: str = fill("ink")  # the attributes of a number in it


def shades(colour: str) -> list[Look]:
    """The looks of the :func:`levels` of numbers: from nothing through 16 opacities of a colour, then hidden, then NaN.

    >>> "".join(look.sign for look in shades("key"))
    '·░░░░▒▒▒▒▓▓▓▓████╱?'
    """
    each = [
        Look("·░▒▓█"[-(-level // 4)], f'{fill(colour)} fill-opacity="{level / 16:.4g}"', ink=ink_over(level / 16))
        for level in range(17)
    ]
    return [*each, Look("╱", HIDDEN, "hidden", fill("soft")), Look("?", fill("leak"), "not a number", fill("paper"))]


def levels(shares: NDArray[Any], hidden: Any = False) -> NDArray[Any]:
    """Numbers as indices of :func:`shades`.

    >>> levels(np.array([0.0, 0.01, 1.0, np.nan, 0.0]), np.array([False, False, False, False, True]))
    array([ 0,  1, 16, 18, 17])
    """
    level = np.nan_to_num(np.ceil(np.minimum(shares, 1) * 16 - 1e-9), nan=18).astype(int)  # only 0 is level 0
    return np.where(hidden, 17, level)


def used(looks: Sequence[Look], *grids: Any) -> list[Look]:
    """The looks with a meaning that occur in these cells, in their order."""
    indices = {int(index) for cells in grids for index in np.unique(cells)}
    return [look for index, look in enumerate(looks) if index in indices and look.meaning]


@dataclass(frozen=True)
class Grid:
    """A matrix of cells with its labels.

    Attributes:
        cells: (rows, columns), the index of each cell's look.
        looks: the looks.
        wide, high: the size of a cell in SVG.
        title: above the cells.
        rows, columns: a label for each, or none; in SVG those of columns are slanted.
        remarks: words on the right of each row, or none.
        numbers: the text in each cell, or none.
        ends: words above the first and the last column.
        hover: what to say where the pointer is, by a row, its first column and the number of columns.
        title_style: the attributes of the title.
        shape: words after the title, less strong.
        operator: a sign on the left of the cells.
    """

    cells: Any
    looks: Sequence[Look]
    wide: float = 24.0
    high: float = 24.0
    title: str = ""
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    remarks: Sequence[str] = ()
    numbers: Sequence[Sequence[str]] = ()
    ends: Sequence[str] = ()
    hover: Callable[[int, int, int], str] | None = None
    title_style: str = BOLD
    shape: str = ""
    operator: str = ""

    def lines(self) -> list[str]:
        """The cells as text: a line for each row, or a table where they have numbers, or columns have labels."""
        signs = [[self.looks[cell].sign for cell in row] for row in np.asarray(self.cells).tolist()]
        if self.numbers:
            signs = [[x or sign for x, sign in zip(*row, strict=True)] for row in zip(self.numbers, signs, strict=True)]
        elif self.columns:
            widths = [max(map(display_width, column)) for column in zip(self.columns, *signs, strict=True)]
            signs = [[" " * ((w - len(x)) // 2) + x for x, w in zip(row, widths, strict=True)] for row in signs]
        else:
            widths = [max(map(len, column)) for column in zip(*signs, strict=True)]
            gap = "  " if any(len(look.sign) > 1 for look in self.looks) else ""
            lines = [gap.join(map(str.rjust, row, widths)) for row in signs]
            return aligned(list(zip(self.rows, lines, self.remarks, strict=True)), "  ") if self.remarks else lines
        table = [("", *self.columns), *[(label, *row) for label, row in zip(self.rows, signs, strict=True)]]
        return aligned(table, "  ", right=bool(self.numbers))

    @property
    def side(self) -> float:
        """The width of the labels of rows, with a gap."""
        return LETTER * max(map(display_width, self.rows)) + 8 if self.rows else 0.0

    @property
    def above(self) -> float:
        """The height of what stands directly above the cells; the last slanted label leans to the right by nine tenths of it."""
        if self.columns:
            return LETTER * max(map(display_width, self.columns)) * 0.71 + 12
        return 18.0 if self.ends else 0.0

    @property
    def width(self) -> float:
        return float(np.shape(self.cells)[1] * self.wide)

    @property
    def height(self) -> float:
        return len(self.cells) * self.high

    @property
    def whole_width(self) -> float:
        """From the first cell to the end of labels, remarks and title."""
        remarks = LETTER * max(map(display_width, self.remarks)) + 10 if self.remarks else 0.0
        title = LETTER * display_width(f"{self.title} {self.shape}".strip())
        return max(self.width + (self.above * 0.9 if self.columns else remarks), title)

    def svg(self, x: float, y: float, above: float) -> Iterator[str]:
        """Title, labels, cells, the lines between them, and numbers; ``x`` and ``y`` are the corner of the first cell."""
        if self.title:
            yield text(x, y - above - 6, self.title, self.title_style)
        if self.shape:
            yield text(x + LETTER * (len(self.title) + 1), y - above - 6, self.shape, f" {fill('soft')}")
        for end, anchor, at in zip(self.ends, ("start", "end"), (x, x + self.width), strict=False):
            yield text(at, y - 6, end, f' text-anchor="{anchor}"')
        for i, label in enumerate(self.rows):
            yield text(x - 8, y + (i + 0.5) * self.high + 4, label, ' text-anchor="end"')
        for i, remark in enumerate(self.remarks):
            yield text(x + self.width + 10, y + (i + 0.5) * self.high + 4, remark)
        for j, label in enumerate(self.columns):
            yield turned(x + (j + 0.5) * self.wide, y - 6, label, -45)
        cells = np.asarray(self.cells)
        if cells.size:
            yield from self._rectangles(cells, x, y) if len(self.looks) <= _FEW_LOOKS else self._paths(cells, x, y)
            rows, columns = cells.shape if self.wide >= 6 else (1, 1)  # of tiny cells only the frame
            lines = [f"M{x:.1f} {y + i * self.height / rows:.1f}h{self.width:.1f}" for i in range(rows + 1)]
            lines += [f"M{x + j * self.width / columns:.1f} {y:.1f}v{self.height:.1f}" for j in range(columns + 1)]
            yield f'<path d="{"".join(lines)}" fill="none" class="lowtri-line" stroke="{LINE.light}" stroke-width="0.7"/>'
        for (i, j), cell in np.ndenumerate(cells):
            if self.numbers and (number := self.numbers[i][j]):
                style = f' text-anchor="middle" font-size="11" {self.looks[cell].ink}'
                yield text(x + (j + 0.5) * self.wide, y + (i + 0.5) * self.high + 4, number, style)

    def _rectangles(self, cells: NDArray[Any], x: float, y: float) -> Iterator[str]:
        """Equal neighbours in a row are one rectangle."""
        for i, row in enumerate(cells.tolist()):
            j = 0
            for cell, equal in groupby(row):
                n = len(list(equal))
                hover = "" if self.hover is None else f"<title>{escape(self.hover(i, j, n))}</title>"
                place = f'x="{x + j * self.wide:.1f}" y="{y + i * self.high:.1f}" width="{n * self.wide:.1f}"'
                yield f'<rect {place} height="{self.high:.1f}" {self.looks[cell].style}>{hover}</rect>'
                j += n

    def _paths(self, cells: NDArray[Any], x: float, y: float) -> Iterator[str]:
        """All cells of one look are one path."""
        for index in np.unique(cells):
            edges = np.diff(np.pad(cells == index, ((0, 0), (1, 1))).astype(np.int8))
            runs = zip(*np.nonzero(edges == 1), np.nonzero(edges == -1)[1], strict=True)
            outline = [
                f"M{x + first * self.wide:.5g} {y + i * self.high:.5g}h{(end - first) * self.wide:.5g}v{self.high:.5g}"
                f"h{(first - end) * self.wide:.5g}z"
                for i, first, end in runs
            ]
            yield f'<path d="{"".join(outline)}" {self.looks[index].style}/>'


def beside_one_another(blocks: Sequence[Sequence[str]], gap: str) -> list[str]:
    """Blocks of lines as lines of text, from left to right."""
    return aligned(list(zip_longest(*blocks, fillvalue="")), gap)


class Panel(NamedTuple):
    """Grids side by side, and the words around them."""

    grids: Sequence[Grid]
    heading: str = ""
    across: str = "keys →"  # below each grid
    down: str = "queries →"  # on the left of the first one, turned


def picture(
    title: str, panels: Sequence[Panel], legend: Sequence[Look] = (), notes: Sequence[str] = (), wide: float = 600
) -> str:
    """Panels one below the other, then a legend and notes, as SVG text.

    Args:
        title: of the document; it is not drawn.
        wide: how far the legend may go to the right of the panels.
    """
    body: list[str] = []
    y = float(_MARGIN)
    right = 0.0
    for panel in panels:
        if heading := shortened(panel.heading, 110):
            body.append(text(_MARGIN, y + 12, heading, BOLD))
            y += 26
            right = max(right, _MARGIN + LETTER * display_width(heading))
        above = max(grid.above for grid in panel.grids)
        top = y + above
        if any(grid.title for grid in panel.grids):
            top += 18
        x = _MARGIN + panel.grids[0].side
        if panel.down:
            x += _AXIS
            body.append(turned(_MARGIN - 4, top, panel.down, 90))
        for grid in panel.grids:
            if grid.operator:
                middle = top + panel.grids[-1].height / 2
                body.append(text(x, middle + 4, grid.operator, ' font-size="18"'))
                if grid.operator == "→":
                    body.append(text(x - 14, middle - 12, "softmax", ' font-size="10"'))
                x += 2 * _BETWEEN
            labelled = grid if grid is panel.grids[0] else replace(grid, rows=())  # rows are labelled once
            body += labelled.svg(x, top, above)
            if panel.across:
                body.append(text(x, top + grid.height + 16, panel.across))
            right = max(right, x + max(grid.whole_width, LETTER * len(panel.across)))
            x += grid.whole_width + _BETWEEN
        height = max(grid.height for grid in panel.grids) + (24 if panel.across else 0)
        y = top + max(LETTER * len(panel.down), height) + 16  # the turned word is as high as it is long
    x = float(_MARGIN)
    wide = max(wide, right)
    for look in legend:
        length = 20 + LETTER * len(look.meaning)
        if x > _MARGIN and x + length > wide:
            x = float(_MARGIN)
            y += _LINE
        frame = "" if "stroke=" in look.style else f'stroke="{LINE.light}" '
        body.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="14" {frame}{look.style}/>')
        body.append(text(x + 20, y + 11, look.meaning))
        right = max(right, x + length)
        x += length + 22
    if legend:
        y += _LINE
    for note in notes:
        body.append(text(_MARGIN, y + 11, note))
        right = max(right, _MARGIN + LETTER * display_width(note))
        y += _LINE
    return document(right + _MARGIN, y + 10, title, body)
