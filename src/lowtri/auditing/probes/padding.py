"""Pad the input: real positions must answer as they do alone, whatever the pad holds and however much of it there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context, draw
from lowtri.auditing.finding import Finding, Leak, by, first_line, moves
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import magnitude, movement

__all__ = ["pad", "pad_keyword", "padding", "pads_declared"]

# Keywords that mark real positions, and whether True (or 1) means real.
_KEYWORDS = {"attention_mask": True, "padding_mask": True, "positions": True, "key_padding_mask": False}
_AMOUNTS = ((0, 3), (0, 8), (3, 0), (8, 0), (2, 5))


def padding(context: Context) -> Finding:
    """Pads on the right, on the left and on both sides, with two contents each, against the input alone."""
    name = pad_keyword(context)
    if name is None:
        return Finding("padding", "skipped", "the model takes no padding mask that is known (say pad_mask=)")
    if set(map(str, context.inputs.settings)) - {name, f"{context.subject.form.prefix}position_ids"}:
        return Finding("padding", "skipped", "other inputs follow the positions, and how to pad them is not known")
    if context.noise.random:
        return Finding("padding", "skipped", "the model draws random numbers, and another length draws others")
    if context.allowed.shape[0] > 1 or not context.allowed[0].diagonal().all():
        return Finding("padding", "skipped", "the declared mask speaks of pads of its own")
    prefix = context.subject.form.prefix
    placed = name == "positions" or any(context.subject.accepts(prefix + key) for key in ("position_ids", "positions"))
    try:
        # Alone, but told its positions in the same words: some models count them from another number by themselves.
        whole = context.subject(pad(context, name, 0, 0, 300))
    except Exception:
        whole = context.base
    declared = pads_declared(context, name)
    leaks: list[Leak] = []
    status, greatest, tried = "clean", 0.0, []
    warned, why = "", "its answer has another shape"
    for left, right in _AMOUNTS:
        answers = []
        try:
            for salt in (300, 301):
                rows = context.subject(pad(context, name, left, right, salt))
                answers.append(rows[:, left : left + context.n])
        except Exception as error:
            why = first_line(error)
            continue
        if answers[0].shape != context.base.shape:
            continue
        tried.append([left, right])
        side = "left" if left else "right"
        by_content = _compare(answers[0], answers[1])
        by_amount = _compare(whole, answers[0])
        scale = magnitude(context.base, *answers)
        kind = context.noise.weigh(float(by_content.max()), scale)
        if kind == "clean":
            kind, sizes = context.noise.weigh(float(by_amount.max()), scale, doubtful=False), by_amount
            what = f"{left + right} pads on the {side} that are hidden from it"
        else:
            sizes, what = by_content, f"what the pads on the {side} hold"
        greatest = max(greatest, float(sizes.max()))
        if kind == "clean":
            continue
        if left and (not declared or (sizes is by_amount and not placed)):
            # Nobody said that this model keeps pads on the left; many take the keyword and do not, or count from the pads.
            if kind == "leak":
                why = what if sizes is by_content else "having pads"
                warned = f"left padding is not kept with {name}: {why} moves real outputs, {by(float(sizes.max()))}"
            continue
        status = "leak" if "leak" in (kind, status) else "doubt"
        row = int(sizes.max(axis=1).argmax())
        first = context.noise.first(sizes[row], scale, doubtful=False)
        key = -1 if left else context.n  # counted as the real positions are
        note = f"position {first} sees {what}: its output {moves(sizes[row, first])}"
        leaks.append(Leak(first, key, float(sizes[row, first]), "padding", int(row), note=note))
    measured = {"keyword": name, "tried": tried, "greatest": greatest}
    if not tried:
        return Finding(
            "padding", "skipped", f"the model does not run with {name} for a padded input: {why}", (), measured
        )
    if leaks:
        message = f"{len(leaks)} of {len(tried)} ways to pad change real positions, {by(greatest)}"
        return Finding("padding", "leak" if status == "leak" else "doubt", message, tuple(leaks), measured)
    if warned:
        return Finding("padding", "warning", warned, (), measured)
    return Finding("padding", "clean", f"padded equals alone ({len(tried)} ways to pad)", (), measured)


def pad_keyword(context: Context) -> str | None:
    """The keyword that tells this model which positions are real."""
    asked = context.options.get("pad_mask")
    if asked:
        return str(asked)
    names = [context.subject.form.prefix + name for name in _KEYWORDS]
    for name in names:
        if name in context.inputs.settings:
            return name
    # A signature alone is believed only of libraries whose words are known.
    origin = {part.__module__.split(".")[0] for part in type(context.subject.model).__mro__}
    if origin & {"transformers", "lowtri"}:
        return next((name for name in names if context.subject.accepts(name)), None)
    return None


def pads_declared(context: Context, name: str) -> bool:
    """Whether somebody said that the model keeps pads: the caller, the example, or a module of lowtri's."""
    ours = type(context.subject.model).__module__.startswith("lowtri.")
    return ours or name in context.inputs.settings or context.options.get("pad_mask") is not None


def pad(context: Context, name: str, left: int, right: int, salt: int) -> Inputs:
    """The example with pads around it, their content drawn at random."""
    inputs = context.inputs
    rng = np.random.default_rng([context.seed, salt])
    wide = replace(
        inputs,
        sequences=tuple(
            np.concatenate([np.repeat(values[:, :1], left, 1), values, np.repeat(values[:, -1:], right, 1)], axis=1)
            for values in inputs.sequences
        ),
        settings={},
    )
    real = np.zeros(wide.n, bool)
    real[left : left + inputs.n] = True
    wide = wide.change(~real, draw(wide, context.vocab, rng, "random"))
    options: dict[str, Any] = {**inputs.options}
    count = np.arange(wide.n) - left
    tiled = (inputs.batch, 1)
    if name == "positions":
        options[name] = np.tile(np.where(real, count, -1), tiled)
    else:
        like = inputs.settings.get(name)
        means_real = _KEYWORDS.get(name.removeprefix("decoder_"), True)
        marks = real if means_real else ~real
        dtype = like.dtype if like is not None else np.dtype(np.int64 if means_real else np.bool_)
        options[name] = np.tile(marks, tiled).astype(dtype)
        if context.subject.form.batch_axis is None:
            options[name] = options[name][0]
        places = f"{context.subject.form.prefix}position_ids"
        if context.subject.accepts(places):
            options[places] = np.tile(np.where(real, count, 0), tiled)
    return replace(wide, options=options)


def _compare(before: Any, after: Any) -> Any:
    return np.nan_to_num(movement(before, after), nan=np.inf)
