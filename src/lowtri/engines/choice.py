"""Which engine runs a call: each is asked why it cannot, and one that is asked for by name runs or raises."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from lowtri.engines.worth import torch_is_faster, worth_a_kernel
from lowtri.errors import EngineError
from lowtri.masks.atoms import causal, full
from lowtri.ops.call import Call, Result

__all__ = ["ENGINES", "Choice", "Engine", "answers", "choose", "load", "weigh"]

ENGINES = ("cpu", "sdpa", "formula", "reference")
_TABLE_LIMIT = 2**24  # pairs: above it a written-out table costs more than the formula's tiles
_SMALL = 2**18  # pairs over all heads: below it NumPy answers before torch is loaded


class Engine(Protocol):
    name: str

    def why_not(self, call: Call) -> str | None: ...
    def run(self, call: Call) -> Result: ...


@dataclass(frozen=True)
class Choice:
    """What :func:`which_engine` found: the engine that would run, why, and what every other said."""

    engine: str
    answers: dict[str, str]
    weighed: str = "asked for by name"

    def __str__(self) -> str:
        listed = "\n".join(f"{name:<10} {answer}" for name, answer in self.answers.items())
        return f"runs       {self.engine}: {self.weighed}\n{listed}"


@cache
def load(name: str) -> Engine:
    """The engine of that name; loaded late, since what it needs is."""
    return importlib.import_module(f"lowtri.engines.{name}")


def choose(call: Call, name: str) -> str:
    """The name of the engine that runs the call, where ``name`` is one or "auto"."""
    return weigh(call, name)[0]


def weigh(call: Call, name: str) -> tuple[str, str]:
    """The engine that runs the call, and in a few words why."""
    if name == "auto":
        return _automatic(call)
    if name not in ENGINES:
        raise EngineError(f"attention: there is no engine {name!r}. There are: auto, {', '.join(ENGINES)}.")
    if load(name).why_not(call) is None:
        return name, "asked for by name"
    listed = "\n".join(f"  {one:<10} {answer}" for one, answer in answers(call).items())
    raise EngineError(
        f'attention: engine "{name}" cannot run this call, and it was asked for by name.\n  {call}\n{listed}\n'
        f'Fix: drop engine="{name}", or change what it names.'
    )


def _automatic(call: Call) -> tuple[str, str]:
    """A kernel where the call is worth it, unless torch is known to be faster; then torch's function if it keeps to the mask."""
    against = load("cpu").why_not(call) if worth_a_kernel(call) else "the call is too small for a kernel"
    faster = torch_is_faster(call) if against is None and not call.is_numpy else None
    if against is None and faster is None:
        return "cpu", "the call is worth a kernel"
    rows, heads, nq, _ = call.q.shape
    pairs = nq * call.k.shape[2]
    if call.is_numpy:
        small = pairs * rows * heads <= _SMALL and load("reference").why_not(call) is None
        return "reference" if small else "formula", f"{against}"
    sdpa: Any = load("sdpa")
    written = math.prod(call.mask.batch) * max(len(call.q_positions), len(call.k_positions))  # tables, at most
    fits = pairs * written <= _TABLE_LIMIT or call.mask in (causal(), full())
    not_sdpa = sdpa.why_not(call) or (None if fits else "its table of bools would be too large") or sdpa.spreads(call)
    if not_sdpa is None:
        return "sdpa", f"{against or faster}; its inputs are finite, so torch's function keeps to the mask"
    return "cpu" if against is None else "formula", f"{against or faster}; not sdpa: {not_sdpa}"


def answers(call: Call) -> dict[str, str]:
    """What every engine says to the call: yes, or why not."""
    reasons = {name: load(name).why_not(call) for name in ENGINES}
    return {name: "yes" if reason is None else f"no: {reason}" for name, reason in reasons.items()}
