"""Masks as text: pictures of block characters with ticks, and the matrix that is added to the scores, also in LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from lowtri.errors import MaskError
from lowtri.masks.mask import Mask
from lowtri.masks.panels import MAX_CELLS, Panel, Picture, Tokens, compose, picture_size, scale_note
from lowtri.masks.text import as_mask
from lowtri.masks.tile import check_count
from lowtri.pictures.labels import display_width

__all__ = ["draw"]

_BLOCKS = "·▒█"  # hidden, partly, visible
_TICKS = "✗~✓"
_NUMBERS = ("-inf", "", "0")  # what is added to the scores
_LATEX = (r"-\infty", "", "0")
_GAP = "    "  # between two masks side by side


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
    picture = compose(mask, nq, nk, beside=beside, tokens=tokens, query_tokens=query_tokens, titles=titles)
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
    if note := scale_note(picture.nq, picture.nk):
        blocks[-1] += f"\n{note}: █ all visible, ▒ some, · none"
    return "\n\n".join(blocks)


def _latex(panel: Panel) -> str:
    """The matrices of one batch row and head; an array, since bmatrix ends at ten columns."""
    matrices = []
    for part in panel.parts:
        rows = " \\\\\n  ".join(" & ".join(_LATEX[cell] for cell in row) for row in part.cells.tolist())
        columns = "r" * part.cells.shape[1]
        matrices.append(f"\\left[\\begin{{array}}{{{columns}}}\n  {rows}\n\\end{{array}}\\right]")
    heading = f"% {panel.heading}\n" if panel.heading else ""
    return heading + "\n\\quad\n".join(matrices)


def _panel(panel: Panel, picture: Picture, marks: Sequence[str], titled: bool) -> str:
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
    return "\n".join(heading + _aligned(list(zip_longest(*columns, fillvalue="")), _GAP))


def _table(rows: list[list[str]], picture: Picture) -> list[str]:
    """Rows of marks with the queries' labels on the left, each mark in the middle below its key's label."""
    widths = [max(display_width(mark) for mark in column) for column in zip(picture.key_labels, *rows, strict=True)]
    centred = [[" " * ((w - len(mark)) // 2) + mark for mark, w in zip(row, widths, strict=True)] for row in rows]
    lines = zip(("", *picture.query_labels), (picture.key_labels, *centred), strict=True)
    return _aligned([(label, *cells) for label, cells in lines], "  ")


def _aligned(rows: Sequence[Sequence[str]], gap: str) -> list[str]:
    """Rows of texts as lines, each column as wide as its widest text."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(text + " " * (width - display_width(text)) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
