"""Two documents packed into one row must give the outputs that each gives alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, first_line, moves
from lowtri.auditing.options import Bools
from lowtri.auditing.probe import REPEATABLE, Need, Probe, Tally

__all__ = ["PROBE"]


def _packing(context: Context) -> Finding:
    """Cut the row where no query sees across in the declared mask, and run each document alone.

    A document is run by `alone=` where it is given, else by the model itself when its per-position settings
    (document or position numbers) come with the example and can be cut with it.
    """
    documents, alone, adapter = _documents(context.allowed), context.options.alone, context.adapter
    if alone is not None:
        adapter = replace(adapter, model=alone, signature=replace(adapter.signature, constants={}))
    tally, compared = Tally(), 0
    refused: dict[str, str] = {}
    for start, stop in documents:
        inputs, packed = context.inputs.span(start, stop), context.base[:, start:stop]
        if alone is not None:
            inputs = replace(inputs, settings={}, per_row={})
        try:
            rows = adapter(inputs)
            if rows.shape != packed.shape:
                raise ValueError(f"alone it answers {rows.shape}, packed {packed.shape}")
        except Exception as error:
            refused[f"{start} to {stop - 1}"] = first_line(error)
            continue
        compared += 1
        difference = context.difference(packed, rows)
        if tally.differs(difference):
            row, query, size = difference.first()
            note = (
                f"position {query + start} answers differently packed: with its document ({start} to {stop - 1}) alone "
                f"its output {moves(size)}"
            )
            # The nearest position of another document: before this one, or just behind it.
            tally.leaks.append(Leak(query + start, start - 1 if start else stop, size, row, note=note))
    measured = {"documents": [list(document) for document in documents], "compared": compared, "refused": refused}
    if not compared:
        why = next(iter(refused.values()))
        return Finding("skipped", f"no document could be run alone: {why}", (), {**measured, "greatest": 0.0})
    message = f"{len(tally.leaks)} of {compared} documents answer differently packed"
    return tally.finding(f"{compared} documents answer packed as alone", message, measured)


def _no_documents(context: Context) -> str | None:
    if len(_documents(context.allowed)) < 2:
        return "the mask has one document"
    known = context.options.alone is not None or context.inputs.settings
    return None if known else "how one document runs alone is not known (say alone=)"


def _documents(allowed: Bools) -> list[tuple[int, int]]:
    """Runs of positions, (start, stop), that no visible pair crosses."""
    table = allowed.any(axis=0)
    table = table | table.T
    n = len(table)
    furthest = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) if row.any() else q for q, row in enumerate(table)])
    starts = [0, *[t for t in range(1, n) if furthest[t - 1] < t]]
    return list(zip(starts, [*starts[1:], n], strict=True))


PROBE = Probe(
    name="packing",
    does="runs each document of a packed row alone (`alone=`)",
    finds="outputs that differ in a packed row, from wrong boundaries or positions",
    function=_packing,
    needs=(Need("packed documents", _no_documents), REPEATABLE),
    reshapes=True,
    argument="alone",
)
