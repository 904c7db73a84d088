"""Pictures of a plan of shards, as text and as SVG: a line for each rank. At most 16 lines of 64 cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtri.pictures.svg import HIDDEN, MAX_CELLS, State, Strip, fill, strips_svg

__all__ = ["RankRow", "as_svg", "as_text"]


_KINDS = (
    State("·", HIDDEN, "not seen"),
    State("▒", fill("partly"), "received"),
    State("█", fill("visible"), "its own tokens"),
)
_NONE, _RECEIVED, _HELD = range(3)


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
    strips = [Strip(row.name, row.cells(), row.text) for row in rows]
    return strips_svg(title, strips, _KINDS, " ".join(["tokens →", *_more(rows, ranks)]))


def _more(rows: list[RankRow], ranks: int) -> list[str]:
    return [f"... and {ranks - len(rows):,} more ranks"] * (ranks > len(rows))
