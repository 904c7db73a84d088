"""An explanation as one HTML page that needs nothing else: no network, no script, no fonts of its own.

Hidden cells are hatched, so that "hidden" and "visible with weight 0" never look alike. The darker a visible weight's cell,
the greater the weight.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.show import PAIRS, cut, number, printable, tables_of
from lowtri.masks.labels import shortened, spelled_out

if TYPE_CHECKING:
    from lowtri.explaining.explanation import Explanation, Step

__all__ = ["as_html"]

# The page's own body has its class: in a notebook, where only the <div> stays, nothing else is coloured.
_STYLE = """
.lowtri, .lowtri-page { --ink: #1a1a1a; --paper: #fff; --faint: #666; --line: #ddd; --head: #f4f4f4; --hidden: #666;
  --hatch: #eee; --stroke: #cfcfcf; --weight: 46, 125, 180; color-scheme: light }
@media (prefers-color-scheme: dark) { .lowtri, .lowtri-page { --ink: #e5e7eb; --paper: #15181e; --faint: #a3a9b5;
  --line: #3a404b; --head: #22262e; --hidden: #a3a9b5; --hatch: #1b1f26; --stroke: #39404b; --weight: 66, 153, 225;
  color-scheme: dark } }
.lowtri-page { margin: 0; background: var(--paper) }
.lowtri { font: 15px/1.5 system-ui, sans-serif; box-sizing: border-box; max-width: 70rem; margin: 0 auto;
  padding: 2rem 1rem; color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
.lowtri h1 { line-height: 1.2 } .lowtri h2 { margin: 1.6rem 0 0 }
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


def as_html(explanation: Explanation) -> str:
    """The whole page as text."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>lowtri: {escape(shortened(' '.join(explanation.tokens), 80))}</title><style>{_STYLE}</style></head>",
        '<body class="lowtri-page"><div class="lowtri"><h1>Masked attention, step by step</h1>',
        f"<p>mask <code>{escape(spelled_out(explanation.mask))}</code>",
        f"<br>{escape(spelled_out(explanation.note, keep=chr(10)))}</p>" if explanation.note else "</p>",
        '<p><span class="key hidden">0</span>hidden by the mask: its weight is exactly 0</p>',
        f'<p><span class="key"{_shade(0)}>0.0000</span>visible, and its weight came out small: it counts</p>',
        f'<p><span class="key"{_shade(0.5)}>0.5000</span><span class="key"{_shade(1)}>1.0000</span>',
        "the greater the weight, the stronger the colour</p>",
    ]
    for step in explanation.steps:
        shape = " × ".join(str(n) for n in step.value.shape)
        formula = f" = {escape(step.formula)}" if step.formula else ""
        parts.append(f"<h2>{escape(step.name)}{formula} <small>{shape}</small></h2><p>{escape(step.sentence)}</p>")
        for together in tables_of(step, explanation.visible):
            parts.append('<div class="pair">')
            parts += [_table(step, title, cells, visible) for title, cells, visible in together]
            parts.append("</div>")
    parts.append("</div></body></html>")
    return "\n".join(parts) + "\n"


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
