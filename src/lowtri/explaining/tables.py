"""The steps of an explanation as data, and as tables of text: every number labelled, masked beside unmasked, hidden cells hatched.

Widths are counted in terminal cells, so that Chinese tokens (two cells a character) and Thai ones (marks above and below
take none) are aligned with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.extras import require
from lowtri.pictures.labels import shortened, spelled_out

if TYPE_CHECKING:
    from rich.console import RenderableType

PAIRS = ("scores", "scaled", "mask", "masked", "weights")  # steps with a row for each query, a column for each key
_HATCH = "▒"
_Table: TypeAlias = "tuple[str, NDArray[Any], NDArray[np.bool_] | None]"
_MOST = 12  # rows or columns shown; of more, the first ones and the last


@dataclass(frozen=True)
class Step:
    """One step: its value, (rows, columns) or (heads, rows, columns), with a label for each row and column.

    Attributes:
        name: such as ``"scores"`` or ``"weights"``.
        formula: how the value follows from the steps before it; empty for inputs.
        sentence: the same in words.
        value: the numbers.
        rows, columns: the labels.
        unmasked: the same step without a mask, or None where the mask makes no difference.
    """

    name: str
    formula: str
    sentence: str
    value: NDArray[Any]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    unmasked: NDArray[Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def hatched(self) -> bool:
        """Whether the cells are pairs of tokens that the mask may hide."""
        return self.name in ("mask", "masked", "weights")


@dataclass(frozen=True)
class Steps:
    """All steps, in order, and the tokens and mask that they are about."""

    tokens: tuple[str, ...]
    mask: str
    visible: NDArray[np.bool_]  # (Nq, Nk), or (H, Nq, Nk) with several heads; True = may see
    steps: tuple[Step, ...]
    note: str = ""


def as_text(steps: Steps, *, width: int = 100, colour: bool = False) -> str:
    """The explanation for a terminal of ``width`` cells; two tables stand side by side where they fit."""
    require("an explanation as text", "rich")
    from rich.console import Console, Group
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    # No table is ever squeezed: a number that lost its digits says something false. The terminal may wrap long lines.
    out = StringIO()
    console = Console(file=out, width=10_000, force_terminal=colour, highlight=False, legacy_windows=False, emoji=False)
    console.print(Text(f"mask {spelled_out(steps.mask)}", "bold"))
    if steps.note:
        console.print(Text(steps.note))
    console.print(Text(f"{_HATCH} hidden by the mask: its weight is exactly 0. A plain 0.0000 is visible and counts."))
    for step in steps.steps:
        formula = f" = {step.formula}" if step.formula else ""
        shape = " x ".join(str(n) for n in step.shape)
        console.print(Text.assemble("\n", (step.name, "bold"), formula, (f"   {shape}", "dim")))
        console.print(Text(step.sentence))
        for together in tables_of(step, steps.visible):
            tables = [_table(step, *table) for table in together]
            side_by_side = Table.grid(padding=(0, 6))
            side_by_side.add_row(*tables)
            fits = Measurement.get(console, console.options, side_by_side).maximum <= width
            shown: RenderableType = side_by_side if fits else Group(*tables)
            console.print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def tables_of(step: Step, visible: NDArray[np.bool_]) -> Iterator[list[_Table]]:
    """What to show of a step: for each head the tables that belong side by side, as (title, cells, which are visible)."""
    values = step.value if step.value.ndim == 3 else step.value[None]
    for h, value in enumerate(values):
        title = f"head {h}" if len(values) > 1 else ""
        seen = (visible[h] if visible.ndim == 3 else visible) if step.hatched else None
        if step.unmasked is None:
            yield [(title, value, seen)]
        else:
            unmasked = step.unmasked[h] if step.unmasked.ndim == 3 else step.unmasked
            comma = ", " if title else ""
            yield [(f"{title}{comma}with the mask", value, seen), (f"{title}{comma}without", unmasked, None)]


def _table(step: Step, title: str, cells: NDArray[Any], visible: NDArray[np.bool_] | None) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    rows, columns = cut(len(step.rows)), cut(len(step.columns))
    table.add_column("")
    for j in columns:
        table.add_column(Text("…" if j is None else printable(step.columns[j])), justify="right", no_wrap=True)
    for i in rows:
        if i is None:
            table.add_row(*["…"] * (len(columns) + 1))
            continue
        line = [Text(printable(step.rows[i]), no_wrap=True)]
        for j in columns:
            if j is None:
                line.append(Text("…"))
            else:
                hidden = visible is not None and not visible[i, j]
                text = f"{_HATCH} {_hidden_number(cells[i, j])}" if hidden else number(cells[i, j])
                line.append(Text(text, "dim" if hidden else ""))
        table.add_row(*line)
    return Group(Text(title, "italic", no_wrap=True), table) if title else table


def cut(n: int) -> list[int | None]:
    """Which of ``n`` rows or columns are shown; None stands for those left out.

    >>> cut(3), cut(100)
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


def _hidden_number(x: Any) -> str:
    # Exactly 0, so without digits after the point: "0.0000" is what a small visible weight looks like.
    return "0" if not isinstance(x, bool | np.bool_) and x == 0 else number(x)


def printable(token: str) -> str:
    """A token that keeps its cell: blanks at its ends and line ends are marked, invisible characters spelled out.

    >>> print(printable(" cat"), printable("a\\n"), printable(""), printable("\\u202ecat"))
    ␣cat a⏎ ∅ \\u202ecat
    """
    body = token.strip(" ")
    before = len(token) - len(token.lstrip(" ")) if body else len(token)
    marked = "␣" * before + body + "␣" * (len(token) - before - len(body))
    return shortened(marked.replace("\n", "⏎").replace("\t", "⇥")) or "∅"
