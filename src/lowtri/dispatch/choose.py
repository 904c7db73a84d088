"""The choice of the backend: the first rule of a list that holds. A backend requested by name runs or raises."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast

from lowtri.backends import BACKENDS
from lowtri.backends.base import Backend
from lowtri.backends.sdpa import why_not_inspected, why_table
from lowtri.errors import EngineError, ExtraError
from lowtri.extras import is_installed, missing
from lowtri.ops.call import Call
from lowtri.pictures.pages import TABLE_STYLE, html_table, html_text, output


class Rule(NamedTuple):
    """A backend, why ``engine="auto"`` chooses it, and the calls that are left to later rules, with the reason."""

    backend: str
    why: str
    why_not: Callable[[Call], str | None] = lambda call: None  # beyond what the backend supports


_DEFINITION_PAIRS = 2**19  # the definition computes several arrays of all pairs, each then of 4 MB
_TABLE_PAIRS = 2**24  # of a table of bools: 16 MB; the formula computes in tiles instead
_FLEX_PAIRS = 2**24  # over all heads: a short call does not wait seconds for the compiler
_BLOCK = 128  # queries that a GPU kernel computes together


def _many_pairs(call: Call) -> str | None:
    batch, heads, _, nq, nk, *_ = call.sizes
    if not call.is_numpy:
        return "the definition, in float64"
    many = batch * heads * nq * nk > _DEFINITION_PAIRS and is_installed(
        "torch"
    )  # else nothing but the definition can run
    return "the definition would compute many pairs" if many else None


def _large_table(call: Call) -> str | None:
    _, _, _, nq, nk, *_ = call.sizes
    tables = math.prod(call.mask.batch) * max(len(call.q_positions), len(call.k_positions))
    return why_not_inspected(call) or (
        "its table of all pairs would be large" if nq * nk * tables > _TABLE_PAIRS else None
    )


def _few_queries(call: Call) -> str | None:
    return f"there are fewer than {_BLOCK} queries" if call.q.shape[2] < _BLOCK else None


def _short(call: Call) -> str | None:
    batch, heads, _, nq, nk, *_ = call.sizes
    return _few_queries(call) or (
        "a short call does not wait for its compiler" if batch * heads * nq * nk < _FLEX_PAIRS else None
    )


# A rule holds if its backend supports the call and ``why_not`` has no objection. Facts of the call alone decide, never a time that
# was measured on some machine, so equal calls run on the same backend everywhere.
RULES = (
    Rule("cpu", "its kernels compute only what the mask shows"),
    Rule("sdpa", "one argument of torch's function expresses the mask", why_table),
    Rule("flex", "its kernels skip the blocks that the mask hides", _short),
    Rule("sdpa", "a table of all pairs is small enough", _large_table),
    Rule("reference", "few pairs of NumPy arrays, for which torch need not be imported", _many_pairs),
    Rule("formula", "it has every option, on any device"),
)


@dataclass(frozen=True)
class Choice:
    """The result of :func:`lowtri.which_engine`: the engine that would run, the reason, and the answer of each engine.

    Attributes:
        engine: the name of the engine that would run.
        reason: why it was chosen.
        answers: for each engine, in the order of the rules, "yes: " and why it would be chosen, "only by name: " and why
            ``engine="auto"`` leaves the call to others, or "no: " and why it cannot run.
    """

    engine: str
    reason: str
    answers: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name:<10} {answer}" for name, answer in self.answers.items()]
        return "\n".join([f"{self.engine} runs: {self.reason}", *lines])

    def _repr_html_(self) -> str:
        """What notebooks show: a table of the answers."""
        sentence = f"<p>{html_text(f'{self.engine} runs: {self.reason}')}</p>"
        return output("engine", [sentence, html_table(("engine", "answer"), self.answers.items())], TABLE_STYLE)


@cache
def load(name: str) -> Backend:
    """The backend of that name; loaded late, since its dependencies are heavy."""
    return cast(Backend, importlib.import_module(f"lowtri.backends.{name}"))


def choose(call: Call, name: str, *, exclude: str | None = None) -> str:
    """The name of the backend that runs the call. ``name`` is a backend or "auto", which never chooses ``exclude``."""
    if name == "auto":
        rules = (rule for rule in RULES if rule.backend != exclude)
        for rule in rules:
            if rule.why_not(call) is None and _supports(rule.backend, call):
                return rule.backend
        raise ExtraError(missing("attention: this call", "torch"))  # whose formula has every option
    if name not in BACKENDS:
        raise EngineError(f"attention: there is no engine {name!r}. There are: auto, {', '.join(BACKENDS)}.")
    if _supports(name, call):
        return name
    listed = "\n".join(f"  {one:<10} {answer}" for one, answer in _answers(call).items())
    raise EngineError(
        f'attention: engine "{name}" cannot run this call, and it was requested by name.\n  {call}\n{listed}\n'
        f'Fix: drop engine="{name}", or change what it names.'
    )


def explain_choice(call: Call, name: str, excluded: str | None, by_name: bool) -> Choice:
    """The choice of ``name`` with its reason; ``excluded`` is the backend that the rules choose and the inputs rule out."""
    answers = _answers(call)
    reason = "requested by name" if by_name else answers[name].removeprefix("yes: ")
    if excluded is not None:
        reason = (
            f"{excluded} is excluded, since an input holds NaN, infinity or huge numbers, which it may spread or drop"
        )
    return Choice(name, reason, answers)


def _supports(name: str, call: Call) -> bool:
    return load(name).supports(call) is None


def _answers(call: Call) -> dict[str, str]:
    """The first rule of each backend that holds, or why none does."""
    answers: dict[str, str] = {}
    for rule in RULES:
        missing = load(rule.backend).supports(call)
        objection = rule.why_not(call)
        answer = f"no: {missing}" if missing else f"only by name: {objection}" if objection else f"yes: {rule.why}"
        if not answers.get(rule.backend, "").startswith("yes: "):
            answers[rule.backend] = answer
    return answers
