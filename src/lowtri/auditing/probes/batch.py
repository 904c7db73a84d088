"""Change the other rows of the batch: a row's output must stay the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.adapter import Rows
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, by, moves
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.noise import magnitude, movement
from lowtri.auditing.probe import BATCH, Probe

__all__ = ["PROBE"]


def _batch(context: Context) -> Finding:
    """Row 0 with other neighbours; and, where the model takes a batch of one, alone."""
    inputs = context.inputs if context.inputs.batch > 1 else _doubled(context)
    watched = ~np.broadcast_to(context.ignored[:1], (1, context.n))
    try:
        before = context.adapter(inputs)
    except Exception:
        return Finding("skipped", "the model takes no batch of two")
    if before.shape[0] != inputs.batch:
        return Finding("skipped", "the output has no batch")
    greatest, status = 0.0, "clean"
    leaks: list[Leak] = []
    neighbours = np.arange(inputs.batch)[:, None] > 0
    everywhere = np.broadcast_to(neighbours, (inputs.batch, context.n))
    for salt, kind in ((200, "random"), (201, "random"), (202, "extreme")):
        fresh = _fresh(context, inputs, salt, kind)
        after = context.adapter(inputs.change(everywhere, fresh))
        # Extreme vectors of a neighbour may overflow; whatever else turns a number infinite or NaN was seen.
        turned = np.inf if kind == "random" or inputs.discrete else 0.0
        sizes = np.where(watched, np.nan_to_num(movement(before[:1], after[:1]), nan=turned), 0.0)[0]
        size, scale = float(sizes.max()), magnitude(before, after)
        weight = context.noise.classify(size, scale)
        greatest = max(greatest, size)
        if weight != "clean":
            status = "leak" if "leak" in (weight, status) else "doubt"
            leaks.append(_name(context, inputs, fresh, before, sizes, scale))
    alone = None
    if not context.noise.random:
        try:
            single = context.adapter(inputs.rows([0]))
            sizes = np.where(watched, np.nan_to_num(movement(before[:1], single), nan=np.inf), 0.0)[0]
            alone = float(sizes.max())
        except Exception:
            alone = None
        weight = "clean" if alone is None else context.noise.classify(alone, magnitude(before), doubtful=False)
        if weight != "clean" and not leaks:
            status = weight
            query = context.noise.first(sizes, magnitude(before), doubtful=False)
            note = f"row 0 answers differently alone: output {query} {moves(sizes[query])}"
            leaks.append(Leak(query, query, float(sizes[query]), note=note))
    measured = {"greatest": greatest, "alone": alone, "rows": inputs.batch}
    if status == "clean":
        return Finding("clean", "a row does not depend on its neighbours", (), measured)
    message = f"a row depends on its neighbours in the batch, {by(max(greatest, alone or 0.0))}"
    return Finding("leak" if status == "leak" else "doubt", message, tuple(leaks[:1]), measured)


def _doubled(context: Context) -> Inputs:
    """The example and a changed copy of it as a batch of two."""
    other = context.fresh(203)
    both = tuple(np.concatenate(pair) for pair in zip(context.inputs.sequences, other.sequences, strict=True))
    settings = {
        key: np.concatenate([value, value]) if value.ndim > 1 and value.shape[0] == 1 else value
        for key, value in context.inputs.settings.items()
    }
    per_row = {key: value[[0, 0]] for key, value in context.inputs.per_row.items()}
    return replace(context.inputs, sequences=both, settings=settings, per_row=per_row)


def _fresh(context: Context, inputs: Inputs, salt: int, kind: str) -> Inputs:
    from lowtri.auditing.context import draw

    return draw(inputs, context.vocab, np.random.default_rng([context.seed, salt]), kind)


def _name(context: Context, inputs: Inputs, fresh: Inputs, before: Rows, sizes: Rows, scale: float) -> Leak:
    """The first position of row 0 that moves, and one position of its neighbours that moves it."""
    query = context.noise.first(sizes, scale)
    chosen, size = 0, float(sizes[query])
    for key in context.sample(32):
        where = (np.arange(inputs.batch)[:, None] > 0) & (np.arange(context.n) == key)
        after = context.adapter(inputs.change(where, fresh))
        moved = float(np.nan_to_num(movement(before[:1], after[:1]), nan=np.inf)[0, query])
        if context.noise.classify(moved, magnitude(before, after)) != "clean":
            chosen, size = key, moved
            break
    how = f"its output {query} {moves(size)}"
    note = f"row 0 sees its neighbour: when input {chosen} of another row changes, {how}"
    return Leak(query, chosen, size, 0, note=note)


PROBE = Probe(
    name="batch",
    does="changes the neighbours, and takes them away",
    finds="rows that see one another",
    function=_batch,
    needs=(BATCH,),
    reshapes=True,
)
