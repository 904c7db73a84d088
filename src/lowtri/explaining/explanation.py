"""The result of explain: the steps with their labels, as text, as JSON, as one HTML page, and as one picture.

The page is self-contained: no network, no script, no fonts of its own. Hidden cells are hatched, so that "hidden" and "visible with
weight 0" never look alike; the darker a visible weight's cell, the greater the weight. The picture is laid out as the equation
reads: q k^T gives scores; masked, then softmax, gives weights; with v, the output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.tables import PAIRS, Step, Steps, as_text, cut, number, printable, tables_of
from lowtri.pictures.files import save_picture
from lowtri.pictures.labels import display_width, shortened
from lowtri.pictures.pages import html_text, image, json_value, output, page
from lowtri.pictures.svg import HIDDEN, LETTER, Grid, document, fill, ink_over, legend, shades, text


@dataclass(frozen=True)
class Explanation(Steps):
    """All steps, in order. ``print`` shows them as tables; ``explanation["weights"].value`` is the array of one step.

    Attributes:
        tokens: the tokens of the sentence.
        mask: the mask, as text.
        visible: (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see.
        steps: every step, a :class:`Step` each.
        note: how the tokens and the weights were chosen.
    """

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(f"no step {name!r}; there are {', '.join(step.name for step in self.steps)}")

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Explanation({len(self.tokens)} tokens, {self.mask}, {len(self.steps)} steps)"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain lists and numbers. Numbers that JSON lacks become text: "-inf", "inf", "nan"."""
        names = ("name", "formula", "sentence", "shape", "rows", "columns", "value", "unmasked")
        steps = [{name: getattr(step, name) for name in names} for step in self.steps]
        about = {name: getattr(self, name) for name in ("tokens", "mask", "note", "visible")}
        values: dict[str, Any] = json_value({**about, "steps": steps})
        return values

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_html(self) -> str:
        """One self-contained HTML page: no network, no script."""
        return _as_html(self)

    def to_svg(self) -> str:
        """The first head's matrices as one picture, laid out as the equation reads."""
        return as_svg(self)

    def save(self, path: str | Path) -> Path:
        """Write the page as .html, the numbers as .json, the tables as .txt, or the picture as .svg, .png or .pdf; atomically.

        Raises:
            DataError: if the name ends in none of these, or the file cannot be written, or matplotlib is missing.
        """
        forms = {".svg": self.to_svg, ".html": self.to_html, ".json": self.to_json, ".txt": lambda: f"{self}\n"}
        return save_picture(path, forms)

    def _repr_html_(self) -> str:
        return _as_output(self)

    _repr_svg_ = to_svg


# The page.

_STYLE = """:root { container-type: inline-size;
  --greatest: light-dark(color-mix(in srgb, var(--w-hue) 70%, var(--card)), color-mix(in srgb, var(--w-hue) 50%, var(--card))) }
:root h2 { margin: 0; font-size: var(--s3) } :root h2 small { color: var(--soft); font-weight: normal; font-size: .7em }
:root p { margin: .2rem 0 .6rem } :root .pair { display: flex; flex-wrap: wrap; gap: 0 2rem }
:root .legend { font-size: var(--s1); color: var(--soft) } :root .note { color: var(--soft) }
:root .steps { display: flex; flex-wrap: wrap; gap: 1rem }
:root .steps .figure { margin: 0; flex: 1 1 auto; min-width: min(100%, 16rem); max-width: 100%; padding: 1rem 1.1rem }
:root .steps p { font-size: var(--s1); line-height: 1.5; color: var(--soft); width: 0; min-width: 100% }
:root .steps .wide { flex-basis: 100% } :root .scroll > svg { min-width: 42rem }
:root table { border-collapse: separate; border-spacing: 2px; margin: .3rem 0; font-size: var(--s0) }
:root caption { text-align: left; color: var(--soft); white-space: nowrap }
:root :is(th, td) { padding: .25rem .55rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
:root td { border-radius: .25rem; background: color-mix(in srgb, var(--hue, var(--ink)) 7%, var(--card)) }
:root th { font-weight: 500; color: var(--soft) } :root tbody th { text-align: left }
:root .q { --hue: var(--q-hue) } :root .k { --hue: var(--k-hue) } :root .v { --hue: var(--v-hue) }
:root .axes { color: var(--soft); font-weight: normal; font-size: .9em }
:root .weight { background: color-mix(in srgb, var(--greatest) calc(var(--weight) * 100%), var(--card)) }
:root .hidden { color: var(--soft); background: repeating-linear-gradient(135deg, var(--hatch) 0 2px, var(--card) 2px 7px) }
:root .key { display: inline-block; min-width: 3.2rem; padding: .1rem .4rem; margin-right: .4rem; text-align: right;
  border: 1px solid var(--line); border-radius: .25rem; color: var(--ink) }
@container (max-width: 30rem) { :root .steps .figure { padding: .7rem .6rem } :root table { font-size: .6875rem; border-spacing: 1px }
  :root :is(th, td) { padding: .2rem .15rem } :root .axes { white-space: normal; width: 3.2rem } }
"""
_HUES = {"q": " q", "W_q^T": " q", "k": " k", "W_k^T": " k", "v": " v", "W_v^T": " v", "output": " v", "joined": " v"}


def _as_html(steps: Steps) -> str:
    """The whole page as text."""
    title = f"lowtri: {shortened(' '.join(steps.tokens), 80)}"
    return page("explanation", title, _parts(steps, f'<div class="scroll">{as_svg(steps)}</div>'), _STYLE)


def _as_output(steps: Steps) -> str:
    """What notebooks show: the same, with the picture as an image."""
    return output("explanation", _parts(steps, image(as_svg(steps))), _STYLE)


def _parts(steps: Steps, picture: str) -> Iterator[str]:
    note = f'<p class="note">{html_text(steps.note, keep=chr(10))}</p>' if steps.note else ""
    yield f"<h1>Masked attention, step by step</h1><p>mask <code>{html_text(steps.mask)}</code></p>{note}"
    yield f'<section class="figure">{picture}</section>'
    yield '<p class="legend"><span class="key hidden">0</span> hidden by the mask: its weight is exactly 0</p>'
    yield f'<p class="legend"><span class="key {_weight(0)}>0.0000</span> visible with a small weight: it counts</p>'
    yield f'<p class="legend"><span class="key {_weight(0.5)}>0.5000</span> <span class="key {_weight(1)}>1.0000</span>'
    yield "the greater the weight, the stronger the colour</p>"
    yield '<div class="steps">'
    for step in steps.steps:
        shape = " × ".join(str(n) for n in step.shape)
        formula = f" = {escape(step.formula)}" if step.formula else ""
        wide = " wide" if step.unmasked is not None or step.value.ndim == 3 else ""
        yield f'<section class="figure{wide}{_HUES.get(step.name, "")}">'
        yield f"<h2>{escape(step.name)}{formula} <small>{shape}</small></h2><p>{escape(step.sentence)}</p>"
        for together in tables_of(step, steps.visible):
            yield "\n".join(['<div class="pair">', *(_table(step, *table) for table in together), "</div>"])
        yield "</section>"
    yield "</div>"


def _table(step: Step, title: str, cells: NDArray[Any], visible: NDArray[np.bool_] | None) -> str:
    rows, columns = cut(len(step.rows)), cut(len(step.columns))
    head = "".join(f"<th>{'…' if j is None else escape(printable(step.columns[j]))}</th>" for j in columns)
    corner = '<th class="axes">queries ↓ keys →</th>' if step.name in PAIRS else "<th></th>"
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    lines = [f'<div class="scroll"><table>{caption}<thead><tr>{corner}{head}</tr></thead><tbody>']
    for i in rows:
        if i is None:
            lines.append("<tr>" + "<td>…</td>" * (len(columns) + 1) + "</tr>")
            continue
        line = "".join(
            "<td>…</td>" if j is None else _cell(step, cells[i, j], visible is None or bool(visible[i, j]))
            for j in columns
        )
        lines.append(f"<tr><th>{escape(printable(step.rows[i]))}</th>{line}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _cell(step: Step, x: Any, visible: bool) -> str:
    if not visible:
        return f'<td class="hidden" title="hidden">{"0" if step.name == "weights" else number(x)}</td>'
    return (
        f'<td class="{_weight(float(np.nan_to_num(x)))}>{number(x)}</td>'
        if step.name == "weights"
        else f"<td>{number(x)}</td>"
    )


def _weight(weight: float) -> str:
    """The rest of a class, and a style: the share of the colour of the greatest weight, on which ink can be read."""
    return f'weight" style="--weight:{weight:.3f}"'


# The picture.

_FEW = 6  # rows and columns up to which every number is written
_MARGIN, _GAP, _OPERATOR = 16, 10, 48
_MIDDLE = ' text-anchor="middle"'
_COLOURS = {"q": "query", "k": "key", "v": "value", "output": "value", "weights": "visible"}  # all others: ink
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
    hue = _COLOURS.get(name, "ink")
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
