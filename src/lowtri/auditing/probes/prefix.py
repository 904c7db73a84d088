"""Cut the input off after t positions: outputs before t must stay the same."""

from __future__ import annotations

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, moves
from lowtri.auditing.probe import REPEATABLE, Probe, Tally

__all__ = ["PROBE"]


def _prefix(context: Context) -> Finding:
    """The rows of the first t inputs alone against the same rows of the whole.

    Finds dependence on the length, which no change of content shows: statistics over time, positions counted from the
    end, buckets whose size follows the length.
    """
    lengths = [t for t in context.chosen or context.sample(16) if t > 0]
    tally, refused, tried, witness = Tally(), [], [], None
    for done, t in enumerate(lengths):
        where = context.independent_of(np.arange(context.n) >= t)[:, :t]
        if not where.any():
            continue
        short, whole = context.inputs.span(0, t), context.base[:, :t]
        try:
            alone = context.adapter(short)
        except Exception:
            alone = None
        if alone is None or alone.shape != whole.shape:
            refused.append(t)
            continue
        tried.append(t)
        difference = context.difference(whole, alone, where=where)
        if tally.differs(difference):
            row, query, size = difference.first()
            how = moves(size, f" when the input ends before {t}")
            tally.leaks.append(
                Leak(query, t, size, row, note=f"position {query} sees the length: output {query} {how}")
            )
            witness = witness or (context.inputs, short, row)
        context.tick(done + 1, len(lengths))
    measured = {"lengths": tried, "refused": refused}
    if not tried:
        return Finding("skipped", "the model takes no shorter input", (), {**measured, "greatest": 0.0})
    tally.leaks.sort(key=lambda leak: (leak.query, leak.key))
    message = f"{len(tally.leaks)} of {len(tried)} shorter inputs answer differently"
    return tally.finding(f"{len(tried)} shorter inputs answer as the whole does", message, measured, witness)


PROBE = Probe(
    name="prefix",
    does="cuts the input off after t positions",
    finds="outputs that depend on the length of the input",
    function=_prefix,
    needs=(REPEATABLE,),
    reshapes=True,
)
