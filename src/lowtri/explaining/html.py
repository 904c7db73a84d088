"""An explanation as one self-contained HTML page: no network, no script, no fonts of its own.

Hidden cells are hatched, so that "hidden" and "visible with weight 0" never look alike. The darker a visible weight's cell,
the greater the weight.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.equation import as_svg
from lowtri.explaining.show import cut, number, printable, tables_of
from lowtri.explaining.step import PAIRS, Step, Steps
from lowtri.masks.labels import shortened
from lowtri.masks.palette import VISIBLE, Colour
from lowtri.pages import html_text, page

__all__ = ["as_html"]

_STYLE = """.lowtri h2 { margin: 0; font-size: var(--s3) } .lowtri h2 small { color: var(--soft); font-weight: normal; font-size: .7em }
.lowtri p { margin: .2rem 0 .6rem } .lowtri .pair { display: flex; flex-wrap: wrap; gap: 0 2rem }
.lowtri .legend { font-size: var(--s1); color: var(--soft) } .lowtri .note { color: var(--soft) }
.lowtri .steps { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1rem }
.lowtri .steps .figure { margin: 0; min-width: 0; padding: 1rem 1.1rem } .lowtri .steps .wide { grid-column: 1 / -1 }
.lowtri .steps p { font-size: var(--s1); line-height: 1.5; color: var(--soft) }
.lowtri .scroll { max-width: 100%; overflow-x: auto } .lowtri .scroll > svg { min-width: 42rem }
.lowtri table { border-collapse: separate; border-spacing: 2px; margin: .3rem 0; color: inherit; font-size: var(--s0) }
.lowtri caption { text-align: left; color: var(--soft); white-space: nowrap }
.lowtri th, .lowtri td { padding: .25rem .55rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.lowtri td { border-radius: .25rem; background: color-mix(in srgb, var(--hue, var(--ink)) 7%, var(--card)) }
.lowtri th { font-weight: 500; color: var(--soft) } .lowtri tbody th { text-align: left }
.lowtri .q { --hue: var(--q-hue) } .lowtri .k { --hue: var(--k-hue) } .lowtri .v { --hue: var(--v-hue) }
.lowtri .axes { color: var(--soft); font-weight: normal; font-size: .9em }
.lowtri .hidden { color: var(--soft); background: repeating-linear-gradient(135deg, var(--hatch) 0 2px, var(--card) 2px 7px) }
.lowtri .key { display: inline-block; min-width: 3.2rem; padding: .1rem .4rem; margin-right: .4rem; text-align: right;
  border: 1px solid var(--line); border-radius: .25rem; color: var(--ink) }
"""
_HUES = {"q": " q", "W_q^T": " q", "k": " k", "W_k^T": " k", "v": " v", "W_v^T": " v", "output": " v", "joined": " v"}


def as_html(steps: Steps) -> str:
    """The whole page as text."""
    note = f'<p class="note">{html_text(steps.note, keep=chr(10))}</p>' if steps.note else ""
    picture = as_svg(steps).replace(' xmlns="http://www.w3.org/2000/svg"', "")  # a page needs no namespace
    parts = [
        f"<h1>Masked attention, step by step</h1><p>mask <code>{html_text(steps.mask)}</code></p>{note}",
        f'<section class="figure"><div class="scroll">{picture}</div></section>',
        '<p class="legend"><span class="key hidden">0</span>hidden by the mask: its weight is exactly 0</p>',
        f'<p class="legend"><span class="key"{_shade(0)}>0.0000</span>visible, and its weight came out small: it counts</p>',
        f'<p class="legend"><span class="key"{_shade(0.5)}>0.5000</span><span class="key"{_shade(1)}>1.0000</span>',
        "the greater the weight, the stronger the colour</p>",
        '<div class="steps">',
    ]
    for step in steps.steps:
        shape = " × ".join(str(n) for n in step.shape)
        formula = f" = {escape(step.formula)}" if step.formula else ""
        wide = " wide" if step.unmasked is not None or step.value.ndim == 3 else ""
        parts.append(f'<section class="figure{wide}{_HUES.get(step.name, "")}">')
        parts.append(f"<h2>{escape(step.name)}{formula} <small>{shape}</small></h2><p>{escape(step.sentence)}</p>")
        for together in tables_of(step, steps.visible):
            parts += ['<div class="pair">', *(_table(step, *table) for table in together), "</div>"]
        parts.append("</section>")
    title = f"lowtri: {shortened(' '.join(steps.tokens), 80)}"
    return page(title, [*parts, "</div>"], _STYLE, {"weight": Colour(*VISIBLE.rgb)})


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
