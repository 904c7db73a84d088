"""Masks as SVG: one self-contained file for a browser, a paper or a slide.

Hidden cells are hatched and visible ones are filled, so 'hidden' and 'visible with weight 0' look different.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lowtri.errors import MaskError
from lowtri.masks.mask import Mask
from lowtri.masks.panels import Panel, Part, Picture, Tokens, compose, scale_note
from lowtri.pictures.files import save_picture
from lowtri.pictures.labels import display_width
from lowtri.pictures.pages import card, page
from lowtri.pictures.svg import (
    HIDDEN,
    LETTER,
    cell_row,
    document,
    fill,
    grid_lines,
    legend,
    legend_width,
    text,
)

__all__ = ["html", "save", "shown_as_html", "shown_as_svg", "svg"]

_MARGIN, _GAP = 16, 40
_AXIS = 18  # left of the rows and below the columns, for the words "queries" and "keys"


def save(
    mask: Mask | str,
    path: str | Path,
    nq: int | None = None,
    nk: int | None = None,
    **options: Any,
) -> None:
    """Write the picture of a mask to ``path``, by its name as .svg, .html, .png or .pdf; atomically.

    PNG and PDF are drawn by matplotlib (``pip install 'lowtri[plot]'``). ``options`` are those of :func:`svg`.

    Raises:
        DataError: if ``path`` ends in none of these, or cannot be written, or matplotlib is missing.
    """
    forms = {".svg": lambda: svg(mask, nq, nk, **options), ".html": lambda: html(mask, nq, nk, **options)}
    save_picture(path, forms)


def svg(
    mask: Mask | str,
    nq: int | None = None,
    nk: int | None = None,
    *,
    beside: Mask | str | None = None,
    tokens: Tokens | None = None,
    query_tokens: Tokens | None = None,
    titles: Sequence[str] | None = None,
    weights: Any = None,
    beside_weights: Any = None,
) -> str:
    """The picture of a mask as SVG text.

    >>> from lowtri import causal
    >>> svg(causal(), 4, tokens="The black cat <end>").count("&lt;end&gt;")  # once on each axis
    2

    Args:
        mask, nq, nk, beside, tokens, query_tokens, titles: as in :func:`lowtri.masks.draw.draw`.
        weights: attention weights in 0 .. 1, ``(nq, nk)`` or with ``(B,)`` or ``(B, H)`` in front, arrays or tensors: they
            shade the visible cells.
        beside_weights: the same for the second mask.
    """
    picture = compose(
        mask,
        nq,
        nk,
        beside=beside,
        tokens=tokens,
        query_tokens=query_tokens,
        titles=titles,
        weights=(weights, beside_weights),
    )
    return _document(picture)


def html(mask: Mask | str, nq: int | None = None, nk: int | None = None, **options: Any) -> str:
    """A page of its own with the picture; ``options`` are those of :func:`svg`."""
    return page("mask", repr(mask), [svg(mask, nq, nk, **options)])


def shown_as_svg(mask: Mask) -> str | None:
    """The picture for notebooks. None where tables of different sizes are joined, which are shown as text."""
    try:
        return svg(mask)
    except MaskError:
        return None


def shown_as_html(mask: Mask) -> str | None:
    """The same with the mask's text below it."""
    picture = shown_as_svg(mask)
    return None if picture is None else card("mask", picture, repr(mask), str(mask))


def _document(picture: Picture) -> str:
    rows, columns = picture.panels[0].parts[0].cells.shape
    cell = 28.0 if picture.key_labels else max(6.0, min(24.0, 420 / max(rows, columns)))
    side = _MARGIN + _AXIS + LETTER * max(map(display_width, picture.query_labels), default=0)
    slanted = LETTER * max(map(display_width, picture.key_labels), default=0) * 0.71 + 8 if picture.key_labels else 0
    title = max(display_width(part.title) for panel in picture.panels for part in panel.parts) * LETTER
    part_width = max(columns * cell + slanted * 0.9, title) + _GAP
    part_height = 30 + slanted + rows * cell + 24 + _AXIS
    heading = 26 if picture.panels[0].heading else 0
    entries = list(_legend(picture))
    note = scale_note(picture.nq, picture.nk)
    bottom_width = max(legend_width(entries), LETTER * len(note))
    width = max(side + part_width * len(picture.panels[0].parts), 2 * _MARGIN + bottom_width)
    height = _MARGIN + (part_height + heading) * len(picture.panels) + 40 + 20 * (bool(picture.left_out) + bool(note))

    def body() -> Iterator[str]:
        y = float(_MARGIN)
        for panel in picture.panels:
            if panel.heading:
                yield text(_MARGIN, y + 12, panel.heading, ' font-weight="bold"')
            yield from _panel(panel, picture, side, y + heading, cell, slanted, part_width)
            y += part_height + heading
        if picture.left_out:
            yield text(_MARGIN, y + 8, f"... and {picture.left_out} more")
            y += 20
        yield from legend(_MARGIN, y, entries)
        if note:
            yield text(_MARGIN, y + 31, note)

    return document(width, height, " beside ".join(part.title for part in picture.panels[0].parts), body())


def _panel(
    panel: Panel, picture: Picture, left: float, top: float, cell: float, slanted: float, part_width: float
) -> Iterator[str]:
    top += 30 + slanted
    for i, label in enumerate(picture.query_labels):
        yield text(left - 8, top + (i + 0.5) * cell + 4, label, ' text-anchor="end"')
    for number, part in enumerate(panel.parts):
        x = left + number * part_width
        yield text(x, top - slanted - 14, part.title, ' font-weight="bold"')
        for j, label in enumerate(picture.key_labels):
            position = f"{x + (j + 0.5) * cell:.1f},{top - 6:.1f}"
            yield f'<text transform="translate({position}) rotate(-45)">{escape(label)}</text>'
        yield from _grid(part, x, top, cell)
        rows, columns = part.cells.shape
        yield text(x + columns * cell / 2, top + rows * cell + 16, "keys →", ' text-anchor="middle"')
    position = f"{_MARGIN - 4},{top + rows * cell / 2:.1f}"
    yield f'<text transform="translate({position}) rotate(90)" text-anchor="middle">queries →</text>'


def _grid(part: Part, x: float, y: float, cell: float) -> Iterator[str]:
    """The cells, equal neighbours as one rectangle, and the lines between them."""
    rows, columns = part.cells.shape
    for i in range(rows):
        yield from cell_row(x, y + i * cell, [_fill(part, i, j) for j in range(columns)], cell, cell)
    yield grid_lines(x, y, rows, columns, cell, cell)


_FILLED, _PARTIAL = fill("visible"), fill("partly")


def _fill(part: Part, i: int, j: int) -> str:
    if part.cells[i, j] == 0:
        return HIDDEN
    if part.weights is not None:  # from transparent at 0 to the full colour at 1
        return f'{_FILLED} fill-opacity="{part.weights[i, j]:.3f}"'
    return _PARTIAL if part.cells[i, j] == 1 else _FILLED


def _legend(picture: Picture) -> Iterator[tuple[str, str]]:
    """Each way in which cells of this picture may be filled, and its meaning."""
    shaded = {part.weights is not None for panel in picture.panels for part in panel.parts}
    yield _FILLED, " or ".join(["may see"] * (False in shaded) + ["weight 1"] * (True in shaded))
    if True in shaded:
        yield f'{_FILLED} fill-opacity="0.5"', "weight 0.5"
        yield f'{_FILLED} fill-opacity="0"', "weight 0"
    if picture.positions_a_cell > 1:
        yield _PARTIAL, "partly"
    yield HIDDEN, "hidden"
