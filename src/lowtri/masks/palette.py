"""The colours of every picture and page, for light and for dark screens.

Queries are blue, keys vermilion, values green, visible pairs and weights purple, leaks red, hidden pairs hatched: they differ in
lightness and in texture too, so that no picture depends on seeing hues.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    *(
        "GROUND",
        "HATCH",
        "INK",
        "KEY",
        "LEAK",
        "LINE",
        "PAPER",
        "PARTLY",
        "QUERY",
        "SOFT",
        "UNSURE",
        "VALUE",
        "VISIBLE",
    ),
    *("Colour", "declared"),
]


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
