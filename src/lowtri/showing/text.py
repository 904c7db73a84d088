"""Pooled weights as text: shades, and numbers where there are few."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lowtri.pictures.labels import display_width
from lowtri.showing.reading import Cells, Maps

__all__ = ["FEW", "as_text", "cell_note", "short_number"]

FEW = 12  # rows and columns up to which the numbers are written
_SHADES = "·░▒▓█"
_HIDDEN, _NAN = "╱", "?"
_WIDE = 96  # columns of the overview


def as_text(maps: Maps) -> str:
    """The overview, then the head that is shown large."""
    lines = list(_overview(maps)) if maps.small else []
    if lines:
        lines += ["", f"head {maps.head}"]
    lines += _numbers(maps) if max(maps.large.values.shape) <= FEW else _shades(maps.large, maps.greatest)
    return "\n".join([*lines, "", *_legend(maps)])


def short_number(x: float) -> str:
    """Two digits after the point, without a 0 before it.

    >>> short_number(0.257), short_number(1.0), short_number(0.001), short_number(0.0), short_number(12.3)
    ('.26', '1', '.00', '0', '12.3')
    """
    if np.isnan(x):
        return "NaN"
    if x == int(x) and x < 1000:
        return str(int(x))
    return f"{x:.2f}".lstrip("0") if x < 0.995 else f"{x:.3g}"


def cell_note(cells: Cells) -> str:
    """What a cell stands for; empty if it is one pair."""
    if cells.step == 1:
        return ""
    read = f", {cells.rows_read} queries of it read" if cells.rows_read < cells.step else ""
    return f"a cell: the weight on {cells.step:,} keys together, mean over {cells.step:,} queries{read}"


def _overview(maps: Maps) -> Iterator[str]:
    drawn = [_shades(cells, maps.greatest) for cells in maps.small]
    wide = max(len(drawn[0][0]), len(f"head {len(drawn) - 1}")) + 2
    a_line = max(1, _WIDE // wide)
    for first in range(0, len(drawn), a_line):
        group = range(first, min(first + a_line, len(drawn)))
        yield "".join(f"head {h}".ljust(wide) for h in group).rstrip()
        for i in range(len(drawn[0])):
            yield "".join(drawn[h][i].ljust(wide) for h in group).rstrip()
    if maps.left_out:
        yield f"... and {maps.left_out} more heads"


def _shades(cells: Cells, greatest: float) -> list[str]:
    rows, columns = cells.values.shape
    return ["".join(_sign(cells, i, j, greatest) for j in range(columns)) for i in range(rows)]


def _sign(cells: Cells, i: int, j: int, greatest: float) -> str:
    x = cells.values[i, j]
    if np.isnan(x):
        return _NAN
    if cells.visible is not None and cells.visible[i, j] == 0 and x == 0:
        return _HIDDEN
    return _SHADES[math.ceil(4 * x / greatest - 1e-9)]  # only 0 is a dot


def _numbers(maps: Maps) -> list[str]:
    """The table of one head, with labels."""
    cells = maps.large
    rows, columns = cells.values.shape
    keys = maps.key_labels or tuple(str(j) for j in range(columns))
    queries = maps.query_labels or tuple(str(maps.keys - rows + i) if rows <= columns else str(i) for i in range(rows))
    body = [
        [
            _HIDDEN if _sign(cells, i, j, maps.greatest) == _HIDDEN else short_number(cells.values[i, j])
            for j in range(columns)
        ]
        for i in range(rows)
    ]
    table = [("", *keys), *((query, *line) for query, line in zip(queries, body, strict=True))]
    widths = [max(map(display_width, column)) for column in zip(*table, strict=True)]

    def padded(text: str, width: int, left: bool) -> str:
        blanks = " " * (width - display_width(text))
        return text + blanks if left else blanks + text

    return [
        "  ".join(
            padded(cell, width, j == 0) for j, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def _legend(maps: Maps) -> Iterator[str]:
    every = [maps.large, *maps.small]
    words = [f"queries down, keys across; · 0, █ {short_number(maps.greatest)}"]
    words += [f"{_HIDDEN} hidden"] * (maps.large.visible is not None)
    words += [f"{_NAN} not a number"] * any(np.isnan(cells.values).any() for cells in every)
    yield ", ".join(words)
    if note := cell_note(maps.large):
        yield note
