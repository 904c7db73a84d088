"""Run the probes, repeat doubtful ones on the float64 copy, and locate the module where a leak enters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.options import Options
from lowtri.auditing.probe import Probe
from lowtri.errors import CallError

__all__ = ["chosen_probes", "nothing_ran", "require_requested", "run_probes"]


def chosen_probes(names: Sequence[str] | None, probes: Sequence[Probe]) -> list[Probe]:
    """The probes to run, in the order in which they run."""
    if isinstance(names, str):
        raise CallError(f"audit: probes={names!r} is one text, expected a list of names.\nFix: probes=[{names!r}].")
    if names is not None and not len(names):
        raise CallError("audit: probes=[] would look at nothing.\nFix: name a probe, or drop probes= to run them all.")
    known = [probe.name for probe in probes]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise CallError(f"audit: no probe is called {unknown[0]!r}; there are {', '.join(known)}.")
    return [probe for probe in probes if names is None or probe.name in names]


def run_probes(context: Context, probes: Sequence[Probe], *, first: bool = False) -> tuple[list[Finding], list[str]]:
    """Run the probes, with `first` up to the first leak; repeat those in doubt on the float64 copy.

    Returns:
        One finding for each probe, and notes on what the float64 copy decided.
    """
    findings: list[Finding] = []
    notes = []
    for probe in probes:
        enough = {earlier.name for earlier in probe.skipped_after}
        if any(finding.status == "leak" and finding.probe in enough for finding in findings):
            # A model that leaks does so under most other conditions, too: to try them costs as much again and adds nothing.
            findings.append(Finding("skipped", "not tried, since the model leaks without it", probe=probe.name))
            continue
        finding, note = _decided(context, probe, probe(context))
        findings.append(finding)
        notes += [f"{probe.name}: {note}"] if note else []
        if first and finding.status == "leak":
            break
    return findings, notes


def require_requested(
    findings: Sequence[Finding], probes: Sequence[Probe], options: Options
) -> tuple[list[Finding], list[str]]:
    """A probe that an argument requests and that did not run is undecided, never passed over.

    Returns:
        The findings, and a note for each argument whose probe was not among those to run.
    """
    by_name, notes = {finding.probe: finding for finding in findings}, []
    for probe in probes:
        value = getattr(options, probe.argument) if probe.argument else None
        if value is None or value is False:
            continue
        finding = by_name.get(probe.name)
        if finding is None:
            notes.append(f"{probe.argument}= was not used: probes= leaves {probe.name} out")
            continue
        reason = probe.not_run(finding, value)
        if reason is not None:
            message = f"{probe.argument}= was asked for and did not run: {reason}"
            by_name[probe.name] = replace(finding, status="undecided", message=message)
    return list(by_name.values()), notes


def nothing_ran(findings: Sequence[Finding]) -> str | None:
    """Why there is no verdict at all, where every probe was skipped."""
    if any(finding.status != "skipped" for finding in findings):
        return None
    return "; ".join(f"{f.probe} was asked for and did not run: {f.message}" for f in findings) or None


def _decided(context: Context, probe: Probe, finding: Finding) -> tuple[Finding, str]:
    """The finding, from the float64 copy where it is in doubt; and a note on what the copy decided."""
    if finding.status != "doubt" and not (finding.status == "leak" and probe.reshapes):
        return _with_module(context, probe, finding), ""
    copy64 = context.float64
    if isinstance(copy64, str):
        return _without_copy(context, probe, finding, copy64), ""
    second, size = probe(copy64), finding.greatest
    if second.status == "skipped":
        return _without_copy(context, probe, finding, second.message), ""
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
    return _with_module(copy64, probe, second), "confirmed in float64"


def _without_copy(context: Context, probe: Probe, finding: Finding, reason: str) -> Finding:
    """What can be said of a finding that no float64 copy decides, for the given reason."""
    if finding.status == "leak" and not (probe.reshapes and context.discrete_output):
        return _with_module(context, probe, finding)
    in_float64 = context.noise.eps <= np.finfo(np.float64).eps
    if finding.status == "doubt" and in_float64 and not context.discrete_output:
        message = f"nothing beyond the rounding of float64 ({finding.greatest:.2g})"
        return replace(finding, status="clean", message=message, leaks=())
    message = f"{finding.message}, near the noise, and no float64 copy could settle it ({reason})"
    return replace(finding, status="undecided", message=message, leaks=())


def _with_module(context: Context, probe: Probe, finding: Finding) -> Finding:
    """Name the module where each leak enters, from the probe's witness or from a change of the key."""
    if not finding.leaks or context.adapter.module is None or not (probe.pairs or finding.witness):
        return finding
    from lowtri.auditing.locate import locate

    first = finding.leaks[0]
    witnesses = [] if finding.witness is None else [finding.witness]
    if probe.pairs:
        changed = context.inputs.change(np.arange(context.n) == first.key, context.fresh(0))
        witnesses.insert(0, (context.inputs, changed, first.row))
    try:
        names = (locate(context.adapter, *witness, first.query) for witness in witnesses)
        name = next((name for name in names if name is not None), None)
    except Exception:
        name = None
    return replace(finding, leaks=tuple(replace(leak, module=name) for leak in finding.leaks))
