"""Runs the same probes under other conditions: in training mode, with a keyword, on a longer example.

The noise of each condition is measured, and its doubts are repeated on a float64 copy in that condition, so every condition is
audited with the same sensitivity as the example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowtri.auditing.adapter import in_mode
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, by, first_line
from lowtri.auditing.probe import Probe
from lowtri.auditing.running import run_probes
from lowtri.compat.transformers_private import attention_name

__all__ = ["Condition", "Outcome", "mode_set", "probe_under"]


@dataclass(frozen=True)
class Condition:
    """What is set before the probes run, and restored after them."""

    name: str
    under: str  # the same in a sentence: "in training mode"
    probes: tuple[Probe, ...]
    context: Context
    attention: str | None = None  # the implementation that is set
    without: Context | None = None  # the context without the condition, where the answers have to be equal

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        module = self.context.adapter.module
        before = attention_name(module)
        with mode_set(self.context):
            try:
                if self.attention:
                    module.set_attn_implementation(self.attention)
                    if attention_name(module) != self.attention:
                        raise LookupError("the model kept its attention implementation")
                yield
            finally:
                if self.attention:
                    module.set_attn_implementation(before)


def mode_set(context: Context) -> contextlib.AbstractContextManager[None]:
    """Training mode where the context's adapter has it, else the mode that is set."""
    return in_mode(context.adapter.module, True if context.adapter.training else None)


@dataclass
class Outcome:
    """The results of the probes under each condition."""

    leaks: list[Leak] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    tried: dict[str, list[str]] = field(default_factory=dict)  # condition: the probes that ran
    refused: dict[str, str] = field(default_factory=dict)  # condition: why it could not be tried
    differ: dict[str, float] = field(default_factory=dict)  # condition: how far its answer is from the one without it

    def finding(self, clean: str, measured: dict[str, Any], nothing: str = "") -> Finding:
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
            if condition.without is not None:
                condition.without.base  # noqa: B018 (measured before anything is set)
            with condition.set():
                context = replace(condition.context, by_pair=False)
                if context.noise.broken is not None:
                    outcome.refused[condition.name] = context.noise.broken
                    continue
                size = 0.0 if condition.without is None else _difference(condition.without, context)
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


def _difference(without: Context, context: Context) -> float:
    """How far the answer is from the one without the condition, where that is more than rounding."""
    if context.base.shape != without.base.shape:
        return 0.0
    difference = without.difference(without.base, context.base, where=~np.asarray(without.ignored))
    return difference.greatest if difference.status == "leak" else 0.0
