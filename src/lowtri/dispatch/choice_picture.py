"""The answers of all engines to a call as SVG: estimated times as bars, reasons as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lowtri.masks.labels import shortened
from lowtri.masks.svg_parts import LETTER, document, fill, legend, text

__all__ = ["choice_svg", "duration"]

_LAST_RESORT = 1e9  # microseconds from which a cost says "only if nothing else can"
_LEFT, _LONGEST, _ROW = 110, 200, 26


def duration(microseconds: float) -> str:
    """
    >>> duration(1500.0), duration(5e6), duration(1e9)
    ('1.5 ms', '5 s', 'a last resort')
    """
    if microseconds >= _LAST_RESORT:
        return "a last resort"
    return f"{microseconds / 1000:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"


def choice_svg(engine: str, weighed: str, answers: Mapping[str, str], costs: Mapping[str, float]) -> str:
    """A row for each engine; the bars are on a logarithmic axis."""
    title = shortened(f"{engine} runs: {weighed}", 110)
    times = [max(cost, 1e-3) for cost in costs.values() if cost < _LAST_RESORT]
    least, most = (math.log10(min(times)), math.log10(max(times))) if times else (0.0, 0.0)

    def length(cost: float) -> float:
        share = (math.log10(max(cost, 1e-3)) - least) / (most - least) if most > least else 1.0
        return _LONGEST * (0.1 + 0.9 * share)

    words = {name: shortened(answer, 80) for name, answer in answers.items() if name not in costs}
    words |= {name: duration(cost) for name, cost in costs.items()}
    bottom = 44 + _ROW * len(answers) + 14

    def body() -> Iterator[str]:
        yield text(16, 24, title, ' font-weight="bold"')
        for i, name in enumerate(answers):
            y = 44 + i * _ROW
            yield text(16, y + 15, name, ' font-weight="bold"' if name == engine else "")
            x = float(_LEFT)
            if costs.get(name, _LAST_RESORT) < _LAST_RESORT:
                bar = fill("visible" if name == engine else "partly")
                yield f'<rect x="{x:.1f}" y="{y}" width="{length(costs[name]):.1f}" height="20" {bar}/>'
                x += length(costs[name]) + 8
            yield text(x, y + 15, words[name], "" if name in costs else f" {fill('soft')}")
        yield from legend(16, bottom, [(fill("visible"), "runs"), (fill("partly"), "can run")])
        yield text(200, bottom + 11, "bars: estimated time, logarithmic →")

    widest = max(
        LETTER * len(title) + 16, *(_LEFT + _LONGEST * (n in costs) + LETTER * len(words[n]) for n in answers), 470
    )
    return document(widest + 24, bottom + 30, title, body())
