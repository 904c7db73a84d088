"""The choice of the backend: the first rule of a list that holds. A backend requested by name runs or raises."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast

from lowtri.backends import BACKENDS, Backend
from lowtri.drawing import with_drawings
from lowtri.errors import EngineError, ExtraError
from lowtri.extras import is_installed, missing
from lowtri.masks.tile import short_repr
from lowtri.ops.call import Call


class Rule(NamedTuple):
    """A backend, why ``engine="auto"`` chooses it, and the calls that are left to later rules, with the reason."""

    backend: str
    why: str
    why_not: Callable[[Call], str | None] = lambda call: None  # of a call that the backend supports


_DEFINITION_PAIRS = 2**19  # the definition computes several arrays of all pairs, each then of 4 MB
_TABLE_PAIRS = 2**24  # of a table of bools: 16 MB; the formula computes in tiles instead
_FLEX_PAIRS = 2**24  # over all heads: a short call does not wait seconds for the compiler
_BLOCK = 128  # queries that a GPU kernel computes together


def _many_pairs(call: Call) -> str | None:
    if not call.is_numpy:
        return "the definition, in float64"
    # Without torch nothing but the definition can run.
    many = _pairs(call) > _DEFINITION_PAIRS and is_installed("torch")
    return "the definition would compute many pairs" if many else None


def _not_for_sdpa(call: Call) -> str | None:
    """Why torch's function is left to calls by name: its inputs cannot be inspected for NaN, infinity and huge numbers, or its dropout
    draws numbers of its own where other backends draw the same; or None."""
    if call.transformation:
        return f"{call.transformation}, where its inputs cannot be inspected"
    return "its dropout draws other numbers" if call.dropout and call.device == "cpu" else None


def _needs_table(call: Call) -> str | None:
    from lowtri.backends.sdpa import needs_table

    return _not_for_sdpa(call) or ("its mask has to be passed as a table of all pairs" if needs_table(call) else None)


def _large_table(call: Call) -> str | None:
    _, _, _, nq, nk, *_ = call.sizes
    tables = math.prod(call.mask.batch) * max(len(call.q_positions), len(call.k_positions))
    large = nq * nk * tables > _TABLE_PAIRS
    return _not_for_sdpa(call) or ("its table of all pairs would be large" if large else None)


def _short(call: Call) -> str | None:
    if call.q.shape[2] < _BLOCK:
        return f"there are fewer than {_BLOCK} queries"
    return "a short call does not wait for its compiler" if _pairs(call) < _FLEX_PAIRS else None


def _pairs(call: Call) -> int:
    return math.prod(call.q.shape[:3]) * call.k.shape[2]


# A rule holds if its backend supports the call and ``why_not`` has no objection. Facts of the call alone decide, never a time that
# was measured on some machine, so equal calls run on the same backend everywhere.
RULES = (
    Rule("cpu", "its kernels compute only what the mask shows"),
    Rule("sdpa", "one argument of torch's function expresses the mask", _needs_table),
    Rule("flex", "its kernels skip the blocks that the mask hides", _short),
    Rule("sdpa", "a table of all pairs is small enough", _large_table),
    Rule("reference", "few pairs of NumPy arrays, for which torch need not be imported", _many_pairs),
    Rule("formula", "it has every option, on any device"),
)


@with_drawings
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

    if TYPE_CHECKING:

        def _repr_html_(self) -> str:
            """What notebooks show: a table of the answers."""


@cache
def load(name: str) -> Backend:
    """The backend of that name; loaded late, since its dependencies are heavy."""
    return cast(Backend, importlib.import_module(f"lowtri.backends.{name}"))


def choose(call: Call, name: str, *, exclude: str | None = None) -> str:
    """The name of the backend that runs the call. ``name`` is a backend or "auto", which never chooses ``exclude``."""
    if not isinstance(name, str):
        raise EngineError(f"attention: engine is {short_repr(name)}; expected a name: auto, {', '.join(BACKENDS)}.")
    if name == "auto":
        if call.device == "cpu":
            _warn_without_kernels()
        for rule in RULES:
            if rule.backend != exclude and _why_not(rule.backend, call) is None and rule.why_not(call) is None:
                return rule.backend
        raise ExtraError(missing("attention: this call", "torch"))  # whose formula has every option
    if name not in BACKENDS:
        raise EngineError(f"attention: there is no engine {name!r}. There are: auto, {', '.join(BACKENDS)}.")
    if _why_not(name, call) is None:
        return name
    listed = "\n".join(f"  {one:<10} {answer}" for one, answer in _answers(call).items())
    raise EngineError(
        f'attention: engine "{name}" cannot run this call, and it was requested by name.\n  {call}\n{listed}\n'
        f'Fix: drop engine="{name}", or change what it names.'
    )


@cache
def _warn_without_kernels() -> None:
    """Tell once in a process that calls run without the kernels, which is otherwise seen in their time alone."""
    from lowtri.kernels.library import without_kernels

    if sentence := without_kernels():
        warnings.warn(f"lowtri: {sentence}", stacklevel=2)


def explain_choice(call: Call, name: str, excluded: str | None, engine_was_named: bool) -> Choice:
    """The choice of ``name`` with its reason; ``excluded`` is the backend that the rules choose and the inputs rule out."""
    answers = _answers(call)
    reason = "requested by name" if engine_was_named else answers[name].removeprefix("yes: ")
    if excluded is not None:
        reason = (
            f"{excluded} is excluded, since an input holds NaN, infinity or huge numbers, which it may spread or drop"
        )
    return Choice(name, reason, answers)


def _why_not(name: str, call: Call) -> str | None:
    """Why the backend cannot run the call, or None. Backends that import torch are not loaded for calls that do not need them."""
    if name in ("sdpa", "flex") and call.is_numpy:
        return "the arrays are NumPy's"
    if name == "formula":
        return None if is_installed("torch") else "it computes with torch, which is not installed"
    return load(name).supports(call)


def _answers(call: Call) -> dict[str, str]:
    """The first rule of each backend that holds, or why none does."""
    answers: dict[str, str] = {}
    for rule in RULES:
        answer = f"yes: {rule.why}"
        if missing := _why_not(rule.backend, call):
            answer = f"no: {missing}"
        elif objection := rule.why_not(call):
            answer = f"only by name: {objection}"
        if not answers.get(rule.backend, "").startswith("yes: "):
            answers[rule.backend] = answer
    return answers
