"""An explanation as one self-contained HTML page: no network, no script, no fonts of its own.

Hidden cells are hatched, so that "hidden" and "visible with weight 0" never look alike. The darker a visible weight's cell,
the greater the weight.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.show import cut, number, printable, tables_of
from lowtri.explaining.step import PAIRS, Step, Steps
from lowtri.masks.labels import shortened
from lowtri.masks.palette import VISIBLE
from lowtri.pages import html_text, page

__all__ = ["as_html"]

_LIGHT = {"faint": "#666", "line": "#ddd", "head": "#f4f4f4", "hidden": "#666", "hatch": "#eee", "stroke": "#cfcfcf"}
_DARK = {
    "faint": "#a3a9b5",
    "line": "#3a404b",
    "head": "#22262e",
    "hidden": "#a3a9b5",
    "hatch": "#1b1f26",
    "stroke": "#39404b",
}
_STYLE = """.lowtri h1 { line-height: 1.2 } .lowtri h2 { margin: 1.6rem 0 0 }
.lowtri h2 small { color: var(--faint); font-weight: normal; font-size: .7em }
.lowtri p { margin: .2rem 0 .6rem } .lowtri .pair { display: flex; flex-wrap: wrap; gap: 0 2rem }
.lowtri .scroll { max-width: 100%; overflow-x: auto }
.lowtri table { border-collapse: collapse; margin: .3rem 0; color: inherit; font-size: inherit }
.lowtri caption { text-align: left; font-style: italic; white-space: nowrap }
.lowtri th, .lowtri td { padding: .15rem .6rem; border: 1px solid var(--line); text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums } .lowtri tbody th { text-align: left } .lowtri th { background: var(--head) }
.lowtri .axes { color: var(--faint); font-weight: normal; font-size: .8em }
.lowtri .hidden { color: var(--hidden);
  background: repeating-linear-gradient(45deg, var(--hatch) 0 4px, var(--stroke) 4px 6px) }
.lowtri .key { display: inline-block; min-width: 3.2rem; padding: .1rem .4rem; margin-right: .3rem; text-align: right;
  border: 1px solid var(--line) }
"""


def as_html(steps: Steps) -> str:
    """The whole page as text."""
    note = f"<br>{html_text(steps.note, keep=chr(10))}" if steps.note else ""
    parts = [
        f"<h1>Masked attention, step by step</h1><p>mask <code>{html_text(steps.mask)}</code>{note}</p>",
        '<p><span class="key hidden">0</span>hidden by the mask: its weight is exactly 0</p>',
        f'<p><span class="key"{_shade(0)}>0.0000</span>visible, and its weight came out small: it counts</p>',
        f'<p><span class="key"{_shade(0.5)}>0.5000</span><span class="key"{_shade(1)}>1.0000</span>',
        "the greater the weight, the stronger the colour</p>",
    ]
    for step in steps.steps:
        shape = " × ".join(str(n) for n in step.shape)
        formula = f" = {escape(step.formula)}" if step.formula else ""
        parts.append(f"<h2>{escape(step.name)}{formula} <small>{shape}</small></h2><p>{escape(step.sentence)}</p>")
        for together in tables_of(step, steps.visible):
            parts += ['<div class="pair">', *(_table(step, *table) for table in together), "</div>"]
    title = f"lowtri: {shortened(' '.join(steps.tokens), 80)}"
    return page(title, parts, _STYLE, {**_LIGHT, "weight": VISIBLE.rgb[0]}, {**_DARK, "weight": VISIBLE.rgb[1]})


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
    return f"<td{_shade(float(np.nan_to_num(x))) if step.name == 'weights' else ''}>{number(x)}</td>"


def _shade(weight: float) -> str:
    return f' style="background:rgba(var(--weight),{0.7 * weight:.3f})"'
