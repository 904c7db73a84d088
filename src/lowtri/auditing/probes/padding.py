"""Pad the input: outputs at real positions must not change, for any content and amount of padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, by, first_line, moves
from lowtri.auditing.noise import magnitude, movement
from lowtri.auditing.pads import pad, pad_keyword, pads_declared
from lowtri.auditing.probe import REPEATABLE, Need, Probe

__all__ = ["PROBE"]

_AMOUNTS = ((0, 3), (0, 8), (3, 0), (8, 0), (2, 5))


def _padding(context: Context) -> Finding:
    """Pads on the right, on the left and on both sides, with two contents each, against the input alone."""
    name = str(pad_keyword(context))
    prefix = context.adapter.signature.prefix
    placed = name == "positions" or any(context.adapter.accepts(prefix + key) for key in ("position_ids", "positions"))
    try:
        # Without pads, but with positions passed the same way: some models start to count at another number by default.
        whole = context.adapter(pad(context, name, 0, 0, 300))
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
                rows = context.adapter(pad(context, name, left, right, salt))
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
        kind = context.noise.classify(float(by_content.max()), scale)
        if kind == "clean":
            kind, sizes = context.noise.classify(float(by_amount.max()), scale, doubtful=False), by_amount
            what = f"{left + right} pads on the {side} that are hidden from it"
        else:
            sizes, what = by_content, f"what the pads on the {side} hold"
        greatest = max(greatest, float(sizes.max()))
        if kind == "clean":
            continue
        if left and (not declared or (sizes is by_amount and not placed)):
            # Left padding was not declared; many models take the keyword and ignore it, or count positions from the pads.
            if kind == "leak":
                why = what if sizes is by_content else "having pads"
                warned = f"left padding is not kept with {name}: {why} moves real outputs, {by(float(sizes.max()))}"
            continue
        status = "leak" if "leak" in (kind, status) else "doubt"
        row = int(sizes.max(axis=1).argmax())
        first = context.noise.first(sizes[row], scale, doubtful=False)
        key = -1 if left else context.n  # counted as the real positions are
        note = f"position {first} sees {what}: its output {moves(sizes[row, first])}"
        leaks.append(Leak(first, key, float(sizes[row, first]), int(row), note=note))
    measured = {"keyword": name, "tried": tried, "greatest": greatest}
    if not tried:
        return Finding("skipped", f"the model does not run with {name} for a padded input: {why}", (), measured)
    if leaks:
        message = f"{len(leaks)} of {len(tried)} ways to pad change real positions, {by(greatest)}"
        return Finding("leak" if status == "leak" else "doubt", message, tuple(leaks), measured)
    if warned:
        return Finding("warning", warned, (), measured)
    return Finding("clean", f"padded equals alone ({len(tried)} ways to pad)", (), measured)


def _no_padding(context: Context) -> str | None:
    name = pad_keyword(context)
    if name is None:
        return "the model takes no padding mask that is known (say pad_mask=)"
    if set(map(str, context.inputs.settings)) - {name, f"{context.adapter.signature.prefix}position_ids"}:
        return "other inputs follow the positions, and how to pad them is not known"
    return None


def _pads_in_mask(context: Context) -> str | None:
    of_its_own = context.allowed.shape[0] > 1 or not context.allowed[0].diagonal().all()
    return "the declared mask speaks of pads of its own" if of_its_own else None


def _compare(before: Any, after: Any) -> Any:
    return np.nan_to_num(movement(before, after), nan=np.inf)


PROBE = Probe(
    name="padding",
    does="pads on either side, with any content and amount",
    finds="pads that count",
    function=_padding,
    needs=(Need("a padding mask", _no_padding), REPEATABLE, Need("", _pads_in_mask)),
    reshapes=True,
    argument="pad_mask",
)
