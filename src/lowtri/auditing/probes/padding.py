"""Pad the input: outputs at real positions must not change, for any content and amount of padding."""

from __future__ import annotations

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, by, first_line, moves
from lowtri.auditing.pads import pad, pad_keyword, pads_declared
from lowtri.auditing.probe import REPEATABLE, Need, Probe, Tally

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
    declared, tally, tried = pads_declared(context, name), Tally(), []
    warning, why = "", "its answer has another shape"
    for left, right in _AMOUNTS:
        try:
            padded = [context.adapter(pad(context, name, left, right, salt)) for salt in (300, 301)]
        except Exception as error:
            why = first_line(error)
            continue
        first, second = (rows[:, left : left + context.n] for rows in padded)
        if first.shape != context.base.shape:
            continue
        tried.append([left, right])
        side = "left" if left else "right"
        difference, by_content = context.difference(first, second, same_order=True), True
        if difference.status == "clean":
            difference, by_content = context.difference(whole, first), False
        if left and (not declared or not (by_content or placed)):
            # Left padding was not declared; many models take the keyword and ignore it, or count positions from the pads.
            tally.greatest = max(tally.greatest, difference.greatest)
            if difference.status == "leak":
                why = f"what the pads on the {side} hold" if by_content else "having pads"
                warning = f"left padding is not kept with {name}: {why} moves real outputs, {by(difference.greatest)}"
        elif tally.differs(difference):
            row, query, size = difference.first()
            what = f"what the pads on the {side} hold"
            if not by_content:
                what = f"{left + right} pads on the {side} that are hidden from it"
            key = -1 if left else context.n  # counted as the real positions are
            tally.leaks.append(
                Leak(query, key, size, row, note=f"position {query} sees {what}: its output {moves(size)}")
            )
    measured = {"keyword": name, "tried": tried}
    if not tried:
        message = f"the model does not run with {name} for a padded input: {why}"
        return Finding("skipped", message, (), {**measured, "greatest": 0.0})
    if warning and not tally.leaks:
        return Finding("warning", warning, (), {**measured, "greatest": tally.greatest})
    message = f"{len(tally.leaks)} of {len(tried)} ways to pad change real positions"
    return tally.finding(f"padded equals alone ({len(tried)} ways to pad)", message, measured)


def _no_padding(context: Context) -> str | None:
    name = pad_keyword(context)
    if name is None:
        return "the model takes no padding mask that is known (say pad_mask=)"
    if set(map(str, context.inputs.settings)) - {name, f"{context.adapter.signature.prefix}position_ids"}:
        return "other inputs follow the positions, and how to pad them is not known"
    return None


def _pads_in_mask(context: Context) -> str | None:
    has_pads = context.allowed.shape[0] > 1 or not context.allowed[0].diagonal().all()
    return "the declared mask speaks of pads of its own" if has_pads else None


PROBE = Probe(
    name="padding",
    does="adds pads on either side, with different contents and amounts",
    finds="pads that change outputs at real positions",
    function=_padding,
    needs=(Need("a padding mask", _no_padding), REPEATABLE, Need("", _pads_in_mask)),
    reshapes=True,
    argument="pad_mask",
)
