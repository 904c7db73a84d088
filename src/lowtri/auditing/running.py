"""Runs trials: repeats what is in doubt in float64, names modules, and runs the same trials under other conditions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, by
from lowtri.auditing.inputs import first_line
from lowtri.auditing.options import Options
from lowtri.auditing.trial import Trial, examine, watch
from lowtri.errors import CallError, LowtriError

__all__ = ["Outcome", "chosen_trials", "nothing_ran", "require_requested", "run_trials", "run_under", "try_example"]


def try_example(context: Context) -> None:
    """Measure the example's own rows and noise, or raise CallError with what the model raised."""
    try:
        context.noise  # noqa: B018 (measured where it is first read)
    except LowtriError:
        raise
    except Exception as error:
        raise CallError(
            f"audit: the model raised {first_line(error)}, on the example itself.\n"
            "Fix: an example that the model takes: ids within its table, the dtype it needs, all of its inputs."
        ) from error


def chosen_trials(names: Sequence[str] | None, trials: Sequence[Trial]) -> list[Trial]:
    """The trials to run, in the order in which they run."""
    if isinstance(names, str):
        raise CallError(f"audit: probes={names!r} is one text, expected a list of names.\nFix: probes=[{names!r}].")
    if names is not None and not len(names):
        raise CallError("audit: probes=[] would look at nothing.\nFix: name a probe, or drop probes= to run them all.")
    known = [trial.name for trial in trials]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise CallError(f"audit: no probe is called {unknown[0]!r}; there are {', '.join(known)}.")
    return [trial for trial in trials if names is None or trial.name in names]


def run_trials(context: Context, trials: Sequence[Trial], *, first: bool = False) -> tuple[list[Finding], list[str]]:
    """Run the trials, with `first` up to the first leak; repeat those in doubt on the float64 copy.

    Returns:
        One finding for each trial, and notes on what the float64 copy decided.
    """
    findings: list[Finding] = []
    notes = []
    for trial in trials:
        if any(finding.status == "leak" and finding.probe in trial.skipped_after for finding in findings):
            # A model that leaks does so under most other conditions, too: to try them costs as much again and adds nothing.
            findings.append(Finding("skipped", "not tried, since the model leaks without it", probe=trial.name))
            continue
        finding, note = _decided(context, trial)
        findings.append(finding)
        notes += [f"{trial.name}: {note}"] if note else []
        if first and finding.status == "leak":
            break
    return findings, notes


@dataclass
class Outcome:
    """The results of the same trials under several conditions."""

    findings: list[Finding] = field(default_factory=list)  # of every condition and trial
    tried: dict[str, list[str]] = field(default_factory=dict)  # condition: the trials that ran
    refused: dict[str, str] = field(default_factory=dict)  # condition: why it could not be tried
    differ: dict[str, float] = field(default_factory=dict)  # condition: how far its answer is from the one without it

    @property
    def leaks(self) -> tuple[Leak, ...]:
        return tuple(leak for finding in self.findings for leak in finding.leaks)

    def finding(self, clean: str, measured: dict[str, Any], nothing: str = "") -> Finding:
        """All of it as one finding; `clean` and `nothing` are its message where no leak was found and where nothing ran."""
        measured = {"tried": self.tried, "refused": self.refused, "differ": self.differ, **measured}
        undecided = [finding for finding in self.findings if finding.status == "undecided"]
        if self.leaks:
            message = f"the mask is broken: {self.leaks[0].what}"
            return Finding("leak", message, self.leaks, measured, parts=tuple(self.findings))
        if undecided:
            first = undecided[0]
            message = f"{first.condition}, {first.probe}: {first.message}"
            return Finding("undecided", message, (), measured, parts=tuple(self.findings))
        if self.differ:
            text = "; ".join(f"{name}, {by(size, '')}" for name, size in self.differ.items())
            return Finding("warning", f"another answer with {text}", (), measured, parts=tuple(self.findings))
        if not self.tried:
            return Finding("skipped", next(iter(self.refused.values()), nothing), (), measured)
        without = "".join(f"; not tried: {name} ({why})" for name, why in self.refused.items())
        return Finding("clean", clean + without, (), measured, parts=tuple(self.findings))


def run_under(
    contexts: Iterable[Context], trials: Sequence[Trial], *, without: Context | None = None, first: bool = False
) -> Outcome:
    """Run the trials under each context's condition; one that fails, or does not repeat itself, is refused.

    Args:
        without: the context without the conditions, where the answers have to be equal.
        first: whether to run nothing after the first leak.
    """
    outcome = Outcome()
    if without is not None:
        without.base  # noqa: B018 (measured before anything is set)
    for context in contexts:
        name = context.condition.name
        try:
            with context.set():
                if context.noise.broken is not None:
                    outcome.refused[name] = context.noise.broken
                    continue
                size = 0.0 if without is None else _difference(without, context)
                # The backward pass of a compiled model would be compiled as well, which takes minutes.
                findings, _ = run_trials(context, trials[:1] if context.condition.compiled else trials, first=first)
        except Exception as error:
            outcome.refused[name] = first_line(error)
            continue
        if size:
            outcome.differ[name] = size
        outcome.tried[name] = [f.probe for f in findings if f.status not in ("skipped", "undecided")]
        outcome.findings += findings
        if first and outcome.leaks:
            break
    return outcome


def _difference(without: Context, context: Context) -> float:
    """How far the answer is from the one without the condition, where that is more than rounding."""
    if context.base.shape != without.base.shape:
        return 0.0
    difference = without.compare(context.base, ~without.ignored)
    return difference.greatest if difference.status == "leak" else 0.0


def require_requested(
    findings: Sequence[Finding], trials: Sequence[Trial], options: Options
) -> tuple[list[Finding], list[str]]:
    """A trial that an argument requests and that did not run is undecided, never passed over.

    Returns:
        The findings, and a note for each argument whose trial was not among those to run.
    """
    by_name, notes = {finding.probe: finding for finding in findings}, []
    for trial in trials:
        value = getattr(options, trial.argument) if trial.argument else None
        if value is None or value is False:
            continue
        finding = by_name.get(trial.name)
        if finding is None:
            notes.append(f"{trial.argument}= was not used: probes= leaves {trial.name} out")
            continue
        reason = trial.not_run(finding, value)
        if reason is not None:
            message = f"{trial.argument}= was asked for and did not run: {reason}"
            by_name[trial.name] = replace(finding, status="undecided", message=message)
    return list(by_name.values()), notes


def nothing_ran(findings: Sequence[Finding]) -> str | None:
    """Why there is no verdict at all, where every trial was skipped."""
    if any(finding.status != "skipped" for finding in findings):
        return None
    return "; ".join(f"{f.probe} was asked for and did not run: {f.message}" for f in findings) or None


def _decided(context: Context, trial: Trial) -> tuple[Finding, str]:
    """The trial's finding, from the float64 copy where it is in doubt; and a note on what the copy decided."""
    finding = examine(context, trial)
    if finding.status != "doubt" and not (finding.status == "leak" and trial.reshapes):
        return _with_module(context, trial, finding), ""
    copy64 = context.float64
    if isinstance(copy64, str):
        return _without_copy(context, trial, finding, copy64), ""
    second, size = examine(copy64, trial), finding.greatest
    if second.status == "skipped":
        return _without_copy(context, trial, finding, second.message), ""
    if second.status != "leak" and math.isinf(size):
        reason = f"{finding.message}, in the model's precision and not in float64"
        return replace(finding, status="undecided", message=reason, leaks=()), ""
    if second.status == "clean":
        return second, f"up to {size:.2g} in the model's precision vanishes in float64: rounding"
    if second.status in ("doubt", "undecided"):
        # In float64 rounding is some 1e-15; what shrank with the precision is noise that the copy still rounds.
        if second.greatest < size / 30:
            sizes = f"{size:.2g} in the model's precision, {second.greatest:.2g} in float64"
            return replace(second, status="clean", message=f"nothing beyond rounding ({sizes})", leaks=()), ""
        return replace(second, status="undecided", leaks=()), ""
    return _with_module(copy64, trial, second), "confirmed in float64"


def _without_copy(context: Context, trial: Trial, finding: Finding, reason: str) -> Finding:
    """What can be said of a finding that no float64 copy decides, for the given reason."""
    if finding.status == "leak" and not (trial.reshapes and context.discrete_output):
        return _with_module(context, trial, finding)
    in_float64 = context.noise.eps <= np.finfo(np.float64).eps
    if finding.status == "doubt" and in_float64 and not context.discrete_output:
        message = f"nothing beyond the rounding of float64 ({finding.greatest:.2g})"
        return replace(finding, status="clean", message=message, leaks=())
    message = f"{finding.message}, near the noise, and no float64 copy could settle it ({reason})"
    return replace(finding, status="undecided", message=message, leaks=())


def _with_module(context: Context, trial: Trial, finding: Finding) -> Finding:
    """Name the module where each leak enters, from two runs that part there."""
    if not finding.leaks or context.system.module is None:
        return finding
    from lowtri.auditing.torch_hooks import locate

    first, pairs = finding.leaks[0], [] if finding.watch is None else [finding.watch]
    if trial.pairs:
        # The key that is furthest away: no strided part has both in one stride.
        key = max((k.key for k in finding.leaks if k.query == first.query), key=lambda key: abs(key - first.query))
        changed = context.inputs.change(np.arange(context.n) == key, context.fresh(0))
        pairs.insert(0, tuple(watch(context, i, first.row, first.query) for i in (context.inputs, changed)))
    try:
        names = (locate(pair[0], pair[1], context.system.signature.position_axes[0]) for pair in pairs)
        name = next((name for name in names if name is not None), None)
    except Exception:
        name = None
    return replace(finding, leaks=tuple(replace(leak, module=leak.module or name) for leak in finding.leaks))
