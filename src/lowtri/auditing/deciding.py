"""Run the probes; let the float64 copy decide what is in doubt; name the module where a leak enters."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.noise import movement
from lowtri.auditing.probes import PROBES, REPEATED, RESHAPED

__all__ = ["run_probes"]


def run_probes(context: Context, chosen: list[str], *, first: bool = False) -> tuple[list[Finding], list[str]]:
    """Every probe, or those up to the first leak; those in doubt again on the float64 copy."""
    findings: list[Finding] = []
    notes = []
    twin = _Twin(context)
    for name in chosen:
        if name in REPEATED and any(f.status == "leak" and f.probe in REPEATED[name] for f in findings):
            # What leaks already leaks under most other conditions too, which would cost as much again and say nothing new.
            findings.append(Finding(name, "skipped", "not tried, since the model leaks without it"))
            continue
        finding = PROBES[name](context)
        asked = context
        if finding.status == "doubt" or (finding.status == "leak" and name in RESHAPED):
            finding, asked, note = twin.decide(name, finding)
            if note:
                notes.append(note)
        findings.append(_with_module(asked, finding))
        if first and finding.status == "leak":
            break
    return findings, notes


class _Twin:
    """The float64 copy, made when the first finding needs it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.copy: Context | None = None
        self.why_not: str | None = None

    def decide(self, name: str, finding: Finding) -> tuple[Finding, Context, str]:
        """The probe's answer in float64, or an honest one without it."""
        copy_ = self._made()
        if copy_ is None:
            return self._without(name, finding)
        if name == "cache" and _steps_alike(self.context, copy_):
            return self._without(name, finding, "step= keeps its own precision")
        second = PROBES[name](copy_)
        size = finding.measured.get("greatest", 0.0)
        if second.status == "skipped":
            self.why_not = self.why_not or second.message
            return self._without(name, finding)
        if second.status != "leak" and math.isinf(size):
            reason = f"{finding.message}, in the model's precision and not in float64"
            return dataclasses.replace(finding, status="undecided", message=reason, leaks=()), self.context, ""
        if second.status == "clean":
            return (
                second,
                self.context,
                f"{name}: up to {size:.2g} in the model's precision vanishes in float64: rounding",
            )
        if second.status in ("doubt", "undecided"):
            left = second.measured.get("greatest", 0.0)
            # In float64 rounding is some 1e-15; what shrank with the precision is noise that the copy still rounds.
            if left < size / 30:
                text = f"nothing beyond rounding ({size:.2g} in the model's precision, {left:.2g} in float64)"
                return dataclasses.replace(second, status="clean", message=text, leaks=()), self.context, ""
            return dataclasses.replace(second, status="undecided", leaks=()), copy_, ""
        return second, copy_, f"{name}: confirmed in float64"

    def _without(self, name: str, finding: Finding, why: str | None = None) -> tuple[Finding, Context, str]:
        if finding.status == "leak" and not (name in RESHAPED and self.context.discrete_output):
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
        if context.subject.form.dtypes[0] in (np.dtype(np.float64),):
            self.why_not = "it is float64 already"
            return None
        try:
            made = context.twin()
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


def _steps_alike(context: Context, twin: Context) -> bool:
    """Whether the copy is decoded by the very same function, which computes as precisely as before."""
    step = context.options.get("step")
    return step is not None and twin.options.get("step") is step and context.subject.module is not None


def _with_module(context: Context, finding: Finding) -> Finding:
    """Name the module where each leak enters, from the probe's witness or from a change of the key."""
    if not finding.leaks or context.subject.module is None or finding.probe not in ("change", "gradient", "prefix"):
        return finding
    from lowtri.auditing.where import locate

    first = finding.leaks[0]
    before, after, row = finding.witness or (context.inputs, None, first.row)
    if after is None or finding.probe == "change":
        after = context.inputs.change(np.arange(context.n) == first.key, context.fresh(0))
        row = first.row
    try:
        name = locate(context.subject, before, after, row, first.query)
        if name is None and finding.witness is not None:
            name = locate(context.subject, finding.witness[0], finding.witness[1], finding.witness[2], first.query)
    except Exception:
        name = None
    if name is None:
        return finding
    return dataclasses.replace(finding, leaks=tuple(leak.at(name) for leak in finding.leaks))
