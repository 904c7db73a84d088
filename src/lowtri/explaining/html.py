"""An explanation as one self-contained HTML page: no network, no script, no fonts of its own.

Hidden cells are hatched, so that "hidden" and "visible with weight 0" never look alike. The darker a visible weight's cell,
the greater the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.explaining.equation import as_svg
from lowtri.explaining.show import cut, number, printable, tables_of
from lowtri.explaining.step import PAIRS, Step, Steps
from lowtri.pictures.labels import shortened
from lowtri.pictures.pages import html_text, image, output, page

__all__ = ["as_html", "as_output"]

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


def as_html(steps: Steps) -> str:
    """The whole page as text."""
    title = f"lowtri: {shortened(' '.join(steps.tokens), 80)}"
    return page("explanation", title, _parts(steps, f'<div class="scroll">{as_svg(steps)}</div>'), _STYLE)


def as_output(steps: Steps) -> str:
    """What notebooks show: the same, with the picture as an image."""
    return output("explanation", _parts(steps, image(as_svg(steps))), _STYLE)


def _parts(steps: Steps, picture: str) -> Iterator[str]:
    note = f'<p class="note">{html_text(steps.note, keep=chr(10))}</p>' if steps.note else ""
    yield f"<h1>Masked attention, step by step</h1><p>mask <code>{html_text(steps.mask)}</code></p>{note}"
    yield f'<section class="figure">{picture}</section>'
    yield '<p class="legend"><span class="key hidden">0</span> hidden by the mask: its weight is exactly 0</p>'
    yield f'<p class="legend"><span class="key {_weight(0)}>0.0000</span> visible, and its weight came out small: it counts</p>'
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
