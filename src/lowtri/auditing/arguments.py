"""Checks of the caller's arguments: before anything runs, and against what did run."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from lowtri.auditing.adapter import module_behind
from lowtri.auditing.finding import Finding
from lowtri.auditing.probe import Probe
from lowtri.errors import CallError

__all__ = ["check_arguments", "chosen_probes", "require_requested", "nothing_ran"]


def check_arguments(model: Any, **given: Any) -> None:
    """Raise CallError for an argument that cannot be used, with its name."""
    _check_model(model)
    for name in ("output", "step", "alone"):
        value = given.get(name)
        if value is not None and not callable(value):
            raise CallError(f"audit: {name}= is a {type(value).__name__}, expected something to call, or None.")
    for name, least in (("draws", 1), ("exact", 0), ("seed", 0)):
        if name in given and not _is_whole(given[name], least):
            raise CallError(f"audit: {name}={given[name]!r}, expected a whole number of at least {least}.")
    length = given.get("length")
    if length is not None and not _is_whole(length, 0):
        raise CallError(f"audit: length={length!r}, expected a whole number, 0 for no longer example, or None.")
    redraw = given.get("redraw", False)
    if not isinstance(redraw, (bool, int, float)) or not 0 <= redraw < math.inf:
        raise CallError(f"audit: redraw={redraw!r}, expected True, False or a standard deviation above 0.")
    _check_pad_mask(model, given.get("pad_mask"))


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


def require_requested(
    findings: Sequence[Finding], probes: Sequence[Probe], options: Mapping[str, Any]
) -> tuple[list[Finding], list[str]]:
    """A probe that an argument requests and that did not run is undecided, never passed over.

    Returns:
        The findings, and a note for each argument whose probe was not among those to run.
    """
    by_name, notes = {finding.probe: finding for finding in findings}, []
    for probe in probes:
        value = options.get(probe.argument or "")
        if value is None or value is False:
            continue
        finding = by_name.get(probe.name)
        if finding is None:
            notes.append(f"{probe.argument}= was not used: probes= leaves {probe.name} out")
            continue
        reason = probe.not_run(finding, value)
        if reason is not None:
            message = f"{probe.argument}= was asked for and did not run: {reason}"
            by_name[probe.name] = dataclasses.replace(finding, status="undecided", message=message)
    return list(by_name.values()), notes


def nothing_ran(findings: Sequence[Finding]) -> str | None:
    """Why there is no verdict at all, where every probe was skipped."""
    if any(finding.status != "skipped" for finding in findings):
        return None
    return (
        "; ".join(f"{finding.probe} was asked for and did not run: {finding.message}" for finding in findings) or None
    )


def _check_model(model: Any) -> None:
    if isinstance(model, type):
        raise CallError(f"audit: model is the class {model.__name__}.\nFix: make one of it, {model.__name__}(...).")
    if not callable(model):
        came = f"the text {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise CallError(
            f"audit: model is {came}, expected a module or a function.\nFix: load or build the model first."
        )
    module = module_behind(model)
    held = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    empty = next((name for name, value in held if value.is_meta), None)
    if empty is not None:
        raise CallError(
            f"audit: {empty} of the model is on the device meta, which holds no numbers.\n"
            "Fix: load its weights, or make it with .to_empty(device='cpu') and initialise it."
        )


def _check_pad_mask(model: Any, name: Any) -> None:
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise CallError(f"audit: pad_mask={name!r}, expected the name of a keyword of the model's.")
    call = getattr(model, "forward", model)
    try:
        takes = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return
    if name not in takes and not any(taken.kind is taken.VAR_KEYWORD for taken in takes.values()):
        raise CallError(
            f"audit: pad_mask={name!r}, but the model takes ({', '.join(takes)}).\n"
            "Fix: name the one that marks real positions."
        )


def _is_whole(value: Any, least: int) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False
