"""The choice of the backend: the cheapest one that supports the call. A backend requested by name runs or raises."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from lowtri.backends import BACKENDS
from lowtri.backends.base import Backend
from lowtri.dispatch.choice_picture import choice_svg, duration
from lowtri.errors import EngineError
from lowtri.ops.call import Call
from lowtri.pages import html_text

__all__ = ["Choice", "choose", "load", "weigh"]


@dataclass(frozen=True)
class Choice:
    """The result of :func:`lowtri.which_engine`: the engine that would run, the reason, and the answer of each engine.

    Attributes:
        engine: the name of the engine that would run.
        weighed: why it was chosen.
        answers: for each engine "yes", or "no: " and the reason.
        costs: estimated microseconds of the engines that can run the call.
        remarks: what the estimate includes besides computing, for some engines.
    """

    engine: str
    weighed: str
    answers: dict[str, str]
    costs: dict[str, float]
    remarks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.engine} runs: {self.weighed}"]
        for name, answer in self.answers.items():
            cost = f", estimated {duration(self.costs[name])}" if name in self.costs else ""
            remark = f" ({self.remarks[name]})" if name in self.remarks else ""
            lines.append(f"{name:<10} {answer}{cost}{remark}")
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        """What notebooks show: estimated times as bars."""
        return choice_svg(self.engine, self.weighed, self.answers, self.costs)

    def _repr_html_(self) -> str:
        """The same above a table with every answer in full."""
        rows = [
            (name, answer, duration(self.costs[name]) if name in self.costs else "")
            for name, answer in self.answers.items()
        ]
        cells = "".join(f"<tr>{''.join(f'<td>{html_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
        head = "<tr><th>engine</th><th>can it run?</th><th>estimated</th></tr>"
        sentence = html_text(f"{self.engine} runs: {self.weighed}")
        return f"{self._repr_svg_()}<table><caption>{sentence}</caption><thead>{head}</thead><tbody>{cells}</tbody></table>"


@cache
def load(name: str) -> Backend:
    """The backend of that name; loaded late, since its dependencies are heavy."""
    return cast(Backend, importlib.import_module(f"lowtri.backends.{name}"))


def choose(call: Call, name: str, *, but: str | None = None) -> str:
    """The name of the backend that runs the call. ``name`` is a backend or "auto", which never chooses ``but``."""
    if name == "auto":
        by_cost = sorted((one for one in BACKENDS if one != but), key=lambda one: load(one).cost(call))
        return next(one for one in by_cost if load(one).supports(call) is None)
    if name not in BACKENDS:
        raise EngineError(f"attention: there is no engine {name!r}. There are: auto, {', '.join(BACKENDS)}.")
    if load(name).supports(call) is None:
        return name
    listed = "\n".join(f"  {one:<10} {answer}" for one, answer in _answers(call).items())
    raise EngineError(
        f'attention: engine "{name}" cannot run this call, and it was requested by name.\n  {call}\n{listed}\n'
        f'Fix: drop engine="{name}", or change what it names.'
    )


def weigh(call: Call, name: str, instead_of: str | None, by_name: bool) -> Choice:
    """The choice of ``name`` with its reason; ``instead_of`` is a cheaper backend that the inputs rule out."""
    answers = _answers(call)
    costs = {one: load(one).cost(call) for one, answer in answers.items() if answer == "yes"}
    weighed = "requested by name" if by_name else "the cheapest that supports the call"
    if instead_of is not None:
        trouble = "an input holds NaN, infinity or huge numbers, which it may spread to other queries or drop"
        weighed = f"{instead_of} is cheaper, but {trouble}"
    # A backend may have the function remark(call) -> str | None.
    remarks = {one: getattr(load(one), "remark", lambda call: None)(call) for one in costs}
    return Choice(name, weighed, answers, costs, {one: words for one, words in remarks.items() if words})


def _answers(call: Call) -> dict[str, str]:
    reasons = {name: load(name).supports(call) for name in BACKENDS}
    return {name: "yes" if reason is None else f"no: {reason}" for name, reason in reasons.items()}
