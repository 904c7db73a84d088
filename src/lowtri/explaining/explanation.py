"""The result of explain(): every step with its numbers, as data, as tables of text, as one HTML page, and as one picture.

Each form marks what the mask hides: a hidden pair is hatched and its weight is 0, while a visible pair shows its weight with all
digits, the stronger coloured the greater it is. The picture is laid out as the equation reads: q k^T gives scores; masked, then
softmax, gives weights; with v, the output. Widths of text are counted in terminal cells, so that Chinese tokens (two cells a
character) and Thai ones (marks above and below take none) are aligned with the numbers.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.pictures.files import save_picture
from lowtri.pictures.grids import Grid, Panel, beside_one_another, levels, picture, shades
from lowtri.pictures.labels import display_width, ruled, shortened, spelled_out
from lowtri.pictures.pages import html_text, image, json_value, output, page
from lowtri.pictures.svg import BOLD, fill
from lowtri.sentences import sentence

# Steps with a row for each query and a column for each key.
PAIRS = ("scores", "scaled", "capped", "bias", "mask", "masked", "weights")
_HATCH = "▒"
_MOST = 12  # rows or columns shown; of more, the first ones and the last


class StepText(NamedTuple):
    """What is written beside the numbers of a step: its name, formula and sentence, and the labels of its rows and columns."""

    name: str
    formula: str
    sentence: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    lang: str = "en"


class Step(np.ndarray[Any, np.dtype[Any]]):
    """One step: an array, (rows, columns) or (heads, rows, columns), that notebooks show as a picture.

    Operations on it give plain arrays.

    Attributes:
        name: such as ``"scores"`` or ``"weights"``.
        formula: how the value follows from the steps before it; empty for inputs.
        sentence: the same in words.
        value: the numbers as a plain array.
        rows, columns: the labels.
        unmasked: the same step without a mask, or None where the mask makes no difference.
        visible: (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see.
    """

    about: StepText | None
    unmasked: NDArray[Any] | None
    visible: NDArray[np.bool_]

    def __new__(
        cls, value: NDArray[Any], text: StepText, unmasked: NDArray[Any] | None, visible: NDArray[np.bool_]
    ) -> Step:
        step = np.asarray(value).view(cls)
        step.about = text
        step.unmasked = unmasked
        step.visible = visible
        return step

    def __array_finalize__(self, parent: Any) -> None:
        self.about = getattr(parent, "about", None)
        self.unmasked = getattr(parent, "unmasked", None)
        self.visible = getattr(parent, "visible", np.ones((0, 0), bool))

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain[()] if plain.ndim == 0 else plain

    def __getitem__(self, key: Any) -> Any:
        return self.value[key]

    def __reduce__(self) -> Any:
        return Step, (self.value, self.about, self.unmasked, self.visible)

    @property
    def value(self) -> NDArray[Any]:
        return self.view(np.ndarray)

    @property
    def name(self) -> str:
        return self.about.name if self.about else ""

    @property
    def formula(self) -> str:
        return self.about.formula if self.about else ""

    @property
    def sentence(self) -> str:
        return self.about.sentence if self.about else ""

    @property
    def rows(self) -> tuple[str, ...]:
        return self.about.rows if self.about else ()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.about.columns if self.about else ()

    @property
    def hatched(self) -> bool:
        """Whether the cells are pairs of tokens that the mask may hide."""
        return self.name in ("mask", "masked", "weights")

    def _repr_html_(self) -> str | None:
        if self.about is None or self.ndim not in (2, 3):
            return None
        return output("step", [*_section(self, self.visible, self.about.lang)], _STYLE)


@dataclass(frozen=True)
class Explanation:
    """All steps, in order. ``print`` shows them as tables; ``explanation["weights"]`` is one step, an array.

    Attributes:
        tokens: the tokens of the sentence.
        mask: the mask, as text.
        visible: (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see.
        steps: every step, a :class:`Step` each.
        note: how the tokens and the weights were chosen.
        warning: one sentence where a module's own output is not that of the steps, which then end with "own output", or where it
            could not be had; else empty.
        lang: the language of the sentences.
    """

    tokens: tuple[str, ...]
    mask: str
    visible: NDArray[np.bool_]
    steps: tuple[Step, ...]
    note: str = ""
    warning: str = ""
    lang: str = "en"

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
        about = {name: getattr(self, name) for name in ("warning", "tokens", "mask", "note", "visible")}
        values: dict[str, Any] = json_value({**about, "steps": steps})
        return values

    def to_json(self) -> str:
        """:meth:`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_html(self) -> str:
        """One self-contained HTML page: no network, no script."""
        title = f"lowtri: {shortened(' '.join(self.tokens), 80)}"
        return page("explanation", title, _parts(self, f'<div class="scroll">{self.to_svg()}</div>'), _STYLE)

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
        return output("explanation", _parts(self, image(self.to_svg())), _STYLE)

    _repr_svg_ = to_svg


# Tables.


class _Table(NamedTuple):
    """What is shown of one head of a step; "…" stands for rows and columns that are left out."""

    title: str
    rows: list[str]
    columns: list[str]
    values: NDArray[Any]  # (rows, columns)
    hidden: NDArray[np.bool_]  # (rows, columns)
    left_out: NDArray[np.bool_]  # (rows, columns)

    def text(self, i: int, j: int) -> str:
        if self.left_out[i, j]:
            return "…"
        x = self.values[i, j]
        # Exactly 0, so without digits after the point: "0.0000" is what a small visible weight looks like.
        exact = self.hidden[i, j] and x.dtype != bool and x == 0
        return "0" if exact else number(x)


def _table(step: Step, title: str, values: NDArray[Any], visible: NDArray[np.bool_] | None) -> _Table:
    down, across = _cut(len(step.rows)), _cut(len(step.columns))
    left_out = np.array([[i is None or j is None for j in across] for i in down])
    picked = np.ix_([i or 0 for i in down], [j or 0 for j in across])
    hidden = left_out & False if visible is None else ~visible[picked] & ~left_out
    rows, columns = (
        ["…" if i is None else printable(labels[i]) for i in shown]
        for labels, shown in ((step.rows, down), (step.columns, across))
    )
    return _Table(title, rows, columns, values[picked], hidden, left_out)


def _head(values: NDArray[Any], h: int) -> NDArray[Any]:
    return values[h] if values.ndim == 3 else values


def _tables_of(step: Step, visible: NDArray[np.bool_], lang: str) -> Iterator[list[_Table]]:
    """What to show of a step: for each head the tables that belong side by side."""
    heads = len(step.value) if step.value.ndim == 3 else 1
    for h in range(heads):
        title, allowed = (
            sentence(lang, "explain.head", h=h) if heads > 1 else "",
            _head(visible, h) if step.hatched else None,
        )
        if step.unmasked is None:
            yield [_table(step, title, _head(step.value, h), allowed)]
        else:
            prefix, unmasked = f"{title}, " if title else "", _head(step.unmasked, h)
            masked = _table(step, f"{prefix}{sentence(lang, 'explain.with')}", _head(step.value, h), allowed)
            yield [masked, _table(step, f"{prefix}{sentence(lang, 'explain.without')}", unmasked, None)]


def as_text(explained: Explanation, *, width: int = 100, colour: bool = False) -> str:
    """The explanation for a terminal of ``width`` cells; two tables stand side by side where they fit."""

    def styled(code: int, words: str) -> str:
        return f"\x1b[{code}m{words}\x1b[0m" if colour else words

    bold, dim = 1, 2
    lines = [styled(bold, spelled_out(explained.warning))] if explained.warning else []
    lines += [
        styled(bold, f"mask {spelled_out(explained.mask)}"),
        *([spelled_out(explained.note, keep="\n")] if explained.note else []),
    ]
    lines.append(f"{_HATCH} {sentence(explained.lang, 'explain.hidden')}")
    for step in explained.steps:
        formula = f" = {step.formula}" if step.formula else ""
        shape = " x ".join(str(n) for n in step.shape)
        lines += ["", f"{styled(bold, step.name)}{formula}{styled(dim, f'   {shape}')}", step.sentence]
        for together in _tables_of(step, explained.visible, explained.lang):
            tables = [_text_table(table) for table in together]
            beside = beside_one_another(tables, " " * 6)
            # No table is ever squeezed: a number that lost its digits says something false. The terminal may wrap long lines.
            fits = max(map(display_width, beside)) <= width
            shown = beside if fits else [line for table in tables for line in table]
            lines += [re.sub(rf"{_HATCH} \S+", lambda cell: styled(dim, cell[0]), line) for line in shown]
    return "\n".join(lines)


def _text_table(table: _Table) -> list[str]:
    marks = np.where(table.hidden, f"{_HATCH} ", "")
    rows = [
        (label, *(f"{mark}{table.text(i, j)}" for j, mark in enumerate(marks[i]))) for i, label in enumerate(table.rows)
    ]
    return [*([table.title] if table.title else []), *ruled([("", *table.columns), *rows])]


def _cut(n: int) -> list[int | None]:
    """Which of ``n`` rows or columns are shown; None stands for those left out.

    >>> _cut(3), _cut(100)
    ([0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, None, 97, 98, 99])
    """
    if n <= _MOST:
        return list(range(n))
    return [*range(_MOST - 4), None, *range(n - 3, n)]


def number(x: Any) -> str:
    """Four digits after the point; a tick or a cross for a bool; a whole number as it is.

    >>> number(1.16), number(-0.00001), number(float("-inf")), number(-1e9), number(True), number(7)
    ('1.1600', '0.0000', '-inf', '-1e9', '✓', '7')
    """
    if isinstance(x, bool | np.bool_):
        return "✓" if x else "✗"
    if isinstance(x, int | np.integer):
        return str(x)
    if not np.isfinite(x) or abs(x) >= 1e5:
        return f"{x:.5g}".replace("e+0", "e").replace("e+", "e")
    text = f"{x:.4f}"
    return text.removeprefix("-") if float(text) == 0 else text


def printable(token: str) -> str:
    """A token that keeps its cell: blanks at its ends and line ends are marked, invisible characters spelled out.

    >>> print(printable(" cat"), printable("a\\n"), printable(""), printable("\\u202ecat"))
    ␣cat a⏎ ∅ \\u202ecat
    """
    body = token.strip(" ")
    before = len(token) - len(token.lstrip(" ")) if body else len(token)
    marked = "␣" * before + body + "␣" * (len(token) - before - len(body))
    return shortened(marked.replace("\n", "⏎").replace("\t", "⇥")) or "∅"


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


def _parts(explained: Explanation, picture: str) -> Iterator[str]:
    if explained.warning:
        yield f'<p class="warning"><strong>{html_text(explained.warning)}</strong></p>'
    note = f'<p class="note">{html_text(explained.note, keep=chr(10))}</p>' if explained.note else ""
    title, legend = (sentence(explained.lang, f"explain.{key}") for key in ("title", "legend.hidden"))
    small, strong = (sentence(explained.lang, f"explain.legend.{key}") for key in ("small", "strong"))
    yield f"<h1>{title}</h1><p>mask <code>{html_text(explained.mask)}</code></p>{note}"
    yield f'<section class="figure">{picture}</section>'
    yield f'<p class="legend"><span class="key hidden">0</span> {legend}</p>'
    yield f'<p class="legend"><span class="key {_weight(0)}>0.0000</span> {small}</p>'
    yield f'<p class="legend"><span class="key {_weight(0.5)}>0.5000</span> <span class="key {_weight(1)}>1.0000</span>'
    yield f"{strong}</p>"
    yield '<div class="steps">'
    for step in explained.steps:
        yield from _section(step, explained.visible, explained.lang)
    yield "</div>"


def _section(step: Step, visible: NDArray[np.bool_], lang: str) -> Iterator[str]:
    """One step: its name and formula, its sentence, and its tables."""
    formula = f" = {escape(step.formula)}" if step.formula else ""
    wide = " wide" if step.unmasked is not None or step.ndim == 3 else ""
    yield f'<section class="figure{wide}{_HUES.get(step.name, "")}">'
    yield f"<h2>{escape(step.name)}{formula} <small>{_shape(step.value)}</small></h2><p>{escape(step.sentence)}</p>"
    corner = f'<th class="axes">{sentence(lang, "explain.axes")}</th>' if step.name in PAIRS else "<th></th>"
    for together in _tables_of(step, visible, lang):
        tables = [_html_table(table, corner, step.name == "weights") for table in together]
        yield "\n".join(['<div class="pair">', *tables, "</div>"])
    yield "</section>"


def _html_table(table: _Table, corner: str, shaded: bool) -> str:
    def cell(i: int, j: int) -> str:
        look = ""
        if table.hidden[i, j]:
            look = ' class="hidden" title="hidden"'
        elif shaded and not table.left_out[i, j]:
            look = f' class="{_weight(float(np.nan_to_num(table.values[i, j])))}'
        return f"<td{look}>{table.text(i, j)}</td>"

    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    lines = [f'<div class="scroll"><table>{caption}<thead><tr>{corner}{head}</tr></thead><tbody>']
    for i, label in enumerate(table.rows):
        lines.append(f"<tr><th>{escape(label)}</th>{''.join(cell(i, j) for j in range(len(table.columns)))}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def _weight(weight: float) -> str:
    """The rest of a class, and a style: the share of the colour of the greatest weight, on which ink can be read."""
    return f'weight" style="--weight:{weight:.3f}"'


# The picture.

_FEW = 6  # rows and columns up to which every number is written
_COLOURS = {"q": "query", "k": "key", "v": "value", "output": "value", "weights": "visible"}  # all others: ink
_LINES = ((("", "q"), ("·", "k"), ("=", "scores")), (("", "masked"), ("→", "weights"), ("·", "v"), ("=", "output")))


def as_svg(explained: Explanation) -> str:
    """The first head's matrices, at most 12 x 12 cells of each: bounded at any number of tokens."""
    steps = {step.name: step for step in explained.steps}
    lines = [[pair for pair in line if pair[1] in steps] for line in (_LINES if "q" in steps else _LINES[1:])]
    few = max(len(_cut(n)) for line in lines for _, name in line for n in steps[name].value.shape[-2:]) <= _FEW
    panels = [Panel([_grid(explained, steps[name], sign, few) for sign, name in line], "", "", "") for line in lines]
    heads = steps["weights"].value.shape[:-2]
    more = f": the first of {heads[0]} heads" if heads and heads[0] > 1 else ""
    title = f"masked attention, {shortened(explained.mask, 60)}{more}"
    panels[0] = panels[0]._replace(heading=title)
    looks = shades("visible")
    legend = [looks[i]._replace(meaning=f"weight {i / 16:g}") for i in (16, 8, 0)]
    notes = [*textwrap.wrap(spelled_out(explained.warning), 90)]
    notes.append("colour: the size of a number beside the greatest of its matrix")
    return picture(title, panels, [*legend, looks[17]], notes)


def _grid(explained: Explanation, step: Step, operator: str, few: bool) -> Grid:
    """One head of a step; keys transposed, so that their columns stand above those of the scores."""
    name, value = step.name, _head(step.value, 0)
    table = _table(step, "", value, _head(explained.visible, 0) if step.hatched else None)
    numbers = [[_digits(table, i, j) for j in range(len(table.columns))] for i in range(len(table.rows))]
    shown = np.where(table.left_out | table.hidden | ~np.isfinite(table.values), 0.0, abs(table.values))
    hue = _COLOURS.get(name, "ink")
    if name == "weights":
        strongest = greatest = 1.0
    else:
        strongest = 0.3 if hue == "ink" else 0.55
        greatest = shown.max(initial=0.0) or 1.0
    cells = levels(shown / greatest * strongest, table.hidden)
    rows, columns = table.rows, table.columns if name in PAIRS else []
    if name == "k":
        value, cells = value.T, cells.T
        numbers = [list(row) for row in zip(*numbers, strict=True)]
        rows, columns = [], rows
    return Grid(
        cells,
        shades(hue),
        *((50.0, 26.0) if few else (15.0, 15.0)),
        title="k^T" if name == "k" else name,
        shape=_shape(value),
        rows=rows,
        columns=columns,
        numbers=numbers if few else (),
        title_style=f"{BOLD} {fill(hue)}",
        operator=operator,
    )


def _digits(table: _Table, i: int, j: int) -> str:
    x = table.values[i, j]
    short = np.isfinite(x) and abs(x) < 1000 and not (table.hidden[i, j] and x == 0)
    return f"{x:.2f}" if short else table.text(i, j)


def _shape(value: NDArray[Any]) -> str:
    return " × ".join(map(str, value.shape))
