"""A key/value cache as a picture: how long each position is held. As text, and as SVG for notebooks."""

from __future__ import annotations

from lowtri.generation.cache import KVCache, Lifetimes
from lowtri.pictures.grids import MAX_CELLS, Grid, Look, Panel, picture, used
from lowtri.pictures.pages import card
from lowtri.pictures.svg import HIDDEN, fill

_ROWS = 8  # rows of a batch that are drawn; the rest is counted
_LOOKS = (  # in the order of the states of Lifetimes
    Look("·", HIDDEN, "not held: evicted, or padding"),
    Look("░", fill("visible") + ' fill-opacity="0.15"', "held, hidden from now on"),
    Look("▓", fill("partly"), "held until the mask hides it"),
    Look("█", fill("visible"), "stays: every later query sees it"),
)


def draw(cache: KVCache) -> str:
    """The positions from 0 on, a sign for each, and a line for each row of a batch with positions of its own.

    >>> import numpy as np
    >>> from lowtri import KVCache
    >>> cache = KVCache("causal & (window(4) | first(2))", block=1)
    >>> for t in range(12):
    ...     _ = cache.append(np.zeros((1, 8)), np.zeros((1, 8)))
    >>> print(cache.draw())
    KVCache(causal & (window(4) | first(2))): 6 held, 6 evicted, 768 bytes
    ██······░▓▓▓
    · not held: evicted, or padding
    ░ held, hidden from now on
    ▓ held until the mask hides it
    █ stays: every later query sees it

    Sinks and prefixes stay; a window's keys are held until no later query sees them. Beyond 64 positions a sign stands for
    several, and for the longest-lived of them.
    """
    lifetimes = cache.lifetimes(_ROWS, MAX_CELLS)
    lines = [repr(cache), *Grid(lifetimes.states, _LOOKS).lines()]
    if lifetimes.rows_left_out:
        lines.append(f"... and {lifetimes.rows_left_out} more rows")
    lines += [f"{look.sign} {look.meaning}" for look in used(_LOOKS, lifetimes.states)]
    if lifetimes.step > 1:
        lines.append(f"a sign: {lifetimes.step:,} positions")
    return "\n".join(lines)


def notebook_svg(cache: KVCache) -> str:
    """The picture of :func:`draw` as SVG text."""
    lifetimes = cache.lifetimes(_ROWS, MAX_CELLS)
    states = lifetimes.states
    below = "positions →" if states.size else "nothing appended yet"
    if lifetimes.rows_left_out:
        below += f"   ... and {lifetimes.rows_left_out:,} more rows"
    labels = [f"row {i}" for i in range(len(states))] if len(states) > 1 else ()
    size = min(24.0, 480 / max(states.shape[1], 1))
    grid = Grid(states, _LOOKS, size, rows=labels, ends=_ends(lifetimes))
    notes = []
    if lifetimes.step > 1:
        notes.append(f"a cell: {lifetimes.step:,} positions, and the longest-lived of them")
    return picture(repr(cache), [Panel([grid], repr(cache), below, "")], used(_LOOKS, states), notes)


def notebook_html(cache: KVCache) -> str:
    """The picture with the numbers of slots, tokens and bytes below it."""
    held = f"{cache.held:,} of {cache.capacity:,} slots hold a token, {cache.evicted:,} tokens evicted"
    return card("cache", notebook_svg(cache), f"{held}, {cache.bytes:,} bytes", draw(cache))


def _ends(lifetimes: Lifetimes) -> list[str]:
    """The first position and the last one, as far as there are any."""
    ends = ["0", f"{lifetimes.positions - 1:,}"]
    return ends[: lifetimes.positions]
