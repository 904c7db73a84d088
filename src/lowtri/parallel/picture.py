"""Pictures of a plan of shards, as text and as HTML: a line for each rank. At most 16 lines of 64 cells."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.panels import MAX_CELLS

__all__ = ["RankRow", "as_html", "as_text"]

_NONE, _RECEIVED, _HELD = range(3)
_BLOCKS = "·▒█"
_COLOURS = ("#8882", "#e8a33d", "#3f7cc8")


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
    lines = [f"{row.name:<{width}}  {''.join(_BLOCKS[cell] for cell in row.cells())}  {row.text}" for row in rows]
    return "\n".join([title, *lines, *_more(rows, ranks)])


def as_html(title: str, rows: list[RankRow], ranks: int) -> str:
    """A table that needs no style sheet, for light and dark pages."""
    lines = []
    for row in rows:
        cells = "".join(
            f'<span style="display:inline-block;width:8px;height:14px;background:{_COLOURS[cell]}"></span>'
            for cell in row.cells()
        )
        lines.append(
            f'<tr><td>{escape(row.name)}</td><td style="white-space:nowrap;line-height:0">{cells}</td>'
            f"<td>{escape(row.text)}</td></tr>"
        )
    more = "".join(f"<p>{escape(line)}</p>" for line in _more(rows, ranks))
    return f"<div><p>{escape(title)}</p><table>{''.join(lines)}</table>{more}</div>"


def _more(rows: list[RankRow], ranks: int) -> list[str]:
    return [f"... and {ranks - len(rows):,} more ranks"] * (ranks > len(rows))
