"""Change the other rows of the batch: a row's output must stay the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.adapter import Rows
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, moves
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import Difference
from lowtri.auditing.options import Bools
from lowtri.auditing.probe import BATCH, Probe, Tally

__all__ = ["PROBE"]


def _batch(context: Context) -> Finding:
    """Row 0 with other neighbours; and, where the model takes a batch of one, alone."""
    inputs = context.inputs if context.inputs.batch > 1 else _doubled(context)
    try:
        before = context.adapter(inputs)
    except Exception:
        return Finding("skipped", "the model takes no batch of two")
    if before.shape[0] != inputs.batch:
        return Finding("skipped", "the output has no batch")
    tally, rows = Tally(), np.arange(inputs.batch)[:, None]
    row_0 = (rows == 0) & ~context.ignored[:1]  # (B, N)
    for salt, kind in ((200, "random"), (201, "random"), (202, "extreme")):
        other = context.fresh(salt, kind, inputs)
        after = context.adapter(inputs.change(rows > 0, other))
        # Extreme vectors of a neighbour may overflow; any other number that turns infinite or NaN counts.
        non_finite = np.inf if kind == "random" or inputs.discrete else 0.0
        difference = context.difference(before, after, where=row_0, same_order=True, non_finite=non_finite)
        if tally.differs(difference) and not tally.leaks:
            tally.leaks.append(_neighbour_seen(context, inputs, other, before, difference))
    measured = {"greatest": tally.greatest, "alone": None, "rows": inputs.batch}
    alone = None if context.noise.random else _alone(context, inputs, before, row_0)
    if alone is not None:
        measured["alone"] = alone.greatest
        if tally.differs(alone) and not tally.leaks:
            _, query, size = alone.first()
            note = f"row 0 answers differently alone: output {query} {moves(size)}"
            tally.leaks.append(Leak(query, query, size, note=note))
    message = "a row depends on its neighbours in the batch"
    return tally.finding("a row does not depend on its neighbours", message, measured)


def _doubled(context: Context) -> Inputs:
    """The example and a changed copy of it as a batch of two."""
    inputs, other = context.inputs, context.fresh(203)
    both = tuple(np.concatenate(pair) for pair in zip(inputs.sequences, other.sequences, strict=True))
    settings = {
        key: np.concatenate([value, value]) if value.ndim > 1 and value.shape[0] == 1 else value
        for key, value in inputs.settings.items()
    }
    per_row = {key: value[[0, 0]] for key, value in inputs.per_row.items()}
    return replace(inputs, sequences=both, settings=settings, per_row=per_row)


def _alone(context: Context, inputs: Inputs, before: Rows, row_0: Bools) -> Difference | None:
    """How far row 0 is from its own answer in a batch of one, if the model takes that."""
    try:
        after = np.concatenate([context.adapter(inputs.rows([0])), before[1:]])
        return context.difference(before, after, where=row_0)
    except Exception:
        return None


def _neighbour_seen(context: Context, inputs: Inputs, other: Inputs, before: Rows, difference: Difference) -> Leak:
    """The first position of row 0 that moves, and one position of its neighbours that moves it."""
    _, query, size = difference.first()
    chosen, rows, positions = 0, np.arange(inputs.batch)[:, None], np.arange(context.n)
    for key in context.sample(32):
        after = context.adapter(inputs.change((rows > 0) & (positions == key), other))
        moved = context.difference(before, after, where=(rows == 0) & (positions == query), same_order=True)
        if moved.status != "clean":
            chosen, size = key, moved.greatest
            break
    how = f"its output {query} {moves(size)}"
    return Leak(
        query, chosen, size, 0, note=f"row 0 sees its neighbour: when input {chosen} of another row changes, {how}"
    )


PROBE = Probe(
    name="batch",
    does="changes the other rows of the batch, and removes them",
    finds="rows that depend on one another",
    function=_batch,
    needs=(BATCH,),
    reshapes=True,
)
