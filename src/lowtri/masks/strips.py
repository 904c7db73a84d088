"""Rows of cells as SVG: the positions that a cache holds, the blocks of tokens that each process holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowtri.masks.labels import shortened
from lowtri.masks.svg_parts import LETTER, cell_row, document, grid_lines, legend, legend_width, text

__all__ = ["State", "Strip", "strips_svg"]

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
    entries = [(states[i].fill, states[i].meaning) for i in sorted({int(i) for strip in strips for i in strip.cells})]

    def body() -> Iterator[str]:
        yield text(_MARGIN, 24, title, ' font-weight="bold"')
        if columns and last:
            yield text(left, top - 6, "0")
            yield from [text(right, top - 6, last, ' text-anchor="end"')] * (columns > 1)
        for i, strip in enumerate(strips):
            y = top + i * _ROW
            yield from [text(_MARGIN, y + 16, strip.label)] * bool(strip.label)
            yield from cell_row(left, y, [states[state].fill for state in strip.cells], cell, _ROW)
            yield from [text(right + 10, y + 16, strip.remark)] * bool(strip.remark)
        yield grid_lines(left, top, len(strips) if columns else 0, columns, cell, _ROW)
        yield text(left, bottom - 18, below)
        for i, entry in enumerate(entries):
            yield from legend(_MARGIN, bottom + 20 * i, [entry])
        yield from [text(_MARGIN, bottom + 20 * len(entries) + 11, note)] * bool(note)

    remarks = max(LETTER * len(strip.remark) + 10 for strip in strips)
    words = max([legend_width([entry]) for entry in entries] + [LETTER * len(line) for line in (title, below, note)])
    height = bottom + 20 * (len(entries) + bool(note)) + 10
    return document(max(right + remarks, left + words) + _MARGIN, height, title, body())
