"""Training mode, in which the loss is computed: in most models a separate code path, and the most important one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.conditions import Condition, mode_set, probe_under
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.pads import pad, pad_keyword
from lowtri.auditing.probe import Need, Probe
from lowtri.auditing.probes.batch import PROBE as BATCH
from lowtri.auditing.probes.change import PROBE as CHANGE
from lowtri.auditing.probes.gradient import PROBE as GRADIENT
from lowtri.auditing.probes.packing import PROBE as PACKING
from lowtri.auditing.probes.padding import PROBE as PADDING
from lowtri.auditing.probes.prefix import PROBE as PREFIX

__all__ = ["PROBE", "in_training", "same_in_training"]

_NAME = "training mode"
_PROBES = (CHANGE, GRADIENT, PREFIX, BATCH, PADDING, PACKING)
_SAME = "its answers are eval mode's to the last bit: to 4 inputs, in float64 too, and to shorter and padded ones"


def _training(context: Context) -> Finding:
    """Every probe that does not decode, in training mode, as sensitive as in eval mode."""
    if same_in_training(context):
        return Finding("clean", _SAME, (), {"tried": {_NAME: ["answers"]}}, mode=_NAME)
    outcome = probe_under([Condition(_NAME, f"in {_NAME}", _PROBES, in_training(context))])
    finding = outcome.finding(f"the mask holds ({', '.join(outcome.tried.get(_NAME, []))})", {})
    return replace(finding, mode=_NAME if outcome.tried else "")


def _no_training(context: Context) -> str | None:
    return {"": "the model has no training mode", _NAME: "the whole audit is in training mode"}.get(context.mode)


def in_training(context: Context) -> Context:
    """The same with every module in training mode."""
    return replace(context, adapter=replace(context.adapter, training=True))


def same_in_training(context: Context) -> bool:
    """Whether training mode gives bitwise the same outputs: for several inputs, in float64 as well, and for other shapes.

    Rounding cannot hide a leak of training mode alone from both precisions: what is left is below 1e-16 of the answer.
    """
    if context.adapter.module is not context.adapter.model:
        return False  # no float64 copy of what a function closes over
    inputs, n = context.inputs, context.n
    same = [inputs, context.fresh(700), context.fresh(701, "extreme"), context.echoed(n - 1)]
    other = [inputs.span(0, t) for t in context.chosen or context.sample(16) if 0 < t < n] + [inputs.span(n // 2, n)]
    other += [inputs.rows([0])] if context.adapter.signature.batch_axis is not None else []
    keyword = pad_keyword(context)
    other += [pad(context, keyword, left, right, 702) for left, right in ((0, 3), (2, 5))] if keyword else []
    try:
        copy64 = replace(context, adapter=context.adapter.in_float64())
        return _alike(context, [*same, *other]) and _alike(copy64, same)
    except Exception:
        return False


def _alike(context: Context, examples: list[Inputs]) -> bool:
    answers: list[list[Any]] = []
    for mode in (context, in_training(context)):
        with mode_set(mode):
            answers.append([_answer(mode, inputs) for inputs in examples])
    return all(
        a is b if isinstance(a, type) or isinstance(b, type) else np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(*answers, strict=True)
    )


def _answer(context: Context, inputs: Inputs) -> Any:
    """The rows, or the type of the error: a model may refuse a shape, in either mode."""
    try:
        return context.adapter(inputs)
    except Exception as error:
        return type(error)


PROBE = Probe(
    name="training",
    does="runs change, gradient, prefix, batch, padding and packing in training mode",
    finds="leaks that occur in training mode only",
    function=_training,
    needs=(Need("a training mode", _no_training),),
    skipped_after=(CHANGE, GRADIENT, PREFIX),
)
