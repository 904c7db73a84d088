"""The same probes under other conditions: in training mode, behind a keyword, on a longer example.

Every condition has its own noise, and its doubts go to its own float64 copy: it is audited as closely as the example is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowtri.auditing.adapter import Rows
from lowtri.auditing.context import Context
from lowtri.auditing.declared import has_token
from lowtri.auditing.finding import Finding, Leak, by, first_line
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import magnitude, measure_noise, movement
from lowtri.auditing.probe import Probe
from lowtri.auditing.running import run_probes
from lowtri.compat.transformers_private import attention_name

__all__ = ["Condition", "Outcome", "probe_under"]


@dataclass(frozen=True)
class Condition:
    """What is set before the probes run, and put back after them."""

    name: str
    under: str  # the same in a sentence: "in training mode"
    probes: tuple[Probe, ...]
    context: Context
    options: dict[str, Any] = field(default_factory=dict)  # keywords of the call
    attention: str | None = None
    compared: bool = False  # whether the answer has to be the one without the condition

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Training flags as the context's adapter has them, and the attention implementation."""
        module = self.context.adapter.module
        flags = [] if module is None else [(part, part.training) for part in module.modules()]
        before = attention_name(module)
        try:
            if self.context.adapter.training and module is not None:
                module.train()
            if self.attention:
                module.set_attn_implementation(self.attention)
                if attention_name(module) != self.attention:
                    raise LookupError("the model kept the attention it had")
            yield
        finally:
            if self.attention:
                module.set_attn_implementation(before)
            for part, flag in flags:
                part.training = flag


@dataclass
class Outcome:
    """The results of the probes under each condition."""

    leaks: list[Leak] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    tried: dict[str, list[str]] = field(default_factory=dict)  # condition: the probes that ran
    refused: dict[str, str] = field(default_factory=dict)  # condition: why it could not be tried
    differ: dict[str, float] = field(default_factory=dict)  # condition: how far its answer is from the one without it

    def finding(self, clean: str, measured: dict[str, Any], nothing: str) -> Finding:
        """All of it as one finding; `clean` and `nothing` are its message where no leak was found and where nothing ran."""
        measured = {"tried": self.tried, "refused": self.refused, "differ": self.differ, **measured}
        if self.leaks:
            return Finding("leak", f"the mask is broken: {self.leaks[0].what}", tuple(self.leaks), measured)
        if self.undecided:
            return Finding("undecided", self.undecided[0], (), measured)
        if self.differ:
            text = "; ".join(f"{name}, {by(size, '')}" for name, size in self.differ.items())
            return Finding("warning", f"another answer with {text}", (), measured)
        if not self.tried:
            return Finding("skipped", next(iter(self.refused.values()), nothing), (), measured)
        without = "".join(f"; not tried: {name} ({why})" for name, why in self.refused.items())
        return Finding("clean", clean + without, (), measured)


def probe_under(conditions: Iterable[Condition], *, first: bool = False) -> Outcome:
    """Run each condition's probes; one that fails, or under which the model does not repeat itself, is refused.

    With `first`, nothing is run after the first leak.
    """
    outcome = Outcome()
    for condition in conditions:
        try:
            without = condition.context.base if condition.compared else None  # before anything is set
            with condition.set():
                context = _measured(condition)
                if context.noise.broken is not None:
                    outcome.refused[condition.name] = context.noise.broken
                    continue
                size = 0.0 if without is None else _difference(condition.context, without, context)
                findings, _ = run_probes(context, condition.probes, first=first)
        except Exception as error:
            outcome.refused[condition.name] = first_line(error)
            continue
        if size:
            outcome.differ[condition.name] = size
        outcome.tried[condition.name] = [f.probe for f in findings if f.status not in ("skipped", "undecided")]
        for finding in findings:
            outcome.leaks += [replace(leak, under=condition.under, found_by=leak.probe) for leak in finding.leaks]
            if finding.status == "undecided":
                outcome.undecided.append(f"{condition.under}, {finding.probe}: {finding.message}")
        if first and outcome.leaks:
            break
    return outcome


def _measured(condition: Condition) -> Context:
    """The context with the condition's keywords and noise, and with nothing seen yet."""
    before = condition.context
    inputs: Inputs = replace(before.inputs, options={**before.inputs.options, **condition.options})
    noise = measure_noise(before.adapter, inputs, ~has_token(before.allowed))
    return replace(before, inputs=inputs, noise=noise, by_pair=False, seen=np.zeros((0, 0)), _base=None)


def _difference(before: Context, without: Rows, context: Context) -> float:
    """How far the answer is from the one without the condition, where that is more than rounding."""
    if context.base.shape != without.shape:
        return 0.0
    sizes = np.nan_to_num(movement(without, context.base), nan=np.inf)
    sizes[np.broadcast_to(before.ignored, sizes.shape)] = 0.0
    size = float(sizes.max())
    return size if before.noise.classify(size, magnitude(without, context.base), doubtful=False) == "leak" else 0.0
