"""The steps as SVG, laid out as the equation reads: q k^T gives scores; masked, then softmax, gives weights; with v, the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.show import cut, number, printable
from lowtri.explaining.step import Step, Steps
from lowtri.pictures.labels import display_width, shortened
from lowtri.pictures.svg import HIDDEN, LETTER, Grid, document, fill, ink_over, legend, shades, text

__all__ = ["as_svg"]

_FEW = 6  # rows and columns up to which every number is written
_MARGIN, _GAP, _OPERATOR = 16, 10, 48
_MIDDLE = ' text-anchor="middle"'
_HUES = {"q": "query", "k": "key", "v": "value", "output": "value", "weights": "visible"}  # all others: ink
_LINES = ((("", "q"), ("·", "k"), ("=", "scores")), (("", "masked"), ("→", "weights"), ("·", "v"), ("=", "output")))


@dataclass(frozen=True)
class _Matrix:
    operator: str  # on its left
    name: str
    values: NDArray[np.float64]  # (rows, columns), NaN in the row and column that stand for those left out
    hidden: NDArray[np.bool_]  # (rows, columns)
    shape: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]  # empty where they are numbers of a vector


def as_svg(steps: Steps) -> str:
    """The first head's matrices, at most 12 x 12 cells of each: bounded at any number of tokens."""
    lines = [[_matrix(steps, *pair) for pair in line if _step(steps, pair[1]) is not None] for line in _LINES]
    if _step(steps, "q") is None:
        lines = lines[1:]
    few = max(max(matrix.values.shape) for line in lines for matrix in line) <= _FEW
    wide, high = (50.0, 26.0) if few else (15.0, 15.0)
    labels = [label for line in lines for matrix in line for label in (*matrix.rows, *matrix.columns)]
    longest = LETTER * max(map(display_width, labels), default=0)
    side, slanted = _MARGIN + longest + 8, longest * 0.71 + 8
    heads = next(len(step.value) if step.value.ndim == 3 else 1 for step in steps.steps if step.name == "weights")
    title = f"masked attention, {shortened(steps.mask, 60)}" + (f": the first of {heads} heads" if heads > 1 else "")

    parts, y, right = [text(_MARGIN, 26, title, ' font-weight="bold"')], 40.0, side
    for line in lines:
        tallest = max(len(matrix.values) for matrix in line) * high
        top, x = y + 34 + slanted, side
        for i, label in enumerate(line[0].rows):
            parts.append(text(side - 8, top + (i + 0.5) * high + 4, label, ' text-anchor="end"'))
        for matrix in line:
            if matrix.operator:
                x += _OPERATOR
                if matrix.operator == "→":
                    parts.append(
                        text(x - _OPERATOR / 2, top + tallest / 2 - 12, "softmax", f'{_MIDDLE} font-size="10"')
                    )
                parts.append(
                    text(x - _OPERATOR / 2, top + tallest / 2 + 4, matrix.operator, _MIDDLE + ' font-size="18"')
                )
            parts += _drawn(matrix, x, top, wide, high, slanted)
            across = matrix.values.shape[1] * wide + 0.9 * slanted * bool(matrix.columns)
            x += max(across, LETTER * len(f"{matrix.name} {matrix.shape}")) + _GAP
        right, y = max(right, x), top + tallest
    entries = [(f'{fill("visible")} fill-opacity="{share}"', f"weight {share}") for share in (1, 0.5, 0)]
    parts += [*legend(_MARGIN, y + 24, [*entries, (HIDDEN, "hidden")])]
    note = "colour: the size of a number beside the greatest of its matrix"
    parts.append(text(_MARGIN, y + 58, note, f" {fill('soft')}"))
    return document(max(right, 2 * _MARGIN + LETTER * max(len(title), len(note))) + _MARGIN, y + 70, title, parts)


def _step(steps: Steps, name: str) -> Step | None:
    return next((step for step in steps.steps if step.name == name), None)


def _matrix(steps: Steps, operator: str, name: str) -> _Matrix:
    """One head of a step; keys transposed, so that their columns stand above those of the scores."""
    step = _step(steps, name)
    assert step is not None
    value = np.asarray(step.value if step.value.ndim == 2 else step.value[0], np.float64)
    visible = steps.visible if steps.visible.ndim == 2 else steps.visible[0]
    hidden = ~visible if step.hatched else np.zeros(value.shape, bool)
    rows, columns = step.rows, step.columns if name in ("scores", "masked", "weights") else ()
    shape = " × ".join(str(n) for n in (value.T if name == "k" else value).shape)
    if name == "k":
        value, hidden, rows, columns = value.T, hidden.T, (), step.rows
    down, across = cut(value.shape[0]), cut(value.shape[1])
    shown = np.full((len(down), len(across)), np.nan)
    hatched = np.zeros(shown.shape, bool)
    for i, row in enumerate(down):
        for j, column in enumerate(across):
            if row is not None and column is not None:
                shown[i, j], hatched[i, j] = value[row, column], hidden[row, column]

    def names(labels: tuple[str, ...], chosen: list[int | None]) -> tuple[str, ...]:
        return tuple("…" if i is None else printable(labels[i]) for i in chosen) if labels else ()

    return _Matrix(
        operator, "k^T" if name == "k" else name, shown, hatched, shape, names(rows, down), names(columns, across)
    )


def _drawn(matrix: _Matrix, x: float, y: float, wide: float, high: float, slanted: float) -> Iterator[str]:
    name = matrix.name.removesuffix("^T")
    finite = np.where(np.isfinite(matrix.values) & ~matrix.hidden, abs(matrix.values), 0.0)
    hue = _HUES.get(name, "ink")
    strongest = 1.0 if name == "weights" else 0.3 if hue == "ink" else 0.55
    greatest = 1.0 if name == "weights" else finite.max(initial=0.0) or 1.0
    yield text(x, y - slanted - 10, matrix.name, f' font-weight="bold" {fill(hue)}')
    yield text(x + LETTER * (len(matrix.name) + 1), y - slanted - 10, matrix.shape, f" {fill('soft')}")
    shares = np.where(matrix.hidden, np.nan, finite / greatest * strongest)

    def number(i: int, j: int) -> tuple[str, str]:
        value, hidden = matrix.values[i, j], matrix.hidden[i, j]
        return "0" if hidden and value == 0 else _number(value), fill("soft") if hidden else ink_over(shares[i, j])

    rows, columns = shares.shape
    numbers = [[number(i, j) for j in range(columns)] for i in range(rows)] if wide >= 40 else ()
    yield from Grid(shades(shares, fill(hue)), wide, high, (), matrix.columns, numbers, shaded=True).svg(x, y)


def _number(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) and abs(x) < 1000 else number(x)
