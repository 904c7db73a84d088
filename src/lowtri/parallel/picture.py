"""Pictures of a plan of shards, as text and as SVG: a line for each rank. At most 16 lines of 64 cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.labels import shortened
from lowtri.masks.panels import MAX_CELLS
from lowtri.masks.svg_parts import HIDDEN, LETTER, cell_row, document, fill, grid_lines, legend, legend_width, text

__all__ = ["RankRow", "as_svg", "as_text"]


class _Kind(NamedTuple):
    sign: str
    fill: str
    meaning: str


_KINDS = (
    _Kind("·", HIDDEN, "not seen"),
    _Kind("▒", fill("partly"), "received"),
    _Kind("█", fill("visible"), "its own tokens"),
)
_NONE, _RECEIVED, _HELD = range(3)
_MARGIN, _ROW = 16, 24


@dataclass(frozen=True)
class RankRow:
    """What a picture shows of one rank."""

    MOST: ClassVar[int] = 16

    name: str
    held: NDArray[np.bool_]  # (blocks,)
    received: NDArray[np.bool_]  # (blocks,)
    text: str

    def cells(self) -> list[int]:
        """At most 64 cells; one that stands for several blocks shows the most that any of them is."""
        kinds = np.where(self.held, _HELD, np.where(self.received, _RECEIVED, _NONE))
        step = -(-len(kinds) // MAX_CELLS)
        cells: list[int] = np.maximum.reduceat(kinds, np.arange(0, len(kinds), step)).tolist()
        return cells


def as_text(title: str, rows: list[RankRow], ranks: int) -> str:
    width = max(len(row.name) for row in rows)
    lines = [f"{row.name:<{width}}  {''.join(_KINDS[cell].sign for cell in row.cells())}  {row.text}" for row in rows]
    return "\n".join([title, *lines, *_more(rows, ranks)])


def as_svg(title: str, rows: list[RankRow], ranks: int) -> str:
    title = shortened(title, 110)
    columns = len(rows[0].cells())
    cell = min(24.0, 420 / columns)
    left = _MARGIN + LETTER * (max(len(row.name) for row in rows) + 1)
    right, top = left + columns * cell + 10, 44
    bottom = top + _ROW * (len(rows) + (ranks > len(rows))) + 14
    entries = [(kind.fill, kind.meaning) for kind in reversed(_KINDS)]

    def body() -> Iterator[str]:
        yield text(_MARGIN, 24, title, ' font-weight="bold"')
        for i, row in enumerate(rows):
            y = top + i * _ROW
            yield text(_MARGIN, y + 16, row.name)
            yield from cell_row(left, y, [_KINDS[cell].fill for cell in row.cells()], cell, _ROW)
            yield text(right, y + 16, row.text)
        yield grid_lines(left, top, len(rows), columns, cell, _ROW)
        for words in _more(rows, ranks):
            yield text(_MARGIN, top + len(rows) * _ROW + 16, words)
        yield from legend(_MARGIN, bottom, entries)

    longest = max(LETTER * len(row.text) for row in rows)
    width = max(right + longest, 2 * _MARGIN + max(LETTER * len(title), legend_width(entries))) + _MARGIN
    return document(width, bottom + 30, title, body())


def _more(rows: list[RankRow], ranks: int) -> list[str]:
    return [f"... and {ranks - len(rows):,} more ranks"] * (ranks > len(rows))
