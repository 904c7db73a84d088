"""Masks as grids of cells, for pictures as text and as SVG. Their size is bounded.

A picture has at most 64 rows and columns. Up to that size a cell is one pair; beyond it a cell is a square of positions: all
visible, some, or none, so a picture of a million positions costs as much as one of a hundred. Hidden cells are hatched and visible
ones are filled, so 'hidden' and 'visible with weight 0' look different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import LowtriError, MaskError
from lowtri.masks.array_masks import Table
from lowtri.masks.mask import Mask
from lowtri.masks.positions import first_position
from lowtri.masks.text import as_mask
from lowtri.masks.tile import POSITION_MAX, check_count, short_repr
from lowtri.pictures.files import save_picture
from lowtri.pictures.grids import MAX_CELLS, Grid, Look, Panel, beside_one_another, picture
from lowtri.pictures.labels import shortened, split
from lowtri.pictures.pages import card, page
from lowtri.pictures.svg import HIDDEN, fill

Tokens: TypeAlias = Sequence[str] | str

_PAIRS_READ = 2**20  # up to so many pairs, each is read; beyond, cells show what the mask answers for a tile
MIN_POSITIONS = 12  # of a picture whose size nobody gave
MAX_PANELS = 16  # batch rows and heads that are drawn; the rest is counted
_LOOKS = (Look("·", HIDDEN, "hidden"), Look("▒", fill("partly"), "partly"), Look("█", fill("visible"), "may see"))
_BLOCKS = "·▒█"  # hidden, partly, visible
_SIGNS = {"ticks": "✗~✓", "numbers": ("-inf", "", "0"), "latex": (r"-\infty", "", "0")}


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
        ticks: ✓ and ✗ instead of blocks, in a table; without tokens the labels are positions.
        numbers: the matrix that is added to the scores, 0 where a query may see and -inf where not.
        latex: that matrix for LaTeX, without labels or titles; it needs no package.
        beside: a second mask, drawn on the right of the first.
        tokens: a label for each key, in a list; a text is cut at its spaces, and by characters where its script has none; the
            queries are the last ``nq`` of them.
        query_tokens: labels for the queries, if they are other tokens (cross-attention).
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
        sizes = picture_size(*_masks(mask, beside)) if nk is None else (nk, nk)
        nq, nk = (min(n, MAX_CELLS) for n in sizes)
    if ticks and tokens is None:
        nq, nk = _counts(nq, nk)
        if max(nq, nk) > MAX_CELLS:
            raise MaskError(f"draw: ticks for {nq} queries and {nk} keys: at most {MAX_CELLS} each way. Fix: no ticks.")
        tokens = [str(k) for k in range(nk)]
        if query_tokens is None:
            first = max(nk - nq, 0)
            query_tokens = [str(first + i) for i in range(nq)]
    forms = [_SIGNS[form] for form, on in (("ticks", ticks), ("numbers", numbers), ("latex", latex)) if on]
    signs = forms[0] if forms else _BLOCKS
    looks = [look._replace(sign=sign) for look, sign in zip(_LOOKS, signs, strict=True)]
    masks = _masks(mask, beside)
    layout = _layout(masks, _size(masks, nq, nk, tokens, query_tokens), tokens, query_tokens, titles)
    panels = layout.panels(looks)
    if (numbers or latex) and layout.step > 1:
        most = max(layout.nq, layout.nk)
        raise MaskError(f"draw: {most} positions: a matrix has at most 64 each way. Fix: a smaller n.")
    if latex:
        blocks = [_latex(panel) for panel in panels]
    else:
        has_titles = titles is not None or beside is not None
        blocks = [_panel_text(panel, has_titles) for panel in panels]
    if layout.left_out:
        comment = "% " if latex else ""
        blocks.append(f"{comment}... and {layout.left_out} more")
    if layout.step > 1:
        blocks[-1] += f"\n{layout.scale}: █ all visible, ▒ some, · none"
    return "\n\n".join(blocks)


def save(mask: Mask | str, path: str | Path, nq: int | None = None, nk: int | None = None, **options: Any) -> None:
    """Write the picture of a mask to ``path``, by its name as .svg, .html, .png or .pdf; atomically.

    PNG and PDF are drawn by matplotlib (``pip install matplotlib``). ``options`` are those of :func:`svg`.

    Raises:
        DataError: if ``path`` ends in none of these, or cannot be written, or matplotlib is missing.
    """

    def html() -> str:
        return page("mask", repr(mask), [svg(mask, nq, nk, **options)])

    save_picture(path, {".svg": lambda: svg(mask, nq, nk, **options), ".html": html})


def svg(
    mask: Mask | str,
    nq: int | None = None,
    nk: int | None = None,
    *,
    beside: Mask | str | None = None,
    tokens: Tokens | None = None,
    query_tokens: Tokens | None = None,
    titles: Sequence[str] | None = None,
) -> str:
    """The picture of a mask as SVG text.

    >>> from lowtri import causal
    >>> svg(causal(), 4, tokens="The black cat <end>").count("&lt;end&gt;")  # once on each axis
    2

    Args:
        mask, nq, nk, beside, tokens, query_tokens, titles: as in :func:`draw`.
    """
    masks = _masks(mask, beside)
    layout = _layout(masks, _size(masks, nq, nk, tokens, query_tokens), tokens, query_tokens, titles)
    panels = layout.panels(_LOOKS)
    legend = [_LOOKS[2]]
    notes = []
    if layout.left_out:
        notes.append(f"... and {layout.left_out} more")
    if layout.step > 1:
        legend.append(_LOOKS[1])
        notes.append(layout.scale)
    legend.append(_LOOKS[0])
    return picture(" beside ".join(layout.names), panels, legend, notes)


def notebook_svg(mask: Mask) -> str | None:
    """The picture for notebooks. None where tables of different sizes are joined, which are shown as text."""
    try:
        return svg(mask)
    except MaskError:
        return None


def notebook_html(mask: Mask) -> str | None:
    """The picture for notebooks, with the mask's text below it."""
    drawn = notebook_svg(mask)
    return None if drawn is None else card("mask", drawn, repr(mask), str(mask))


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


def cells_of(mask: Mask, nq: int, nk: int, step: int) -> NDArray[np.int8]:
    """(rows, columns): for each cell of ``step`` positions each way, 0 hidden, 1 partly, 2 visible."""
    if nq * nk <= _PAIRS_READ:  # the answer for a tile may be PARTIAL where its pairs are equal
        pairs = mask.dense(nq, nk)
        rows = np.arange(0, nq, step)
        columns = np.arange(0, nk, step)
        some = np.logical_or.reduceat(np.logical_or.reduceat(pairs, rows, axis=0), columns, axis=1)
        every = np.logical_and.reduceat(np.logical_and.reduceat(pairs, rows, axis=0), columns, axis=1)
        return some.astype(np.int8) + every
    start, nq, nk = first_position(mask, nq, nk)
    q0 = start + step * np.arange(-(-nq // step))[:, None]
    k0 = step * np.arange(-(-nk // step))[None, :]
    cells: NDArray[np.int8] = mask.tile(q0, np.minimum(q0 + step, start + nq), k0, np.minimum(k0 + step, nk))
    return cells


@dataclass(frozen=True)
class _Layout:
    """One or two masks side by side, their numbers of positions, and their labels."""

    masks: list[Mask]
    names: list[str]
    nq: int
    nk: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def step(self) -> int:
        """Positions to a cell, the same both ways, so that the diagonal stays a diagonal."""
        return -(-max(self.nq, self.nk) // MAX_CELLS)

    @property
    def scale(self) -> str:
        return f"a cell: {self.step:,} x {self.step:,} of {self.nq:,} x {self.nk:,} pairs"

    @property
    def batch(self) -> tuple[int, ...]:
        """The masks' common one; raises where they do not fit together."""
        return (self.masks[0] & self.masks[-1]).batch

    @property
    def left_out(self) -> int:
        """How many batch rows and heads exceed MAX_PANELS."""
        return max(math.prod(self.batch) - MAX_PANELS, 0)

    def panels(self, looks: Sequence[Look]) -> list[Panel]:
        """A panel for each batch row and head."""
        panels = []
        for index in islice(np.ndindex(self.batch), MAX_PANELS):
            at_zero = (*index, 0, 0)  # a mask without a batch, or without heads
            b, h = at_zero[:2]
            named = zip(self.masks, self.names, strict=True)
            grids = [self._grid(mask.for_row(b, h), name, looks) for mask, name in named]
            panels.append(Panel(grids, _heading(self.batch, b, h)))
        return panels

    def _grid(self, mask: Mask, name: str, looks: Sequence[Look]) -> Grid:
        cells = cells_of(mask, self.nq, self.nk, self.step)
        size = 28.0 if self.columns else max(6.0, min(24.0, 420 / -(-max(self.nq, self.nk) // self.step)))
        return Grid(cells, looks, size, size, name, self.rows, self.columns)


def _layout(
    masks: list[Mask],
    size: tuple[Any, Any],
    tokens: Tokens | None,
    query_tokens: Tokens | None,
    titles: Sequence[str] | None,
) -> _Layout:
    """Check the arguments of :func:`draw` and :func:`svg`.

    Args:
        size: nq and nk.
    """
    nq, nk = _counts(*size)
    if nq < 1 or nk < 1:
        raise MaskError(f"draw: {nq} queries and {nk} keys: there is nothing to draw. Fix: at least one of each.")
    columns, rows = token_labels("draw", MaskError, nq, nk, tokens, query_tokens)
    if columns and max(nq, nk) > MAX_CELLS:
        raise MaskError(f"draw: {nk} tokens do not fit on a picture of {MAX_CELLS} cells. Fix: draw without tokens.")
    if titles is not None and len(titles) != len(masks):
        raise MaskError(f"draw: got {len(titles)} titles; expected one for each of {len(masks)} masks.")
    names = [shortened(text, 60) for text in (map(repr, masks) if titles is None else titles)]
    return _Layout(masks, names, nq, nk, rows, columns)


def _size(masks: list[Mask], nq: Any, nk: Any, tokens: Tokens | None, query_tokens: Tokens | None) -> tuple[Any, Any]:
    """nq and nk; without ``nq``, those of the tokens, or else of the masks themselves (:func:`picture_size`)."""
    if nq is not None:
        return nq, nk
    if tokens is not None:
        keys = len(token_list(tokens))
        queries = keys if query_tokens is None else len(token_list(query_tokens))
        return queries, keys if nk is None else nk
    return picture_size(*masks) if nk is None else (nk, nk)


def _panel_text(panel: Panel, has_titles: bool) -> str:
    """The grids of a panel side by side, below its heading and their titles."""
    columns = [[grid.title, *grid.lines()] if has_titles else grid.lines() for grid in panel.grids]
    lines = beside_one_another(columns, "    ")
    return "\n".join([panel.heading, *lines] if panel.heading else lines)


def token_labels(
    function: str, error: type[LowtriError], nq: int, nk: int, tokens: Tokens | None, query_tokens: Tokens | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of the keys and of the queries, none without tokens. The queries' are the last nq of the keys', unless they are given.

    Raises:
        error: of ``function``, if there are not as many as keys and queries.
    """
    if tokens is None:
        if query_tokens is not None:
            raise error(f"{function}: got query_tokens without tokens. Fix: tokens= names the keys.")
        return (), ()
    for name, given in (("tokens", tokens), ("query_tokens", query_tokens)):
        if given is not None and not isinstance(given, Iterable):
            raise error(
                f"{function}: {name} is {short_repr(given)}; expected labels. Fix: a list of texts, one for each position."
            )
    keys = token_list(tokens)
    if len(keys) != nk:
        raise error(f"{function}: got {len(keys)} tokens for {nk} keys. Fix: one token for each key, in a list.")
    if query_tokens is None and nq > nk:
        raise error(f"{function}: {nq} queries and {nk} tokens. Fix: query_tokens= names the queries.")
    queries = keys[nk - nq :] if query_tokens is None else token_list(query_tokens)
    if len(queries) != nq:
        raise error(f"{function}: got {len(queries)} query_tokens; expected one for each of {nq} queries.")
    return keys, queries


def token_list(tokens: Tokens) -> tuple[str, ...]:
    """Tokens as labels; a text is :func:`split`."""
    return tuple(shortened(str(token)) for token in (split(tokens)[0] if isinstance(tokens, str) else tokens))


def _masks(mask: Mask | str, beside: Mask | str | None) -> list[Mask]:
    return [as_mask(mask)] if beside is None else [as_mask(mask), as_mask(beside, "beside")]


def _counts(nq: Any, nk: Any) -> tuple[int, int]:
    nq = check_count("draw", "nq", nq)
    return nq, nq if nk is None else check_count("draw", "nk", nk)


def _heading(batch: tuple[int, ...], b: int, h: int) -> str:
    if not batch:
        return ""
    if len(batch) == 1:
        return f"batch row {b}"
    return f"head {h}" if batch[0] == 1 else f"batch row {b}, head {h}"


def _latex(panel: Panel) -> str:
    """The matrices of one batch row and head; an array, since bmatrix ends at ten columns."""
    matrices = []
    for grid in panel.grids:
        rows = " \\\\\n  ".join(" & ".join(grid.looks[cell].sign for cell in row) for row in grid.cells.tolist())
        columns = "r" * grid.cells.shape[1]
        matrices.append(f"\\left[\\begin{{array}}{{{columns}}}\n  {rows}\n\\end{{array}}\\right]")
    heading = f"% {panel.heading}\n" if panel.heading else ""
    return heading + "\n\\quad\n".join(matrices)
