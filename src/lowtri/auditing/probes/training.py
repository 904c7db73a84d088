"""Training mode, in which the loss is computed: another code path in most models, and the one that matters most."""

from __future__ import annotations

from dataclasses import replace

from lowtri.auditing.conditions import Condition, probe_under
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding

__all__ = ["in_training", "training"]

_PROBES = ("change", "gradient", "prefix", "batch", "padding", "packing")


def training(context: Context) -> Finding:
    """Every probe that does not decode, in training mode, as sensitive as in eval mode."""
    if not context.mode:
        return Finding("training", "skipped", "the model has no training mode")
    if context.mode == "training mode":
        return Finding("training", "skipped", "the whole audit is in training mode")
    outcome = probe_under([Condition("training mode", "in training mode", _PROBES, in_training(context))])
    ran = outcome.tried.get("training mode", [])
    return outcome.finding("training", f"the mask holds ({', '.join(ran)})", {}, "")


def in_training(context: Context) -> Context:
    """The same with every module in training mode."""
    return replace(context, subject=replace(context.subject, training=True))
