"""Masks as SVG: one self-contained file for a browser, a paper or a slide.

Hidden cells are hatched and visible ones are filled, so 'hidden' and 'visible with weight 0' look different. Colours are SVG
attributes, which every program reads, for a light background; a style sheet replaces them on dark screens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from lowtri.errors import DataError, MaskError
from lowtri.files import write_text
from lowtri.masks.labels import display_width
from lowtri.masks.mask import Mask
from lowtri.masks.palette import HATCH, INK, LINE, PAPER, PARTLY, VISIBLE
from lowtri.masks.panels import Panel, Part, Picture, Tokens, compose

__all__ = ["html", "save", "shown_as_html", "shown_as_svg", "svg"]

_DARK = (  # class, property, colour
    *(("ink", "fill", INK.dark), ("paper", "fill", PAPER.dark), ("line", "stroke", LINE.dark)),
    *(("hatch", "stroke", HATCH.dark), ("visible", "fill", VISIBLE.dark), ("partly", "fill", PARTLY.dark)),
)
_LETTER = 7.2  # width of one column of text at 12 px
_MARGIN, _GAP = 16, 40
_AXIS = 18  # left of the rows and below the columns, for the words "queries" and "keys"


def save(
    mask: Mask | str,
    path: str | Path,
    nq: int = 16,
    nk: int | None = None,
    **options: Any,
) -> None:
    """Write the picture of a mask to ``path``, as SVG or as a page, by its name; atomically. ``options`` are those of :func:`svg`.

    Raises:
        DataError: if ``path`` ends neither in .svg nor in .html, or cannot be written.
    """
    target = Path(path)
    form = {".svg": svg, ".html": html}.get(target.suffix.lower())
    if form is None:
        raise DataError(
            f"save: {path} ends neither in .svg nor in .html, the formats that are written. Fix: {target.stem}.svg."
        )
    text = form(mask, nq, nk, **options)
    try:
        write_text(target, text)
    except OSError as error:
        raise DataError(
            f"save: {path} cannot be written: {error.strerror}. Fix: a folder that exists and that you may write to."
        ) from None


def svg(
    mask: Mask | str,
    nq: int = 16,
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
    return "\n".join(_document(picture)) + "\n"


def html(mask: Mask | str, nq: int = 16, nk: int | None = None, **options: Any) -> str:
    """A page of its own with the picture; ``options`` are those of :func:`svg`."""
    style = f"body{{margin:0;background:{PAPER.light}}}@media (prefers-color-scheme:dark){{body{{background:{PAPER.dark}}}}}"
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(repr(mask))}</title>'
    )
    picture = svg(mask, nq, nk, **options)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{style}</style></head><body>\n{picture}</body></html>\n'
    )


def shown_as_svg(mask: Mask) -> str | None:
    """The picture for notebooks: the first 12 positions. None for tables that do not cover them, which are shown as text."""
    try:
        return svg(mask, 12)
    except MaskError:
        return None


def shown_as_html(mask: Mask) -> str | None:
    """The same with the mask's text below it."""
    picture = shown_as_svg(mask)
    return (
        None
        if picture is None
        else f"<figure>{picture}<figcaption><code>{escape(repr(mask))}</code></figcaption></figure>"
    )


def _document(picture: Picture) -> Iterator[str]:
    rows, columns = picture.panels[0].parts[0].cells.shape
    cell = 28.0 if picture.key_labels else max(6.0, min(24.0, 420 / max(rows, columns)))
    side = _MARGIN + _AXIS + _LETTER * max(map(display_width, picture.query_labels), default=0)
    slanted = _LETTER * max(map(display_width, picture.key_labels), default=0) * 0.71 + 8 if picture.key_labels else 0
    title = max(display_width(part.title) for panel in picture.panels for part in panel.parts) * _LETTER
    part_width = max(columns * cell + slanted * 0.9, title) + _GAP
    part_height = 30 + slanted + rows * cell + 24 + _AXIS
    heading = 26 if picture.panels[0].heading else 0
    legend = list(_legend(picture))
    legend_width = sum(42 + _LETTER * len(name) for _, name in legend) + _LETTER * len(_cell_note(picture))
    width = max(side + part_width * len(picture.panels[0].parts), 2 * _MARGIN + legend_width)
    height = _MARGIN + (part_height + heading) * len(picture.panels) + 40 + (20 if picture.left_out else 0)

    label = " beside ".join(part.title for part in picture.panels[0].parts)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="ui-monospace, Menlo, Consolas, '
        f'\'DejaVu Sans Mono\', monospace" font-size="12" fill="{INK.light}" class="lowtri-ink" '
        'style="max-width:100%;height:auto">'  # on a narrow screen smaller, in its own proportions
    )
    yield f"<title>{escape(label)}</title>"
    dark = "".join(f".lowtri-{name}{{{attribute}:{colour}}}" for name, attribute, colour in _DARK)
    yield f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>"
    yield (
        f'<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M0 0V6" class="lowtri-hatch" stroke="{HATCH.light}" stroke-width="2"/></pattern></defs>'
    )
    yield f'<rect width="100%" height="100%" class="lowtri-paper" fill="{PAPER.light}"/>'
    y = float(_MARGIN)
    for panel in picture.panels:
        if panel.heading:
            yield _text(_MARGIN, y + 12, panel.heading, ' font-weight="bold"')
        yield from _panel(panel, picture, side, y + heading, cell, slanted, part_width)
        y += part_height + heading
    if picture.left_out:
        yield _text(_MARGIN, y + 8, f"... and {picture.left_out} more")
        y += 20
    x = float(_MARGIN)
    for fill, name in legend:
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="14" stroke="{LINE.light}" {fill}/>'
        yield _text(x + 20, y + 11, name)
        x += 42 + _LETTER * len(name)
    if picture.positions_a_cell > 1:
        yield _text(x, y + 11, _cell_note(picture))
    yield "</svg>"


def _panel(
    panel: Panel, picture: Picture, left: float, top: float, cell: float, slanted: float, part_width: float
) -> Iterator[str]:
    top += 30 + slanted
    for i, label in enumerate(picture.query_labels):
        yield _text(left - 8, top + (i + 0.5) * cell + 4, label, ' text-anchor="end"')
    for number, part in enumerate(panel.parts):
        x = left + number * part_width
        yield _text(x, top - slanted - 14, part.title, ' font-weight="bold"')
        for j, label in enumerate(picture.key_labels):
            position = f"{x + (j + 0.5) * cell:.1f},{top - 6:.1f}"
            yield f'<text transform="translate({position}) rotate(-45)">{escape(label)}</text>'
        yield from _grid(part, x, top, cell)
        rows, columns = part.cells.shape
        yield _text(x + columns * cell / 2, top + rows * cell + 16, "keys →", ' text-anchor="middle"')
    position = f"{_MARGIN - 4},{top + rows * cell / 2:.1f}"
    yield f'<text transform="translate({position}) rotate(90)" text-anchor="middle">queries →</text>'


def _grid(part: Part, x: float, y: float, cell: float) -> Iterator[str]:
    """The cells, equal neighbours as one rectangle, and the lines between them."""
    rows, columns = part.cells.shape
    for i in range(rows):
        j = 0
        for fill, equal in groupby(_fill(part, i, j) for j in range(columns)):
            n = len(list(equal))
            yield f'<rect x="{x + j * cell:.1f}" y="{y + i * cell:.1f}" width="{n * cell:.1f}" height="{cell:.1f}" {fill}/>'
            j += n
    lines = [f"M{x:.1f} {y + i * cell:.1f}h{columns * cell:.1f}" for i in range(rows + 1)]
    lines += [f"M{x + j * cell:.1f} {y:.1f}v{rows * cell:.1f}" for j in range(columns + 1)]
    yield f'<path d="{"".join(lines)}" fill="none" class="lowtri-line" stroke="{LINE.light}" stroke-width="0.7"/>'


_HIDDEN = 'fill="url(#hidden)"'
_FILLED = f'class="lowtri-visible" fill="{VISIBLE.light}"'
_PARTIAL = f'class="lowtri-partly" fill="{PARTLY.light}"'


def _fill(part: Part, i: int, j: int) -> str:
    if part.cells[i, j] == 0:
        return _HIDDEN
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
    yield _HIDDEN, "hidden"


def _cell_note(picture: Picture) -> str:
    size = picture.positions_a_cell
    return f"a cell: {size} x {size} pairs" if size > 1 else ""


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escape(text)}</text>'
