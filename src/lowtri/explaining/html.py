"""An explanation as one HTML page that needs nothing else: no network, no script, no fonts of its own.

Hidden cells are hatched, so that "hidden" and "visible with weight 0" never look alike. The darker a visible weight's cell,
the greater the weight.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.show import cut, number, printable, tables_of

if TYPE_CHECKING:
    from lowtri.explaining.steps import Explanation, Step

__all__ = ["as_html"]

_STYLE = """
.lowtri { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }
.lowtri h2 { margin: 1.6rem 0 0 } .lowtri h2 small { color: #666; font-weight: normal; font-size: .7em }
.lowtri p { margin: .2rem 0 .6rem } .lowtri .pair { display: flex; flex-wrap: wrap; gap: 2rem }
.lowtri table { border-collapse: collapse; margin: .3rem 0 } .lowtri caption { text-align: left; font-style: italic }
.lowtri th, .lowtri td { padding: .15rem .6rem; border: 1px solid #ddd; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums } .lowtri tbody th { text-align: left } .lowtri th { background: #f4f4f4 }
.lowtri .hidden { color: #777;
  background: repeating-linear-gradient(45deg, #eee 0 4px, #cfcfcf 4px 6px) }
"""


def as_html(explanation: Explanation) -> str:
    """The whole page as text."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>lowtri: {escape(' '.join(explanation.tokens)[:80])}</title><style>{_STYLE}</style></head>",
        f'<body><div class="lowtri"><h1>Masked attention, step by step</h1><p>mask <code>{escape(explanation.mask)}</code>',
        f"<br>{escape(explanation.note)}</p>" if explanation.note else "</p>",
        '<table><tr><td class="hidden">0</td><td>hidden by the mask: its weight is exactly 0</td></tr>',
        "<tr><td>0.0000</td><td>visible, and its weight came out small: it counts</td></tr></table>",
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
    lines = [
        f"<table>{f'<caption>{escape(title)}</caption>' if title else ''}<thead><tr><th></th>{head}</tr></thead><tbody>"
    ]
    for i in rows:
        if i is None:
            lines.append("<tr>" + "<td>…</td>" * (len(columns) + 1) + "</tr>")
            continue
        line = "".join(
            "<td>…</td>" if j is None else _cell(step, cells[i, j], visible is None or bool(visible[i, j]))
            for j in columns
        )
        lines.append(f"<tr><th>{escape(printable(step.rows[i]))}</th>{line}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _cell(step: Step, x: Any, visible: bool) -> str:
    if not visible:
        return f'<td class="hidden" title="hidden">{"0" if step.name == "weights" else number(x)}</td>'
    shade = (
        f' style="background:rgba(46,125,180,{0.7 * float(np.nan_to_num(x)):.3f})"' if step.name == "weights" else ""
    )
    return f"<td{shade}>{number(x)}</td>"
