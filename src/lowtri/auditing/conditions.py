"""The same trials under other conditions: other code paths, and training mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.content import CHANGE, PREFIX
from lowtri.auditing.context import Condition, Context, Need
from lowtri.auditing.finding import Finding
from lowtri.auditing.gradient import GRADIENT
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.pads import PADDING, pad, pad_keyword
from lowtri.auditing.rows import BATCH_ROWS, PACKING
from lowtri.auditing.running import run_under
from lowtri.auditing.trial import Trial
from lowtri.compat.transformers_private import attention_name

__all__ = ["CODE_PATHS", "TRAINING", "same_in_training"]

_KEYWORDS = ("output_attentions", "output_hidden_states", "return_weights", "need_weights", "return_attention")
_TRAINING = "training mode"
_SAME = "its answers are eval mode's to the last bit: to 4 inputs, in float64 too, and to shorter and padded ones"


def _code_paths(context: Context) -> Finding:
    """The mask must hold on each; another output under an unbroken mask is a warning."""
    outcome = run_under(_other_paths(context), (CHANGE, GRADIENT), without=context)
    measured = {"opened": list(outcome.tried), "not_offered": outcome.refused}
    return outcome.finding(f"the mask holds ({', '.join(outcome.tried)})", measured, "no other code path is known")


def _other_paths(context: Context) -> Iterator[Context]:
    system = context.system
    for name in _KEYWORDS:
        if system.accepts(name) or (name.startswith("output_") and hasattr(system.model, "config")):
            for value in (True, False) if name == "need_weights" else (True,):
                yield context.under(Condition(keyword=(name, value), name=f"{name}={value}"))
    if hasattr(system.model, "set_attn_implementation"):
        current = attention_name(system.model)
        for name in ("eager", "sdpa"):
            if name != current:
                yield context.under(Condition(attention=name, name=f"attn_implementation={name}"))
    if context.options.compile:
        yield context.under(Condition(compiled=True, name="torch.compile"))


def _not_compiled(finding: Finding, value: object) -> str | None:
    reason = finding.measured.get("not_offered", {}).get("torch.compile")
    return None if finding.status == "leak" else reason


def _training(context: Context) -> Finding:
    """Every trial that does not decode, in training mode, as sensitive as in eval mode."""
    if same_in_training(context):
        return Finding("clean", _SAME, (), {"tried": {_TRAINING: ["answers"]}}, mode=_TRAINING)
    trials = (CHANGE, GRADIENT, PREFIX, BATCH_ROWS, PADDING, PACKING)
    outcome = run_under([_in_training(context)], trials)
    finding = outcome.finding(f"the mask holds ({', '.join(outcome.tried.get(_TRAINING, []))})", {})
    return replace(finding, mode=_TRAINING if outcome.tried else "")


def _no_training(context: Context) -> str | None:
    if context.options.train is False:
        return "train=False leaves it out"
    return {"": "the model has no training mode", _TRAINING: "the whole audit is in training mode"}.get(context.mode)


def _in_training(context: Context) -> Context:
    return context.under(replace(context.condition, training=True, name=_TRAINING))


def same_in_training(context: Context) -> bool:
    """Whether training mode gives bitwise the same outputs: for several inputs, in float64 as well, and for other shapes.

    Rounding cannot hide a leak of training mode alone from both precisions: what is left is below 1e-16 of the answer.
    """
    if context.system.module is not context.system.model:
        return False  # no float64 copy of what a function closes over
    inputs, n = context.inputs, context.n
    same = [inputs, context.fresh(700), context.fresh(701, "extreme"), context.echoed(n - 1)]
    other = [inputs.span(0, t) for t in context.chosen or context.sample(16) if 0 < t < n] + [inputs.span(n // 2, n)]
    other += [inputs.rows([0])] if context.system.signature.batch_axis is not None else []
    keyword = pad_keyword(context)
    try:
        other += [pad(context, keyword, left, right, 702) for left, right in ((0, 3), (2, 5))] if keyword else []
        copy64 = replace(context, system=context.system.in_float64())
        return _alike(context, [*same, *other]) and _alike(copy64, same)
    except Exception:
        return False


def _alike(context: Context, examples: list[Inputs]) -> bool:
    answers: list[list[Any]] = []
    for mode in (context, _in_training(context)):
        with mode.set():
            answers.append([_answer(mode, inputs) for inputs in examples])
    return all(
        a is b if isinstance(a, type) or isinstance(b, type) else np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(*answers, strict=True)
    )


def _answer(context: Context, inputs: Inputs) -> Any:
    """The rows, or the type of the error: a model may refuse a shape, in either mode."""
    try:
        return context.system(inputs)
    except Exception as error:
        return type(error)


CODE_PATHS = Trial(
    name="code_paths",
    does="runs change and gradient with weights or hidden states returned, other attention implementations, "
    "`compile=True`",
    finds="code paths that do not apply the mask",
    function=_code_paths,
    argument="compile",
    not_run=_not_compiled,
)
TRAINING = Trial(
    name="training",
    does="runs change, gradient, prefix, batch, padding and packing in training mode",
    finds="leaks that occur in training mode only",
    function=_training,
    needs=(Need("a training mode", _no_training),),
    skipped_after=("change", "gradient", "prefix"),
)
