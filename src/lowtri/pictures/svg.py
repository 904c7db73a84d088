"""SVG: the colours of all pictures for light and dark screens, the file around a picture, its texts and its cells.

Queries are blue, keys vermilion, values green, visible pairs and weights purple, leaks red, hidden pairs hatched: they differ in
lightness and in texture too, so that no picture depends on seeing hues. Colours are SVG attributes, which every program reads, for
a light background; a style sheet replaces them on dark screens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import NamedTuple


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
_CLASSES = {  # class -> property, colour
    **{"ink": ("fill", INK), "paper": ("fill", PAPER), "line": ("stroke", LINE), "hatch": ("stroke", HATCH)},
    **{"visible": ("fill", VISIBLE), "partly": ("fill", PARTLY), "leak": ("fill", LEAK), "soft": ("fill", SOFT)},
    **{"query": ("fill", QUERY), "key": ("fill", KEY), "value": ("fill", VALUE)},
    "outline": ("stroke", VISIBLE),
    "dark": ("fill", Colour(INK.light, PAPER.dark)),
}
_HATCHING = (
    '<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M0 0V6" class="lowtri-hatch" stroke="{HATCH.light}" stroke-width="2"/></pattern></defs>\n'
)

HIDDEN = 'fill="url(#hidden)"'  # the attributes of a hatched cell
OUTLINED = f'class="lowtri-outline" fill="none" stroke="{VISIBLE.light}"'
BOLD = ' font-weight="bold"'
LETTER = 7.2  # width of one column of text at 12 px


def declared(theme: str) -> str:
    """The colours as declarations of CSS variables, for one theme, "light" or "dark", or for "both".

    >>> declared("light")[:30], declared("both")[:38]
    ('--paper: #fbfaf7; --card: #fff', '--paper: light-dark(#fbfaf7, #15161a);')
    """
    return "; ".join(f"--{name}: {getattr(colour, theme)}" for name, colour in _VARIABLES.items())


def fill(name: str) -> str:
    """The attributes of a shape or text in a colour: ink, paper, dark, visible, partly, leak, soft, query, key or value.

    >>> fill("leak")
    'class="lowtri-leak" fill="#b3261e"'
    """
    return f'class="lowtri-{name}" fill="{_CLASSES[name][1].light}"'


def ink_over(share: float) -> str:
    """The attributes of a number in a cell with this share of the colour of weights: ink, paper, or what is dark in both schemes.

    >>> [ink_over(share).split('"')[1] for share in (0.3, 0.7, 0.9)]
    ['lowtri-ink', 'lowtri-dark', 'lowtri-paper']
    """
    if share <= 0.6:
        return fill("ink")
    return fill("dark") if share < 0.77 else fill("paper")


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text; ``words`` are escaped."""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(words)}</text>'


def turned(x: float, y: float, words: str, degrees: int) -> str:
    """A line of text that is turned clockwise around its beginning."""
    return f'<text transform="translate({x:.1f},{y:.1f}) rotate({degrees})">{escape(words)}</text>'


def document(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """A whole SVG file; on a narrow screen it is smaller, in its own proportions."""
    content = "\n".join(body)
    if HIDDEN in content:
        content = _HATCHING + content
    used = {"ink", "paper", *re.findall(r'class="lowtri-(\w+)"', content)}
    dark = "".join(f".lowtri-{name}{{{c[0]}:{c[1].dark}}}" for name, c in _CLASSES.items() if name in used)
    dark += f":where(rect[stroke]){{stroke:{LINE.dark}}}"  # the frames of legends
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="12" {fill("ink")} '
        f'style="max-width:100%;height:auto">\n<title>{escape(title)}</title>\n'
        f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>\n"
        f"<rect {size} {fill('paper')}/>\n{content}\n</svg>\n"
    )
