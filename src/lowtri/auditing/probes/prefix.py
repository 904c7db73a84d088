"""Cut the input off after t positions: outputs before t must stay the same."""

from __future__ import annotations

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, by, moves
from lowtri.auditing.noise import magnitude, movement
from lowtri.auditing.probe import REPEATABLE, Probe

__all__ = ["PROBE"]


def _prefix(context: Context) -> Finding:
    """The rows of the first t inputs alone against the same rows of the whole.

    Finds dependence on the length, which no change of content shows: statistics over time, positions counted from the
    end, buckets whose size follows the length.
    """
    lengths = [t for t in context.chosen or context.sample(16) if t > 0]
    refused, tried, worst = [], [], 0.0
    leaks: list[Leak] = []
    status = "clean"
    witness = None
    for done, t in enumerate(lengths):
        where = np.arange(context.n) >= t
        rows = context.independent_of(where)[:, :t]
        if not rows.any():
            continue
        short = context.inputs.span(0, t)
        try:
            alone = context.adapter(short)
        except Exception:
            refused.append(t)
            continue
        if alone.shape != (context.base.shape[0], t, context.base.shape[2]):
            refused.append(t)
            continue
        tried.append(t)
        whole = context.base[:, :t]
        sizes = np.where(rows, np.nan_to_num(movement(whole, alone), nan=np.inf), 0.0)
        row, query = np.unravel_index(int(sizes.argmax()), sizes.shape)
        size = float(sizes[row, query])
        worst = max(worst, size)
        kind = context.noise.classify(size, magnitude(whole, alone), doubtful=False)
        if kind != "clean":
            first = context.noise.first(sizes[row], magnitude(whole, alone), doubtful=False)
            how = moves(sizes[row, first], f" when the input ends before {t}")
            note = f"position {first} sees the length: output {first} {how}"
            leaks.append(Leak(first, t, float(sizes[row, first]), int(row), note=note))
            status = "leak" if "leak" in (kind, status) else "doubt"
            witness = witness or (context.inputs, short, int(row))
        context.tick(done + 1, len(lengths))
    measured = {"lengths": tried, "refused": refused, "greatest": worst}
    if not tried:
        return Finding("skipped", "the model takes no shorter input", (), measured)
    if status == "clean":
        return Finding("clean", f"{len(tried)} shorter inputs answer as the whole does", (), measured)
    leaks.sort(key=lambda leak: (leak.query, leak.key))
    message = f"{len(leaks)} of {len(tried)} shorter inputs answer differently, {by(worst)}"
    return Finding("leak" if status == "leak" else "doubt", message, tuple(leaks), measured, witness)


PROBE = Probe(
    name="prefix",
    does="cuts the input off after t positions",
    finds="dependence on the length",
    function=_prefix,
    needs=(REPEATABLE,),
    reshapes=True,
)
