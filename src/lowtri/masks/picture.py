"""Pictures of masks, as text and as SVG. Their size is bounded.

A picture has at most 64 rows and columns. Up to that size a cell is one pair; beyond it a cell is a square of positions: all
visible, some, or none, so a picture of a million positions costs as much as one of a hundred. Hidden cells are hatched and visible
ones are filled, so 'hidden' and 'visible with weight 0' look different.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.array_masks import Table
from lowtri.masks.arrays import in_numpy
from lowtri.masks.mask import Mask, first_position
from lowtri.masks.text import as_mask
from lowtri.masks.tile import POSITION_MAX, check_count
from lowtri.pictures.files import save_picture
from lowtri.pictures.labels import Tokens, aligned, display_width, shortened, token_labels, token_list
from lowtri.pictures.pages import card, page
from lowtri.pictures.svg import HIDDEN, LETTER, MAX_CELLS, Grid, document, fill, legend, legend_width, shades, text

_PAIRS_READ = 2**20  # up to so many pairs, each is read; beyond, cells show what the mask answers for a tile
MIN_POSITIONS = 12  # of a picture whose size nobody gave
MAX_PANELS = 16  # batch rows and heads that are drawn; the rest is counted
_BLOCKS = "·▒█"  # hidden, partly, visible
_TICKS = "✗~✓"
_NUMBERS = ("-inf", "", "0")  # what is added to the scores
_LATEX = (r"-\infty", "", "0")
_GAP = "    "  # between two masks side by side
_MARGIN, _BETWEEN = 16, 40
_AXIS = 18  # left of the rows and below the columns, for the words "queries" and "keys"


def draw(
    mask: Mask | str,
    nq: int | None = None,
    nk: int | None = None,
    *,
    beside: Mask | str | None = None,
    tokens: Tokens | None = None,
    query_tokens: Tokens | None = None,
    ticks: bool = False,
    numbers: bool = False,
    latex: bool = False,
    titles: Sequence[str] | None = None,
) -> str:
    """A mask as text: a line for each query, a column for each key, █ where it may see and · where not.

    >>> from lowtri import causal, full
    >>> print(draw(causal(), 3, tokens="I love NLP", ticks=True))
          I  love  NLP
    I     ✓   ✗     ✗
    love  ✓   ✓     ✗
    NLP   ✓   ✓     ✓
    >>> print(draw(full(), 3, beside=causal()))
    full    causal
    ███     █··
    ███     ██·
    ███     ███
    >>> print(draw(causal(), 1_000_000).splitlines()[2][:4])  # a cell is 15,625 positions each way: ▒ is partly
    ██▒·

    >>> print(draw("causal & window(64)").splitlines()[-1])  # 96 positions show how keys leave the window
    a cell: 2 x 2 of 96 x 96 pairs: █ all visible, ▒ some, · none
    >>> print(draw(causal(), 3, numbers=True))
    0  -inf  -inf
    0     0  -inf
    0     0     0
    >>> print(draw(causal(), 2, latex=True))
    \\left[\\begin{array}{rr}
      0 & -\\infty \\\\
      0 & 0
    \\end{array}\\right]

    Args:
        mask: the mask, or its text. A batched mask is drawn row by row and head by head, under headings, at most 16 of them.
        nq, nk: how many queries and keys; ``nk`` defaults to ``nq``, and the queries stand at the last ``nq`` positions.
            Without ``nq``, as many as there are tokens, or as show the mask: its largest window, document or chunk, and half as
            many positions again, at least 12. Beyond 64 a cell is a square of positions, ▒ means that some of its pairs are
            visible, and the last line says the scale.
        beside: a second mask, drawn on the right of the first.
        tokens: a label for each key, in a list; a text is cut at its spaces, and by characters where its script has none.
            The queries are the last ``nq`` of them.
        query_tokens: labels for the queries, if they are other tokens (cross-attention).
        ticks: ✓ and ✗ instead of blocks, in a table; without tokens the labels are positions.
        numbers: the matrix that is added to the scores, 0 where a query may see and -inf where not.
        latex: that matrix for LaTeX, without labels or titles; it needs no package.
        titles: a name for each of the one or two masks, instead of their formulas.

    Raises:
        MaskError: if there are not as many labels as queries and keys, if more than one of ``ticks``, ``numbers`` and
            ``latex`` is set, if a matrix is larger than 64 x 64, or if the two masks' batches do not fit together.
    """
    if ticks + numbers + latex > 1:
        raise MaskError("draw: ticks, numbers and latex are three forms of one picture. Fix: set one of them.")
    if latex and (tokens is not None or titles is not None):
        raise MaskError("draw: the LaTeX matrix has no labels. Fix: leave tokens and titles out.")
    if nq is None and tokens is None and (ticks or numbers or latex):  # every pair is written
        masks = [as_mask(mask)] if beside is None else [as_mask(mask), as_mask(beside, "beside")]
        nq, nk = (min(n, MAX_CELLS) for n in (picture_size(*masks) if nk is None else (nk, nk)))
    if ticks and tokens is None:
        nq = check_count("draw", "nq", nq)
        nk = nq if nk is None else check_count("draw", "nk", nk)
        if max(nq, nk) > MAX_CELLS:
            raise MaskError(f"draw: ticks for {nq} queries and {nk} keys: at most {MAX_CELLS} each way. Fix: no ticks.")
        tokens = [str(k) for k in range(nk)]
        query_tokens = [str(q + max(nk - nq, 0)) for q in range(nq)] if query_tokens is None else query_tokens
    picture = _compose(mask, nq, nk, beside=beside, tokens=tokens, query_tokens=query_tokens, titles=titles)
    if (numbers or latex) and picture.positions_a_cell > 1:
        raise MaskError(
            f"draw: {max(picture.nq, picture.nk)} positions: a matrix has at most 64 each way. Fix: a smaller n."
        )
    if latex:
        more = [f"% ... and {picture.left_out} more"] * bool(picture.left_out)
        return "\n\n".join([_latex(panel) for panel in picture.panels] + more)
    titled = beside is not None or titles is not None
    marks = _TICKS if ticks else _NUMBERS if numbers else _BLOCKS
    blocks = [_panel(panel, picture, marks, titled) for panel in picture.panels]
    if picture.left_out:
        blocks.append(f"... and {picture.left_out} more")
    if note := _scale_note(picture.nq, picture.nk):
        blocks[-1] += f"\n{note}: █ all visible, ▒ some, · none"
    return "\n\n".join(blocks)


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
        mask, nq, nk, beside, tokens, query_tokens, titles: as in :func:`lowtri.masks.picture.draw`.
        weights: attention weights in 0 .. 1, ``(nq, nk)`` or with ``(B,)`` or ``(B, H)`` in front, arrays or tensors: they
            shade the visible cells.
        beside_weights: the same for the second mask.
    """
    picture = _compose(
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
    """The picture for notebooks, with the mask's text below it."""
    picture = shown_as_svg(mask)
    return None if picture is None else card("mask", picture, repr(mask), str(mask))


@dataclass(frozen=True)
class _Part:
    """One mask in a panel."""

    title: str
    cells: NDArray[np.int8]  # (rows, columns): 0 hidden, 1 partly, 2 visible
    weights: NDArray[np.float64] | None = None  # (rows, columns), in 0 .. 1


@dataclass(frozen=True)
class _Panel:
    """One batch row and head: a mask, or two side by side."""

    heading: str  # "" where the masks do not differ by batch or head
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Picture:
    """All panels and their labels."""

    panels: tuple[_Panel, ...]
    left_out: int  # how many panels exceed MAX_PANELS
    nq: int
    nk: int
    query_labels: tuple[str, ...]  # one for each row, or empty
    key_labels: tuple[str, ...]  # one for each column, or empty

    @property
    def positions_a_cell(self) -> int:
        return _cell_size(self.nq, self.nk)


def picture_size(*masks: Mask) -> tuple[int, int]:
    """How many queries and keys show these masks: the largest window, document or chunk, and half as many positions again.

    >>> from lowtri import causal, documents, window
    >>> picture_size(causal()), picture_size(causal() & window(64)), picture_size(documents(lengths=[5, 9, 4]))
    ((12, 12), (96, 96), (18, 18))

    A mask with a table has pairs for the table's positions only: its size is that of the smallest table.
    """
    tables = [table.table.array.shape[-2:] for mask in masks for table in _tables_in(mask)]
    if tables:
        nq, nk = min(tables, key=lambda shape: int(shape[1]))
        return int(nq), int(nk)
    n = min(max(MIN_POSITIONS, *[mask._extent() for mask in masks]), POSITION_MAX)
    return n, n


def _tables_in(mask: Mask) -> Iterator[Table]:
    if isinstance(mask, Table):
        yield mask
    for part in mask.operands:
        yield from _tables_in(part)


def _scale_note(nq: int, nk: int) -> str:
    """What a cell of the picture stands for; empty if it is one pair."""
    size = _cell_size(nq, nk)
    return f"a cell: {size:,} x {size:,} of {nq:,} x {nk:,} pairs" if size > 1 else ""


def _compose(
    mask: Mask | str,
    nq: int | None = None,
    nk: int | None = None,
    *,
    beside: Mask | str | None = None,
    tokens: Tokens | None = None,
    query_tokens: Tokens | None = None,
    titles: Sequence[str] | None = None,
    weights: Sequence[Any] = (),
) -> _Picture:
    """The picture of ``mask`` and ``beside``; the arguments are those of :func:`draw`.

    Without ``nq`` the tokens or the weights give the number of positions, or else the masks themselves (:func:`picture_size`).

    Args:
        weights: for each mask its attention weights, ``(nq, nk)`` or with the batch in front, or None.
    """
    masks = [as_mask(mask)] if beside is None else [as_mask(mask), as_mask(beside, "beside")]
    if nq is None:
        nq, nk = _size(masks, tokens, query_tokens, weights, nk)
    nq = check_count("draw", "nq", nq)
    nk = nq if nk is None else check_count("draw", "nk", nk)
    if nq < 1 or nk < 1:
        raise MaskError(f"draw: {nq} queries and {nk} keys: there is nothing to draw. Fix: at least one of each.")
    keys, queries = token_labels("draw", MaskError, nq, nk, tokens, query_tokens)
    if keys and max(nq, nk) > MAX_CELLS:
        raise MaskError(f"draw: {nk} tokens do not fit on a picture of {MAX_CELLS} cells. Fix: draw without tokens.")
    if titles is not None and len(titles) != len(masks):
        raise MaskError(f"draw: got {len(titles)} titles; expected one for each of {len(masks)} masks.")
    names = [shortened(text, 60) for text in (map(repr, masks) if titles is None else titles)]
    checked_weights = [_weights(each, nq, nk) for each in (*weights, None, None)[: len(masks)]]

    batch = (masks[0] & masks[-1]).batch  # the common one; raises where the two do not fit together
    panels = []
    for index in islice(np.ndindex(batch), MAX_PANELS):
        b, h = (*index, 0, 0)[:2]
        parts = [
            _Part(
                name,
                cells_of(mask.at(b, h), nq, nk, _cell_size(nq, nk)),
                None if of_batch is None else _weights_at(of_batch, b, h),
            )
            for name, mask, of_batch in zip(names, masks, checked_weights, strict=True)
        ]
        panels.append(_Panel(_heading(batch, b, h), tuple(parts)))
    left_out = math.prod(batch) - len(panels)
    return _Picture(tuple(panels), left_out, nq, nk, queries, keys)


def _size(
    masks: Sequence[Mask], tokens: Tokens | None, query_tokens: Tokens | None, weights: Sequence[Any], nk: int | None
) -> tuple[int, int]:
    """How many queries and keys, where the user gave no number of queries."""
    if tokens is not None:
        keys = len(token_list(tokens))
        return keys if query_tokens is None else len(token_list(query_tokens)), keys if nk is None else nk
    shape: tuple[int, ...] = next((np.shape(each) for each in weights if each is not None), ())
    if len(shape) >= 2:
        return shape[-2], shape[-1]
    return picture_size(*masks) if nk is None else (nk, nk)


def _cell_size(nq: int, nk: int) -> int:
    """Positions to a cell, the same both ways, so that the diagonal stays a diagonal."""
    return -(-max(nq, nk) // MAX_CELLS)


def cells_of(mask: Mask, nq: int, nk: int, step: int) -> NDArray[np.int8]:
    """(rows, columns): for each cell of ``step`` positions each way, 0 hidden, 1 partly, 2 visible."""
    if nq * nk <= _PAIRS_READ:  # the answer for a tile may be PARTIAL where its pairs are equal
        pairs = mask.dense(nq, nk)
        edges = np.arange(0, nq, step), np.arange(0, nk, step)
        some, every = (
            join.reduceat(join.reduceat(pairs, edges[0], axis=0), edges[1], axis=1)
            for join in (np.logical_or, np.logical_and)
        )
        return some.astype(np.int8) + every
    start, nq, nk = first_position(mask, nq, nk)
    q0 = start + step * np.arange(-(-nq // step))[:, None]
    k0 = step * np.arange(-(-nk // step))[None, :]
    cells: NDArray[np.int8] = mask.tile(q0, np.minimum(q0 + step, start + nq), k0, np.minimum(k0 + step, nk))
    return cells


def _weights(weights: Any, nq: int, nk: int) -> NDArray[np.float64] | None:
    if weights is None:
        return None
    numbers = in_numpy("weights", weights)
    if isinstance(numbers, str) or numbers.dtype.kind not in "fiub":
        given = numbers if isinstance(numbers, str) else f"weights are {numbers.dtype}"
        raise MaskError(f"draw: {given}, but expected real numbers, ({nq}, {nk}). Fix: pass them after the softmax.")
    array = numbers.astype(np.float64)
    if array.ndim not in (2, 3, 4) or array.shape[-2:] != (nq, nk):
        raise MaskError(f"draw: weights have shape {array.shape}, but the picture has ({nq}, {nk}) pairs.")
    if max(nq, nk) > MAX_CELLS:
        raise MaskError(f"draw: weights of {nq} x {nk} pairs: a picture has at most {MAX_CELLS} cells each way.")
    if not np.all((array >= 0) & (array <= 1.0001)):
        raise MaskError(
            "draw: weights lie between 0 and 1, but some of these do not. Fix: pass them after the softmax."
        )
    return array


def _weights_at(weights: NDArray[np.float64], b: int, h: int) -> NDArray[np.float64]:
    """The weights of one batch row and head; a leading size of 1 is broadcast."""
    for index in (b, h)[: weights.ndim - 2]:
        if index >= weights.shape[0] > 1:
            raise MaskError(f"draw: weights have no batch row or head {index}: their shape ends at {weights.shape[0]}.")
        weights = weights[0 if weights.shape[0] == 1 else index]
    return weights


def _heading(batch: tuple[int, ...], b: int, h: int) -> str:
    if not batch:
        return ""
    row, head = f"batch row {b}", f"head {h}"
    if len(batch) == 1:
        return row
    return head if batch[0] == 1 else f"{row}, {head}"


def _latex(panel: _Panel) -> str:
    """The matrices of one batch row and head; an array, since bmatrix ends at ten columns."""
    matrices = []
    for part in panel.parts:
        rows = " \\\\\n  ".join(" & ".join(_LATEX[cell] for cell in row) for row in part.cells.tolist())
        columns = "r" * part.cells.shape[1]
        matrices.append(f"\\left[\\begin{{array}}{{{columns}}}\n  {rows}\n\\end{{array}}\\right]")
    heading = f"% {panel.heading}\n" if panel.heading else ""
    return heading + "\n\\quad\n".join(matrices)


def _panel(panel: _Panel, picture: _Picture, marks: Sequence[str], titled: bool) -> str:
    columns = []
    for part in panel.parts:
        rows = [[marks[cell] for cell in row] for row in part.cells.tolist()]
        if picture.key_labels:
            lines = _table(rows, picture)
        elif marks is _NUMBERS:
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        else:
            lines = ["".join(row) for row in rows]
        columns.append([part.title, *lines] if titled else lines)
    heading = [panel.heading] if panel.heading else []
    return "\n".join(heading + aligned(list(zip_longest(*columns, fillvalue="")), _GAP))


def _table(rows: list[list[str]], picture: _Picture) -> list[str]:
    """Rows of marks with the queries' labels on the left, each mark in the middle below its key's label."""
    widths = [max(display_width(mark) for mark in column) for column in zip(picture.key_labels, *rows, strict=True)]
    centred = [[" " * ((w - len(mark)) // 2) + mark for mark, w in zip(row, widths, strict=True)] for row in rows]
    lines = zip(("", *picture.query_labels), (picture.key_labels, *centred), strict=True)
    return aligned([(label, *cells) for label, cells in lines], "  ")


def _document(picture: _Picture) -> str:
    rows, columns = picture.panels[0].parts[0].cells.shape
    cell = 28.0 if picture.key_labels else max(6.0, min(24.0, 420 / max(rows, columns)))
    panels = [
        [Grid(_looks(part), cell, cell, columns=picture.key_labels) for part in panel.parts] for panel in picture.panels
    ]
    first = replace(panels[0][0], rows=picture.query_labels)
    side, slanted = _MARGIN + _AXIS + first.side, first.slanted
    title = max(display_width(part.title) for panel in picture.panels for part in panel.parts) * LETTER
    part_width = max(first.width + slanted * 0.9, title) + _BETWEEN
    part_height = 30 + slanted + first.height + 24 + _AXIS
    heading = 26 if picture.panels[0].heading else 0
    entries = list(_legend(picture))
    note = _scale_note(picture.nq, picture.nk)
    bottom_width = max(legend_width(entries), LETTER * len(note))
    width = max(side + part_width * len(panels[0]), 2 * _MARGIN + bottom_width)
    height = _MARGIN + (part_height + heading) * len(panels) + 40 + 20 * (bool(picture.left_out) + bool(note))

    def body() -> Iterator[str]:
        y = float(_MARGIN)
        for panel, grids in zip(picture.panels, panels, strict=True):
            if panel.heading:
                yield text(_MARGIN, y + 12, panel.heading, ' font-weight="bold"')
            top = y + heading + 30 + slanted
            for number, (part, grid) in enumerate(zip(panel.parts, grids, strict=True)):
                x = side + number * part_width
                yield text(x, top - slanted - 14, part.title, ' font-weight="bold"')
                yield from (grid if number else replace(grid, rows=picture.query_labels)).svg(x, top)
                yield grid.keys_word(x, top)
            yield first.queries_word(_MARGIN - 4, top)
            y += part_height + heading
        if picture.left_out:
            yield text(_MARGIN, y + 8, f"... and {picture.left_out} more")
            y += 20
        yield from legend(_MARGIN, y, entries)
        if note:
            yield text(_MARGIN, y + 31, note)

    return document(width, height, " beside ".join(part.title for part in picture.panels[0].parts), body())


_FILLED, _PARTIAL = fill("visible"), fill("partly")


def _looks(part: _Part) -> NDArray[np.object_]:
    if part.weights is not None:
        looks = shades(part.weights, _FILLED, part.cells == 0)
        return np.where(looks == "", f'{_FILLED} fill-opacity="0"', looks)  # as in the legend
    return np.array([HIDDEN, _PARTIAL, _FILLED], object)[part.cells]


def _legend(picture: _Picture) -> Iterator[tuple[str, str]]:
    """Each way in which cells of this picture may be filled, and its meaning."""
    shaded = {part.weights is not None for panel in picture.panels for part in panel.parts}
    yield _FILLED, " or ".join(["may see"] * (False in shaded) + ["weight 1"] * (True in shaded))
    if True in shaded:
        yield f'{_FILLED} fill-opacity="0.5"', "weight 0.5"
        yield f'{_FILLED} fill-opacity="0"', "weight 0"
    if picture.positions_a_cell > 1:
        yield _PARTIAL, "partly"
    yield HIDDEN, "hidden"
