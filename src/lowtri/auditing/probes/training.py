"""Training mode, in which the loss is computed: another code path in most models, and the one that matters most."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.conditions import Condition, probe_under
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.subject import Rows

__all__ = ["in_training", "same_in_training", "training"]

_PROBES = ("change", "gradient", "prefix", "batch", "padding", "packing")
_SAME = "its answers to 4 inputs are eval mode's to the last bit, in float64 too"


def training(context: Context) -> Finding:
    """Every probe that does not decode, in training mode, as sensitive as in eval mode."""
    if not context.mode:
        return Finding("training", "skipped", "the model has no training mode")
    if context.mode == "training mode":
        return Finding("training", "skipped", "the whole audit is in training mode")
    condition = Condition("training mode", "in training mode", _PROBES, in_training(context))
    if same_in_training(context):
        return Finding("training", "clean", _SAME, (), {"tried": {"training mode": ["answers"]}})
    outcome = probe_under([condition])
    ran = outcome.tried.get("training mode", [])
    return outcome.finding("training", f"the mask holds ({', '.join(ran)})", {}, "")


def in_training(context: Context) -> Context:
    """The same with every module in training mode."""
    return replace(context, subject=replace(context.subject, training=True), _base=None)


def same_in_training(context: Context) -> bool:
    """Whether training mode gives the very same answers, in the model's precision and in float64.

    Rounding cannot hide a leak of training mode alone from both: what is left is below 1e-16 of the answer.
    """
    if context.subject.module is not context.subject.model:
        return False  # no float64 copy of what a function closes over
    others = [context.fresh(700), context.fresh(701, "extreme"), context.echoed(context.n - 1)]
    try:
        for asked in (context, replace(context, subject=context.subject.twin(), _base=None)):
            for inputs in [context.inputs, *others]:
                with Condition("", "", (), asked).set():
                    before: Rows = asked.subject(inputs)
                with Condition("", "", (), in_training(asked)).set():
                    after: Rows = in_training(asked).subject(inputs)
                if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
                    return False
    except Exception:
        return False
    return True
