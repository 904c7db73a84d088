"""Run the probes; let the float64 copy decide what is in doubt; name the module where a leak enters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.noise import movement
from lowtri.auditing.probe import Probe

__all__ = ["run_probes"]


def run_probes(context: Context, probes: Sequence[Probe], *, first: bool = False) -> tuple[list[Finding], list[str]]:
    """Run the probes, with `first` up to the first leak; repeat those in doubt on the float64 copy.

    Returns:
        One finding for each probe, and notes on what the float64 copy decided.
    """
    findings: list[Finding] = []
    notes = []
    copy64 = _Float64Copy(context)
    for probe in probes:
        enough = {earlier.name for earlier in probe.skipped_after}
        if any(finding.status == "leak" and finding.probe in enough for finding in findings):
            # A model that leaks does so under most other conditions, too: to try them costs as much again and adds nothing.
            findings.append(Finding("skipped", "not tried, since the model leaks without it", probe=probe.name))
            continue
        finding, used = probe(context), context
        if finding.status == "doubt" or (finding.status == "leak" and probe.reshapes):
            finding, used, note = copy64.decide(probe, finding)
            if note:
                notes.append(note)
        findings.append(_with_module(used, probe, finding))
        if first and finding.status == "leak":
            break
    return findings, notes


class _Float64Copy:
    """The float64 copy, made when the first finding needs it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.copy: Context | None = None
        self.why_not: str | None = None

    def decide(self, probe: Probe, finding: Finding) -> tuple[Finding, Context, str]:
        """The probe's finding in float64, or the best that is known without it."""
        copy_ = self._made()
        if copy_ is None:
            return self._without(probe, finding)
        second = probe(copy_)
        size = finding.measured.get("greatest", 0.0)
        if second.status == "skipped":
            return self._without(probe, finding, second.message)
        if second.status != "leak" and math.isinf(size):
            reason = f"{finding.message}, in the model's precision and not in float64"
            return dataclasses.replace(finding, status="undecided", message=reason, leaks=()), self.context, ""
        if second.status == "clean":
            return (
                second,
                self.context,
                f"{probe.name}: up to {size:.2g} in the model's precision vanishes in float64: rounding",
            )
        if second.status in ("doubt", "undecided"):
            left = second.measured.get("greatest", 0.0)
            # In float64 rounding is some 1e-15; what shrank with the precision is noise that the copy still rounds.
            if left < size / 30:
                text = f"nothing beyond rounding ({size:.2g} in the model's precision, {left:.2g} in float64)"
                return dataclasses.replace(second, status="clean", message=text, leaks=()), self.context, ""
            return dataclasses.replace(second, status="undecided", leaks=()), copy_, ""
        return second, copy_, f"{probe.name}: confirmed in float64"

    def _without(self, probe: Probe, finding: Finding, why: str | None = None) -> tuple[Finding, Context, str]:
        if finding.status == "leak" and not (probe.reshapes and self.context.discrete_output):
            return finding, self.context, ""
        if (
            finding.status == "doubt"
            and self.context.noise.eps <= np.finfo(np.float64).eps
            and not self.context.discrete_output
        ):
            size = finding.measured.get("greatest", 0.0)
            text = f"nothing beyond the rounding of float64 ({size:.2g})"
            return dataclasses.replace(finding, status="clean", message=text, leaks=()), self.context, ""
        reason = f"{finding.message}, near the noise, and no float64 copy could settle it ({why or self.why_not})"
        return dataclasses.replace(finding, status="undecided", message=reason, leaks=()), self.context, ""

    def _made(self) -> Context | None:
        if self.copy is not None or self.why_not is not None:
            return self.copy
        context = self.context
        if context.adapter.signature.dtypes[0] in (np.dtype(np.float64),):
            self.why_not = "it is float64 already"
            return None
        try:
            made = context.in_float64()
            apart, scale = float(np.nanmax(movement(context.base, made.base))), max(context.noise.magnitude, 1e-30)
        except Exception as error:
            self.why_not = (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
            return None
        if made.base.dtype.kind != "f" or made.noise.broken:
            self.why_not = made.noise.broken or "its output is not made of floats"
        elif apart > 0.05 * scale and not context.noise.random:  # the copy may draw other numbers
            self.why_not = f"the copy answers differently, by {apart:.2g}"
        else:
            self.copy = made
        return self.copy


def _with_module(context: Context, probe: Probe, finding: Finding) -> Finding:
    """Name the module where each leak enters, from the probe's witness or from a change of the key."""
    if not finding.leaks or context.adapter.module is None or not (probe.pairs or finding.witness):
        return finding
    from lowtri.auditing.locate import locate

    first = finding.leaks[0]
    before, after, row = finding.witness or (context.inputs, None, first.row)
    if after is None or probe.pairs:
        after = context.inputs.change(np.arange(context.n) == first.key, context.fresh(0))
        row = first.row
    try:
        name = locate(context.adapter, before, after, row, first.query)
        if name is None and finding.witness is not None:
            name = locate(context.adapter, finding.witness[0], finding.witness[1], finding.witness[2], first.query)
    except Exception:
        name = None
    if name is None:
        return finding
    return dataclasses.replace(finding, leaks=tuple(leak.at(name) for leak in finding.leaks))
