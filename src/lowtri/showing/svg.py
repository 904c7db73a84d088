"""Pooled weights as SVG: the heads as small maps, then one of them with labels and, where they fit, its numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtri.pictures.labels import display_width
from lowtri.pictures.svg import (
    HIDDEN,
    LETTER,
    document,
    fill,
    grid_lines,
    ink_over,
    legend,
    legend_width,
    shaded,
    text,
)
from lowtri.showing.reading import Cells, Maps
from lowtri.showing.text import FEW, cell_note, short_number

__all__ = ["as_svg"]

_MARGIN, _AXIS = 16, 18
_THUMB, _GAP, _A_ROW = 60, 20, 8  # the overview: side of a map, distance, maps in a row


def as_svg(maps: Maps) -> str:
    """The picture, at most 900 points wide; its text has a bounded size at any number of heads and tokens."""
    rows, columns = maps.large.values.shape
    few = max(rows, columns) <= FEW
    cell = 34.0 if few else max(6.0, min(24.0, 420 / max(rows, columns)))
    side = _MARGIN + _AXIS + LETTER * max(map(display_width, maps.query_labels), default=0)
    slanted = LETTER * max(map(display_width, maps.key_labels), default=0) * 0.71 + 8 if maps.key_labels else 0
    entries = list(_legend(maps))
    note = cell_note(maps.large)
    across = min(len(maps.small), _A_ROW)
    overview = 0.0 if not maps.small else 26 + (_THUMB + 28) * -(-len(maps.small) // _A_ROW) + 20 * bool(maps.left_out)
    large = _MARGIN + overview + 30 + slanted  # where the large map begins
    bottom = large + rows * cell + 24 + _AXIS
    width = max(
        side + columns * cell + slanted * 0.9 + _MARGIN,
        2 * _MARGIN + across * (_THUMB + _GAP),
        2 * _MARGIN + max(legend_width(entries), LETTER * len(note), LETTER * len(_title(maps))),
    )

    def body() -> Iterator[str]:
        if maps.small:
            yield text(_MARGIN, _MARGIN + 12, _title(maps), ' font-weight="bold"')
            yield from _overview(maps)
        heading = f"head {maps.head}" if maps.small else _title(maps)
        yield text(side if maps.small else _MARGIN, large - slanted - 14, heading, ' font-weight="bold"')
        yield from _labels(maps, side, large, cell)
        yield from _map(maps.large, maps.greatest, side, large, cell)
        if few:
            yield from _numbers(maps, side, large, cell)
        yield grid_lines(side, large, rows, columns, cell, cell)
        yield text(side + columns * cell / 2, large + rows * cell + 16, "keys →", ' text-anchor="middle"')
        middle = large + rows * cell / 2
        yield f'<text transform="translate({_MARGIN - 4},{middle:.1f}) rotate(90)" text-anchor="middle">queries →</text>'
        yield from legend(_MARGIN, bottom, entries)
        if note:
            yield text(_MARGIN, bottom + 31, note)

    return document(width, bottom + 30 + 20 * bool(note), _title(maps), body())


def _title(maps: Maps) -> str:
    heads = f"{maps.heads:,} heads, " if maps.heads > 1 else ""
    return f"attention weights: {heads}{maps.queries:,} queries, {maps.keys:,} keys"


def _overview(maps: Maps) -> Iterator[str]:
    for h, cells in enumerate(maps.small):
        x = _MARGIN + h % _A_ROW * (_THUMB + _GAP)
        y = _MARGIN + 40 + h // _A_ROW * (_THUMB + 28)
        rows, columns = cells.values.shape
        unit = _THUMB // max(rows, columns)  # whole numbers keep the paths short
        shown = ' font-weight="bold"' if h == maps.head else f" {fill('soft')}"
        yield text(x, y - 4, f"head {h}", f' font-size="10"{shown}')
        yield from _map(cells, maps.greatest, x, y, unit)
        yield grid_lines(x, y, 1, 1, columns * unit, rows * unit)
    if maps.left_out:
        y = _MARGIN + 40 + -(-len(maps.small) // _A_ROW) * (_THUMB + 28)
        yield text(_MARGIN, y, f"... and {maps.left_out:,} more heads")


def _map(cells: Cells, greatest: float, x: float, y: float, cell: float) -> Iterator[str]:
    """The weights, then what is hidden; a weight on a hidden pair is drawn as a weight."""
    shares = cells.values / greatest
    yield from shaded(shares, fill("visible"), x, y, cell, cell, other=fill("leak"))
    if cells.visible is not None:
        hidden = np.where((cells.visible == 0) & (shares == 0), np.nan, 0.0)
        yield from shaded(hidden, "", x, y, cell, cell)


def _labels(maps: Maps, x: float, y: float, cell: float) -> Iterator[str]:
    from html import escape

    for i, label in enumerate(maps.query_labels):
        yield text(x - 8, y + (i + 0.5) * cell + 4, label, ' text-anchor="end"')
    for j, label in enumerate(maps.key_labels):
        at = f"{x + (j + 0.5) * cell:.1f},{y - 6:.1f}"
        yield f'<text transform="translate({at}) rotate(-45)">{escape(label)}</text>'


def _numbers(maps: Maps, x: float, y: float, cell: float) -> Iterator[str]:
    cells = maps.large
    for i, j in np.ndindex(cells.values.shape):
        weight = cells.values[i, j]
        if cells.visible is not None and cells.visible[i, j] == 0 and weight == 0:
            continue
        ink = fill("paper") if np.isnan(weight) else ink_over(weight / maps.greatest)
        style = f' text-anchor="middle" font-size="11" {ink}'
        yield text(x + (j + 0.5) * cell, y + (i + 0.5) * cell + 4, short_number(weight), style)


def _legend(maps: Maps) -> Iterator[tuple[str, str]]:
    for share in (1, 0.5, 0):
        yield f'{fill("visible")} fill-opacity="{share}"', f"weight {short_number(share * maps.greatest)}"
    if maps.large.visible is not None:
        yield HIDDEN, "hidden"
    if any(np.isnan(cells.values).any() for cells in (maps.large, *maps.small)):
        yield fill("leak"), "not a number"
