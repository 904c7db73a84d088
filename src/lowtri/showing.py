"""show(): attention weights of any size as a picture, in a notebook, a terminal or a file.

Weights are pooled to the cells of a picture: at most 64 each way for one head, 12 for each head of the overview.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.masks.arrays import in_numpy, is_tensor, why_not_plain
from lowtri.masks.tile import short_repr
from lowtri.pictures.files import save_picture
from lowtri.pictures.grids import MAX_CELLS, Grid, Panel, beside_one_another, levels, picture, shades
from lowtri.pictures.masks import cells_of, token_labels
from lowtri.pictures.pages import card, page
from lowtri.pictures.svg import BOLD, fill

MAX_HEADS = 64  # heads of an overview
SMALL = 12  # cells of a head in the overview, each way
_AT_ONCE = 2**24  # numbers of a head that are read; of larger heads, some rows of each cell
FEW = 12  # rows and columns up to which the numbers are written
_LOOKS = shades("visible")
_WIDE = 96  # columns of the overview as text
_THUMB = 60  # side of a map of the overview as SVG
_A_ROW = 8  # maps in a row of it


@dataclass(frozen=True)
class Cells:
    """One head, pooled: every row of cells still sums to 1 if the weights do."""

    values: NDArray[np.float64]  # (rows, columns): means over a cell's queries of the weight on its keys, or NaN
    visible: NDArray[np.int8] | None  # (rows, columns): 0 hidden, 1 partly, 2 visible; None without a mask
    step: int  # positions to a cell, each way
    rows_read: int  # queries of a cell that were read

    @property
    def hidden(self) -> Any:
        """Cells that are hatched; a weight on a hidden pair is drawn as a weight."""
        return False if self.visible is None else (self.visible == 0) & (self.values == 0)


@dataclass(frozen=True, repr=False)
class WeightMaps:
    """The result of :func:`lowtri.show`: notebooks show it as a picture, ``print`` as text, and :meth:`save` writes a file."""

    shape: tuple[int, int, int]  # heads, queries, keys
    head: int  # the one that is shown large
    large: Cells
    small: tuple[Cells, ...]  # the overview: the first heads; empty if there is one head
    greatest: float  # the weight that has the full colour
    query_labels: tuple[str, ...] = ()  # one for each row of `large`, or none
    key_labels: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The overview, then the head that is shown large."""
        last = len(f"head {len(self.small) - 1}")  # the widest title, which gives all lines of maps the same columns
        maps = [[f"head {h}".ljust(last), *self._grid(cells).lines()] for h, cells in enumerate(self.small)]
        a_line = max(1, _WIDE // (max(map(len, maps[-1])) + 2)) if maps else 1
        lines = [line for i in range(0, len(maps), a_line) for line in beside_one_another(maps[i : i + a_line], "  ")]
        lines += [*self._left_out, "", f"head {self.head}"] if maps else []
        labels = {}
        if self._numbers:
            rows, columns = self.large.values.shape
            first = max(columns - rows, 0)
            labels = {
                "rows": self.query_labels or [str(first + i) for i in range(rows)],
                "columns": self.key_labels or [str(j) for j in range(columns)],
            }
        words = [f"queries down, keys across; · 0, █ {_short_number(self.greatest)}"]
        words += [f"{look.sign} {look.meaning}" for look in self._marks]
        return "\n".join([*lines, *self._large(**labels).lines(), "", ", ".join(words), *self._scale])

    def __repr__(self) -> str:
        return f"<WeightMaps of {' x '.join(map(str, self.shape))} weights>"

    def to_svg(self) -> str:
        """The picture as SVG text, at most 900 points wide; its text has a bounded size at any number of heads and tokens."""
        heads, queries, keys = self.shape
        of_heads = f"{heads:,} heads, " if heads > 1 else ""
        title = f"attention weights: {of_heads}{queries:,} queries, {keys:,} keys"
        maps = []
        for h, cells in enumerate(self.small):
            unit = _THUMB // max(cells.values.shape)  # whole numbers keep the paths short
            style = BOLD if h == self.head else f" {fill('soft')}"
            maps.append(self._grid(cells, wide=unit, high=unit, title=f"head {h}", title_style=style))
        panels = [Panel(maps[i : i + _A_ROW], "" if i else title, "", "") for i in range(0, len(maps), _A_ROW)]
        size = 34.0 if self._numbers else max(6.0, min(24.0, 420 / max(self.large.values.shape)))
        large = self._large(wide=size, high=size, rows=self.query_labels, columns=self.key_labels)
        panels.append(Panel([large], f"head {self.head}" if maps else title))
        meanings = {16: 1.0, 8: 0.5, 0: 0.0}
        legend = [_LOOKS[i]._replace(meaning=f"weight {_short_number(x * self.greatest)}") for i, x in meanings.items()]
        return picture(title, panels, [*legend, *self._marks], [*self._left_out, *self._scale])

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return card("weights", self.to_svg(), f"lowtri.show(weights), head={self.head}", str(self))

    def save(self, path: str | Path) -> Path:
        """Write the picture, by the file's name as .svg, .html, .png, .pdf or .txt; atomically.

        PNG and PDF are drawn by matplotlib (``pip install matplotlib``).

        Raises:
            DataError: if the name ends in none of these, or the file cannot be written, or matplotlib is missing.
        """

        def html() -> str:
            return page("weights", "attention weights", [self.to_svg()])

        return save_picture(path, {".svg": self.to_svg, ".html": html, ".txt": lambda: f"{self}\n"})

    @property
    def _numbers(self) -> bool:
        return max(self.large.values.shape) <= FEW

    def _grid(self, cells: Cells, **options: Any) -> Grid:
        return Grid(levels(cells.values / self.greatest, cells.hidden), _LOOKS, **options)

    def _large(self, **options: Any) -> Grid:
        hidden = np.broadcast_to(self.large.hidden, self.large.values.shape).tolist()
        rows = zip(self.large.values.tolist(), hidden, strict=True)
        numbers = [["" if hide else _short_number(x) for x, hide in zip(*row, strict=True)] for row in rows]
        return self._grid(self.large, numbers=numbers if self._numbers else (), **options)

    @property
    def _marks(self) -> list[Any]:
        """What the legend says besides the weights: hidden, and not a number."""
        has_nan = any(np.isnan(cells.values).any() for cells in (self.large, *self.small))
        marks = [] if self.large.visible is None else [_LOOKS[17]]
        return [*marks, _LOOKS[18]] if has_nan else marks

    @property
    def _left_out(self) -> list[str]:
        left_out = self.shape[0] - len(self.small)
        return [f"... and {left_out} more heads"] if self.small and left_out else []

    @property
    def _scale(self) -> list[str]:
        """What a cell stands for, where it is not one pair."""
        step = self.large.step
        if step == 1:
            return []
        read = self.large.rows_read
        some = f", {read} queries of it read" if read < step else ""
        return [f"a cell: the weight on {step:,} keys together, mean over {step:,} queries{some}"]


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
    if isinstance(head, bool) or not isinstance(head, int | np.integer) or not 0 <= head < heads:
        raise CallError(f"show: there is no head {short_repr(head)} among {heads}. Fix: head from 0 to {heads - 1}.")
    allowed = None if mask is None else as_mask(mask)
    if allowed is not None and (allowed.batch[:1] not in ((), (1,)) or allowed.batch[1:] not in ((), (1,), (heads,))):
        raise CallError(
            f"show: the mask has the batch {allowed.batch}, the weights {heads} heads. Fix: mask.for_row(b, h)."
        )
    keys, queries = token_labels("show", CallError, nq, nk, tokens, query_tokens)
    if max(nq, nk) > MAX_CELLS:
        keys = queries = ()
    large = pool(weights, head, MAX_CELLS, allowed)
    small = tuple(pool(weights, h, SMALL, allowed) for h in range(min(heads, MAX_HEADS))) if heads > 1 else ()
    greatest = max((float(np.nanmax(c.values)) for c in (large, *small) if not np.isnan(c.values).all()), default=1.0)
    return WeightMaps((heads, nq, nk), head, large, small, greatest or 1.0, queries, keys)


def _checked(weights: Any) -> Any:
    """Weights (H, Nq, Nk); arrays and tensors unchanged.

    Raises:
        CallError: if they have other dimensions, no entry, or no numbers.
    """
    readable = why_not_plain("weights", weights)
    if readable is not None:
        raise CallError(f"show: {readable}")
    if isinstance(weights, type) or not (hasattr(weights, "shape") and hasattr(weights, "dtype")):
        weights = in_numpy("weights", weights)
    if isinstance(weights, str):
        raise CallError(f"show: {weights}. Fix: (H, N, N) or (N, N) numbers.")
    shape = tuple(int(n) for n in weights.shape)
    if len(shape) == 4 and shape[0] == 1:
        weights = weights[0]
        shape = shape[1:]
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
    _, nq, nk = (int(n) for n in weights.shape)
    step = -(-max(nq, nk) // most)
    starts = range(0, nq, step)
    rows_read = max(1, min(step, _AT_ONCE // (len(starts) * nk)))
    values = np.empty((len(starts), -(-nk // step)))  # (rows, columns)
    for i, start in enumerate(starts):
        every = -(-min(step, nq - start) // rows_read)  # evenly spaced queries
        values[i] = _summed(weights[head, start : min(start + step, nq) : every], step).mean(0)
    visible = None if mask is None else cells_of(mask.for_row(0, head), nq, nk, step)
    return Cells(values, visible, step, rows_read)


def _summed(rows: Any, step: int) -> NDArray[np.float64]:
    """Rows (n, Nk) summed over groups of ``step`` keys."""
    numbers = in_numpy("weights", rows)
    if isinstance(numbers, str):
        raise CallError(f"show: {numbers}. Fix: weights with numbers.")
    numbers = numbers.astype(np.float64)
    wrong = (numbers < 0) | np.isinf(numbers)
    if wrong.any():
        raise CallError(
            f"show: got a weight of {numbers[wrong][0]:g}; expected at least 0, and finite.\n"
            "Fix: pass them after the softmax."
        )
    return np.add.reduceat(numbers, np.arange(0, numbers.shape[1], step), axis=1) if step > 1 else numbers


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
