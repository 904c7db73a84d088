"""Masks as text. The picture as a file is in :mod:`lowtri.masks.svg`, what both show in :mod:`lowtri.masks.panels`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from lowtri.masks.mask import Mask
from lowtri.masks.panels import Panel, Picture, Tokens, compose, display_width
from lowtri.masks.svg import save

__all__ = ["draw", "save"]

_BLOCKS = "·▒█"  # hidden, partly, visible
_TICKS = "✗~✓"
_GAP = "    "  # between two pictures side by side


def draw(
    mask: Mask | str,
    nq: int,
    nk: int | None = None,
    *,
    beside: Mask | str | None = None,
    tokens: Tokens | None = None,
    query_tokens: Tokens | None = None,
    ticks: bool = False,
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

    Args:
        mask: the mask, or its text. One that differs by batch row or head is drawn one after the other, under headings, at
            most 16 of them.
        nq, nk: how many queries and keys; ``nk`` defaults to ``nq``, and the queries stand at the last ``nq`` positions.
            Beyond 64 a cell is a rectangle of positions, and ▒ says that some of its pairs are visible.
        beside: a second mask, drawn on the right of the first.
        tokens: a label for each key, in a list; a text is split at its spaces. The queries are the last ``nq`` of them.
        query_tokens: labels for the queries, where they are other tokens (cross-attention).
        ticks: ✓ and ✗ instead of blocks, in a table; without tokens the labels are positions.
        titles: a name for each of the one or two masks, instead of their formulas.

    Raises:
        MaskError: if the labels do not fit the numbers, or the two masks' batches do not fit together.
    """
    if ticks and tokens is None:
        nk = nq if nk is None else nk
        tokens = [str(k) for k in range(nk)]
        query_tokens = [str(q + max(nk - nq, 0)) for q in range(nq)] if query_tokens is None else query_tokens
    picture = compose(mask, nq, nk, beside=beside, tokens=tokens, query_tokens=query_tokens, titles=titles)
    titled = beside is not None or titles is not None
    blocks = [_panel(panel, picture, _TICKS if ticks else _BLOCKS, titled) for panel in picture.panels]
    if picture.left_out:
        blocks.append(f"... and {picture.left_out} more")
    return "\n\n".join(blocks)


def _panel(panel: Panel, picture: Picture, marks: str, titled: bool) -> str:
    columns = []
    for part in panel.parts:
        rows = [[marks[cell] for cell in row] for row in part.cells.tolist()]
        lines = _table(rows, picture) if picture.key_labels else ["".join(row) for row in rows]
        columns.append([part.title, *lines] if titled else lines)
    heading = [panel.heading] if panel.heading else []
    return "\n".join(heading + _side_by_side(columns))


def _table(rows: list[list[str]], picture: Picture) -> list[str]:
    """Rows of marks under the keys' labels and behind the queries', each column as wide as its label."""
    side = max(map(display_width, picture.query_labels))
    widths = [max(display_width(label), 1) for label in picture.key_labels]
    lines = [_line("", picture.key_labels, side, widths)]
    for label, row in zip(picture.query_labels, rows, strict=True):
        lines.append(
            _line(label, [_centred(mark, width) for mark, width in zip(row, widths, strict=True)], side, widths)
        )
    return lines


def _line(label: str, cells: Sequence[str], side: int, widths: Sequence[int]) -> str:
    padded = [_padded(label, side), *(_padded(cell, width) for cell, width in zip(cells, widths, strict=True))]
    return "  ".join(padded).rstrip()


def _side_by_side(columns: list[list[str]]) -> list[str]:
    widths = [max(map(display_width, column)) for column in columns]
    return [
        _GAP.join(_padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip_longest(*columns, fillvalue="")
    ]


def _padded(text: str, width: int) -> str:
    return text + " " * (width - display_width(text))


def _centred(mark: str, width: int) -> str:
    return " " * ((width - 1) // 2) + mark
