"""The colours of every picture and page, for light and for dark screens.

Queries are blue, keys vermilion, values green, visible pairs and weights purple, leaks red, hidden pairs hatched: they differ in
lightness and in texture too, so that no picture depends on seeing hues.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    *("GROUND", "HATCH", "INK", "KEY", "LEAK", "LINE", "PAPER", "PARTLY", "QUERY", "SOFT", "VALUE", "VISIBLE"),
    "Colour",
]


class Colour(NamedTuple):
    """One colour on a light and on a dark screen.

    >>> VISIBLE.rgb
    ('122, 60, 158', '203, 159, 232')
    """

    light: str  # "#rrggbb"
    dark: str

    @property
    def rgb(self) -> tuple[str, str]:
        """The same as numbers from 0 to 255, for colours with an opacity."""
        light, dark = (", ".join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5)) for colour in self)
        return light, dark


GROUND = Colour("#fbfaf7", "#15161a")  # of a page, below its cards
INK = Colour("#1d1c1a", "#e9e6df")
PAPER = Colour("#ffffff", "#1c1e24")
SOFT = Colour("#5c5952", "#a9a69d")  # remarks
LINE = Colour("#dedad1", "#34363e")
HATCH = Colour("#d9d5cb", "#3b3e47")
VISIBLE = Colour("#7a3c9e", "#cb9fe8")
PARTLY = Colour("#cdb4dc", "#5d4a6d")
LEAK = Colour("#b3261e", "#f2877e")
QUERY = Colour("#0b5fa5", "#7db7f0")
KEY = Colour("#a8480a", "#eea56a")
VALUE = Colour("#0a6b50", "#5fcaa5")
