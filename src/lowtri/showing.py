"""show(): attention weights of any size as a picture, in a notebook, a terminal or a file.

Weights are pooled to the cells of a picture: at most 64 each way for one head, 12 for each head of the overview.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.masks.arrays import in_numpy, is_tensor
from lowtri.masks.picture import cells_of
from lowtri.pictures.files import save_picture
from lowtri.pictures.labels import aligned, token_labels
from lowtri.pictures.pages import card, page
from lowtri.pictures.svg import (
    HIDDEN,
    LETTER,
    MAX_CELLS,
    Grid,
    document,
    fill,
    grid_lines,
    ink_over,
    legend,
    legend_width,
    shades,
    text,
)

MAX_HEADS = 64  # heads of an overview
SMALL = 12  # cells of a head in the overview, each way
_AT_ONCE = 2**24  # numbers of a head that are read; of larger heads, some rows of each cell
FEW = 12  # rows and columns up to which the numbers are written
_SHADES = "·░▒▓█"
_HIDDEN, _NAN = "╱", "?"
_WIDE = 96  # columns of the overview
_MARGIN, _AXIS = 16, 18
_THUMB, _GAP, _A_ROW = 60, 20, 8  # the overview: side of a map, distance, maps in a row


@dataclass(frozen=True)
class Cells:
    """One head, pooled: every row of cells still sums to 1 if the weights do."""

    values: NDArray[
        np.float64
    ]  # (rows, columns): means over a cell's queries of the weight on its keys; NaN if one was
    visible: NDArray[np.int8] | None  # (rows, columns): 0 hidden, 1 partly, 2 visible; None without a mask
    step: int  # positions to a cell, each way
    rows_read: int  # queries of a cell that were read


@dataclass(frozen=True)
class Maps:
    """What a picture of weights shows."""

    heads: int
    queries: int
    keys: int
    head: int  # the one that is shown large
    large: Cells
    small: tuple[Cells, ...]  # the overview: the first heads; empty if there is one head
    greatest: float  # the weight that has the full colour
    query_labels: tuple[str, ...] = ()  # one for each row of `large`, or none
    key_labels: tuple[str, ...] = ()

    @property
    def left_out(self) -> int:
        return self.heads - len(self.small) if self.small else 0


@dataclass(frozen=True, repr=False)
class WeightMaps:
    """The result of :func:`lowtri.show`: notebooks show it as a picture, ``print`` as text, and :meth:`save` writes a file."""

    maps: Maps

    def __str__(self) -> str:
        return _as_text(self.maps)

    def __repr__(self) -> str:
        maps = self.maps
        return f"<WeightMaps of {maps.heads} x {maps.queries} x {maps.keys} weights>"

    def to_svg(self) -> str:
        """The picture as SVG text."""
        return _as_svg(self.maps)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return card("weights", self.to_svg(), f"lowtri.show(weights), head={self.maps.head}", str(self))

    def save(self, path: str | Path) -> Path:
        """Write the picture, by the file's name as .svg, .html, .png, .pdf or .txt; atomically.

        PNG and PDF are drawn by matplotlib (``pip install 'lowtri[plot]'``).

        Raises:
            DataError: if the name ends in none of these, or the file cannot be written, or matplotlib is missing.
        """
        forms = {".svg": self.to_svg, ".html": self._as_page, ".txt": self._as_file}
        return save_picture(path, forms)

    def _as_page(self) -> str:
        return page("weights", "attention weights", [self.to_svg()])

    def _as_file(self) -> str:
        return f"{self}\n"


def show(
    weights: Any,
    tokens: Sequence[str] | str | None = None,
    *,
    query_tokens: Sequence[str] | str | None = None,
    mask: Mask | str | None = None,
    head: int = 0,
) -> WeightMaps:
    """Attention weights as a picture: small maps of all heads, then one head.

    The picture's size is bounded. Beyond 64 positions a cell stands for a square of pairs and shows the weight on its keys
    together, mean over its queries, so that rows of cells still sum to 1. The overview has at most 64 heads.

    >>> import numpy as np
    >>> weights = np.tril(np.ones((3, 3))) / [[1], [2], [3]]
    >>> print(show(weights, tokens="The black cat", mask="causal"))
           The  black  cat
    The      1      ╱    ╱
    black  .50    .50    ╱
    cat    .33    .33  .33
    <BLANKLINE>
    queries down, keys across; · 0, █ 1, ╱ hidden

    Args:
        weights: (H, Nq, Nk) or (Nq, Nk), at least 0: a NumPy array, a torch tensor on any device, or nested lists. NaN is drawn
            in the colour of leaks.
        tokens: a label for each key, in a list; a text is cut at its spaces, and by characters where its script has none. The
            queries are the last ``Nq`` of them. Above 64 tokens the labels are left out.
        query_tokens: labels of the queries, if they are other tokens (cross-attention).
        mask: the mask of these weights, or its text: the pairs that it hides are hatched where their weight is 0, so that
            *hidden* and *visible with weight 0* look different.
        head: the head that is shown large.

    Raises:
        CallError: if shapes or the numbers of labels do not fit, or a weight is negative or infinite.
        MaskError: if the mask has a batch or other heads than the weights.

    Source: maps of attention weights over tokens are those of Bahdanau et al. 2015, one per head those of Vaswani et al. 2017.
    """
    weights = _checked(weights)
    heads, nq, nk = (int(n) for n in weights.shape)
    if not 0 <= head < heads:
        raise CallError(f"show: there is no head {head} among {heads}. Fix: head from 0 to {heads - 1}.")
    allowed = None if mask is None else as_mask(mask)
    if allowed is not None and (allowed.batch[:1] not in ((), (1,)) or allowed.batch[1:] not in ((), (1,), (heads,))):
        raise CallError(f"show: the mask has the batch {allowed.batch}, the weights {heads} heads. Fix: mask.at(b, h).")
    keys, queries = token_labels("show", CallError, nq, nk, tokens, query_tokens)
    if max(nq, nk) > MAX_CELLS:
        keys = queries = ()
    large = pool(weights, head, MAX_CELLS, allowed)
    small = tuple(pool(weights, h, SMALL, allowed) for h in range(min(heads, MAX_HEADS))) if heads > 1 else ()
    greatest = max((float(np.nanmax(c.values)) for c in (large, *small) if not np.isnan(c.values).all()), default=1.0)
    return WeightMaps(Maps(heads, nq, nk, head, large, small, greatest or 1.0, queries, keys))


def _checked(weights: Any) -> Any:
    """Weights (H, Nq, Nk); arrays and tensors unchanged.

    Raises:
        CallError: if they have other dimensions, no entry, or no numbers.
    """
    if not is_tensor(weights) and not (hasattr(weights, "shape") and hasattr(weights, "dtype")):
        weights = in_numpy("weights", weights)
    if isinstance(weights, str):
        raise CallError(f"show: {weights}. Fix: (H, N, N) or (N, N) numbers.")
    shape = tuple(int(n) for n in weights.shape)
    if len(shape) == 4 and shape[0] == 1:
        weights, shape = weights[0], shape[1:]
    if len(shape) == 4:
        raise CallError(f"show: weights are {shape}, with a batch of {shape[0]} in front. Fix: show(weights[0]).")
    if len(shape) not in (2, 3) or 0 in shape:
        raise CallError(f"show: weights are {shape}, but expected (H, Nq, Nk) or (Nq, Nk), with no empty side.")
    if not is_tensor(weights) and np.dtype(weights.dtype).kind not in "fiub":
        raise CallError(f"show: weights are {weights.dtype}, but expected real numbers.")
    return weights if len(shape) == 3 else weights[None]


def pool(weights: Any, head: int, most: int = MAX_CELLS, mask: Mask | None = None) -> Cells:
    """One head of weights (H, Nq, Nk) as at most ``most`` x ``most`` cells; ``mask`` says which of them are hidden.

    >>> pool(np.eye(4)[None], 0, most=2).values
    array([[1., 0.],
           [0., 1.]])

    Raises:
        CallError: if a weight that is read is negative or infinite.
    """
    nq, nk = int(weights.shape[1]), int(weights.shape[2])
    step = -(-max(nq, nk) // most)
    starts = range(0, nq, step)
    rows_read = max(1, min(step, _AT_ONCE // (len(starts) * nk)))
    values = np.empty((len(starts), -(-nk // step)))  # (rows, columns)
    for i, start in enumerate(starts):
        every = -(-min(step, nq - start) // rows_read)  # evenly spaced queries
        values[i] = _summed(weights[head, start : min(start + step, nq) : every], step).mean(0)
    visible = None if mask is None else cells_of(mask.at(0, head), nq, nk, step)
    return Cells(values, visible, step, rows_read)


def _summed(rows: Any, step: int) -> NDArray[np.float64]:
    """Rows (n, Nk) summed over groups of ``step`` keys."""
    numbers = in_numpy("weights", rows)
    if isinstance(numbers, str):
        raise CallError(f"show: {numbers}. Fix: weights with numbers.")
    numbers = numbers.astype(np.float64)
    if (numbers < 0).any() or np.isinf(numbers).any():
        raise CallError(
            f"show: got a weight of {numbers[(numbers < 0) | np.isinf(numbers)][0]:g}; expected at least 0, and finite.\n"
            "Fix: pass them after the softmax."
        )
    return np.add.reduceat(numbers, np.arange(0, numbers.shape[1], step), axis=1) if step > 1 else numbers


# Text.


def _as_text(maps: Maps) -> str:
    """The overview, then the head that is shown large."""
    lines = list(_small_text(maps)) if maps.small else []
    if lines:
        lines += ["", f"head {maps.head}"]
    lines += _number_table(maps) if max(maps.large.values.shape) <= FEW else _shades(maps.large, maps.greatest)
    return "\n".join([*lines, "", *_legend_text(maps)])


def _short_number(x: float) -> str:
    """Two digits after the point, without a 0 before it.

    >>> _short_number(0.257), _short_number(1.0), _short_number(0.001), _short_number(0.0), _short_number(12.3)
    ('.26', '1', '.00', '0', '12.3')
    """
    if np.isnan(x):
        return "NaN"
    if x == int(x) and x < 1000:
        return str(int(x))
    return f"{x:.2f}".lstrip("0") if x < 0.995 else f"{x:.3g}"


def _cell_note(cells: Cells) -> str:
    """What a cell stands for; empty if it is one pair."""
    if cells.step == 1:
        return ""
    read = f", {cells.rows_read} queries of it read" if cells.rows_read < cells.step else ""
    return f"a cell: the weight on {cells.step:,} keys together, mean over {cells.step:,} queries{read}"


def _small_text(maps: Maps) -> Iterator[str]:
    drawn = [_shades(cells, maps.greatest) for cells in maps.small]
    wide = max(len(drawn[0][0]), len(f"head {len(drawn) - 1}")) + 2
    a_line = max(1, _WIDE // wide)
    for first in range(0, len(drawn), a_line):
        group = range(first, min(first + a_line, len(drawn)))
        yield "".join(f"head {h}".ljust(wide) for h in group).rstrip()
        for i in range(len(drawn[0])):
            yield "".join(drawn[h][i].ljust(wide) for h in group).rstrip()
    if maps.left_out:
        yield f"... and {maps.left_out} more heads"


def _shades(cells: Cells, greatest: float) -> list[str]:
    rows, columns = cells.values.shape
    return ["".join(_sign(cells, i, j, greatest) for j in range(columns)) for i in range(rows)]


def _sign(cells: Cells, i: int, j: int, greatest: float) -> str:
    x = cells.values[i, j]
    if np.isnan(x):
        return _NAN
    if cells.visible is not None and cells.visible[i, j] == 0 and x == 0:
        return _HIDDEN
    return _SHADES[math.ceil(4 * x / greatest - 1e-9)]  # only 0 is a dot


def _number_table(maps: Maps) -> list[str]:
    """The table of one head, with labels."""
    cells = maps.large
    rows, columns = cells.values.shape
    keys = maps.key_labels or tuple(str(j) for j in range(columns))
    queries = maps.query_labels or tuple(str(maps.keys - rows + i) if rows <= columns else str(i) for i in range(rows))
    table = [("", *keys)]
    for i, query in enumerate(queries):
        signs = (_sign(cells, i, j, maps.greatest) for j in range(columns))
        line = [sign if sign == _HIDDEN else _short_number(cells.values[i, j]) for j, sign in enumerate(signs)]
        table.append((query, *line))
    return aligned(table, "  ", right=True)


def _legend_text(maps: Maps) -> Iterator[str]:
    every = [maps.large, *maps.small]
    words = [f"queries down, keys across; · 0, █ {_short_number(maps.greatest)}"]
    words += [f"{_HIDDEN} hidden"] * (maps.large.visible is not None)
    words += [f"{_NAN} not a number"] * any(np.isnan(cells.values).any() for cells in every)
    yield ", ".join(words)
    if note := _cell_note(maps.large):
        yield note


# SVG.


def _as_svg(maps: Maps) -> str:
    """The picture, at most 900 points wide; its text has a bounded size at any number of heads and tokens."""
    few = max(maps.large.values.shape) <= FEW
    cell = 34.0 if few else max(6.0, min(24.0, 420 / max(maps.large.values.shape)))
    looks, numbers = _looks(maps.large, maps.greatest), _numbers(maps) if few else ()
    grid = Grid(looks, cell, cell, maps.query_labels, maps.key_labels, numbers, shaded=True)
    side, slanted = _MARGIN + _AXIS + grid.side, grid.slanted
    entries = list(_legend(maps))
    note = _cell_note(maps.large)
    across = min(len(maps.small), _A_ROW)
    overview = 0.0 if not maps.small else 26 + (_THUMB + 28) * -(-len(maps.small) // _A_ROW) + 20 * bool(maps.left_out)
    large = _MARGIN + overview + 30 + slanted  # where the large map begins
    bottom = large + grid.height + 24 + _AXIS
    width = max(
        side + grid.width + slanted * 0.9 + _MARGIN,
        2 * _MARGIN + across * (_THUMB + _GAP),
        2 * _MARGIN + max(legend_width(entries), LETTER * len(note), LETTER * len(_title(maps))),
    )

    def body() -> Iterator[str]:
        if maps.small:
            yield text(_MARGIN, _MARGIN + 12, _title(maps), ' font-weight="bold"')
            yield from _overview(maps)
        heading = f"head {maps.head}" if maps.small else _title(maps)
        yield text(side if maps.small else _MARGIN, large - slanted - 14, heading, ' font-weight="bold"')
        yield from grid.svg(side, large)
        yield grid.keys_word(side, large)
        yield grid.queries_word(_MARGIN - 4, large)
        yield from legend(_MARGIN, bottom, entries)
        if note:
            yield text(_MARGIN, bottom + 31, note)

    return document(width, bottom + 30 + 20 * bool(note), _title(maps), body())


def _title(maps: Maps) -> str:
    heads = f"{maps.heads:,} heads, " if maps.heads > 1 else ""
    return f"attention weights: {heads}{maps.queries:,} queries, {maps.keys:,} keys"


def _overview(maps: Maps) -> Iterator[str]:
    for h, cells in enumerate(maps.small):
        x = _MARGIN + h % _A_ROW * (_THUMB + _GAP)
        y = _MARGIN + 40 + h // _A_ROW * (_THUMB + 28)
        rows, columns = cells.values.shape
        unit = _THUMB // max(rows, columns)  # whole numbers keep the paths short
        shown = ' font-weight="bold"' if h == maps.head else f" {fill('soft')}"
        yield text(x, y - 4, f"head {h}", f' font-size="10"{shown}')
        yield from Grid(_looks(cells, maps.greatest), unit, unit, shaded=True, lines=False).svg(x, y)
        yield grid_lines(x, y, 1, 1, columns * unit, rows * unit)
    if maps.left_out:
        y = _MARGIN + 40 + -(-len(maps.small) // _A_ROW) * (_THUMB + 28)
        yield text(_MARGIN, y, f"... and {maps.left_out:,} more heads")


def _is_hidden(cells: Cells) -> NDArray[np.bool_]:
    """Cells that are hatched; a weight on a hidden pair is drawn as a weight."""
    return np.zeros(cells.values.shape, bool) if cells.visible is None else (cells.visible == 0) & (cells.values == 0)


def _looks(cells: Cells, greatest: float) -> NDArray[np.object_]:
    return shades(cells.values / greatest, fill("visible"), _is_hidden(cells))


def _numbers(maps: Maps) -> list[list[tuple[str, str]]]:
    hidden, values = _is_hidden(maps.large), maps.large.values

    def number(x: float, hidden: bool) -> tuple[str, str]:
        ink = fill("paper") if np.isnan(x) else ink_over(x / maps.greatest)
        return "" if hidden else _short_number(x), ink

    return [[number(x, h) for x, h in zip(*row, strict=True)] for row in zip(values, hidden, strict=True)]


def _legend(maps: Maps) -> Iterator[tuple[str, str]]:
    for share in (1, 0.5, 0):
        yield f'{fill("visible")} fill-opacity="{share}"', f"weight {_short_number(share * maps.greatest)}"
    if maps.large.visible is not None:
        yield HIDDEN, "hidden"
    if any(np.isnan(cells.values).any() for cells in (maps.large, *maps.small)):
        yield fill("leak"), "not a number"
