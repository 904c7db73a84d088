"""Two documents in one row must answer as the two alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.context import Bools, Context
from lowtri.auditing.finding import Finding, Leak, by, first_line, moves
from lowtri.auditing.noise import magnitude, movement

__all__ = ["packing"]


def packing(context: Context) -> Finding:
    """Cut the row where the declared mask lets nobody look across, and run each piece alone.

    A piece is run by `alone=` where the caller says how, else by the model itself when its per-position settings
    (document or position numbers) come with the example and can be cut with it.
    """
    pieces = _pieces(context.allowed)
    if len(pieces) < 2:
        return Finding("packing", "skipped", "the mask has one document")
    alone = context.options.get("alone")
    if alone is None and not context.inputs.settings:
        return Finding("packing", "skipped", "how one document runs alone is not known (say alone=)")
    if context.noise.random:
        return Finding("packing", "skipped", "the model draws random numbers, and another length draws others")
    subject = context.subject
    if alone is not None:
        subject = replace(subject, model=alone, form=replace(subject.form, constants={}))
    leaks: list[Leak] = []
    status, greatest, compared = "clean", 0.0, 0
    refused: dict[str, str] = {}
    for start, stop in pieces:
        inputs = context.inputs.span(start, stop)
        if alone is not None:
            inputs = replace(inputs, settings={}, beside={})
        packed = context.base[:, start:stop]
        try:
            rows = subject(inputs)
            if rows.shape != packed.shape:
                raise ValueError(f"alone it answers {rows.shape}, packed {packed.shape}")
        except Exception as error:
            refused[f"{start} to {stop - 1}"] = first_line(error)
            continue
        compared += 1
        sizes = np.nan_to_num(movement(packed, rows), nan=np.inf)
        size = float(sizes.max())
        greatest = max(greatest, size)
        kind = context.noise.weigh(size, magnitude(packed, rows), doubtful=False)
        if kind == "clean":
            continue
        status = "leak" if "leak" in (kind, status) else "doubt"
        row = int(sizes.max(axis=1).argmax())
        query = context.noise.first(sizes[row], magnitude(packed, rows), doubtful=False) + start
        # The nearest position of another document: before this one, or just behind it.
        key = start - 1 if start else stop
        note = (
            f"position {query} answers differently packed: with its document ({start} to {stop - 1}) alone "
            f"its output {moves(sizes[row, query - start])}"
        )
        leaks.append(Leak(query, key, float(sizes[row, query - start]), "packing", row, note=note))
    measured = {
        "documents": [list(piece) for piece in pieces],
        "compared": compared,
        "refused": refused,
        "greatest": greatest,
    }
    if not compared:
        why = next(iter(refused.values()))
        return Finding("packing", "skipped", f"no document could be run alone: {why}", (), measured)
    if leaks:
        message = f"{len(leaks)} of {compared} documents answer differently packed, {by(greatest)}"
        return Finding("packing", "leak" if status == "leak" else "doubt", message, tuple(leaks), measured)
    return Finding("packing", "clean", f"{compared} documents answer packed as alone", (), measured)


def _pieces(allowed: Bools) -> list[tuple[int, int]]:
    """Runs of positions that nothing crosses."""
    table = allowed.any(axis=0)
    table = table | table.T
    n = len(table)
    furthest = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) if row.any() else q for q, row in enumerate(table)])
    starts = [0, *[t for t in range(1, n) if furthest[t - 1] < t]]
    return list(zip(starts, [*starts[1:], n], strict=True))
