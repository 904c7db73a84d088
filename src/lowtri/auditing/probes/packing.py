"""Two documents packed into one row must give the outputs that each gives alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.context import Bools, Context
from lowtri.auditing.finding import Finding, Leak, by, first_line, moves
from lowtri.auditing.noise import magnitude, movement
from lowtri.auditing.probe import REPEATABLE, Need, Probe

__all__ = ["PROBE"]


def _packing(context: Context) -> Finding:
    """Cut the row where no query sees across in the declared mask, and run each piece alone.

    A piece is run by `alone=` where it is given, else by the model itself when its per-position settings
    (document or position numbers) come with the example and can be cut with it.
    """
    pieces, alone = _pieces(context.allowed), context.options.get("alone")
    adapter = context.adapter
    if alone is not None:
        adapter = replace(adapter, model=alone, signature=replace(adapter.signature, constants={}))
    leaks: list[Leak] = []
    status, greatest, compared = "clean", 0.0, 0
    refused: dict[str, str] = {}
    for start, stop in pieces:
        inputs = context.inputs.span(start, stop)
        if alone is not None:
            inputs = replace(inputs, settings={}, per_row={})
        packed = context.base[:, start:stop]
        try:
            rows = adapter(inputs)
            if rows.shape != packed.shape:
                raise ValueError(f"alone it answers {rows.shape}, packed {packed.shape}")
        except Exception as error:
            refused[f"{start} to {stop - 1}"] = first_line(error)
            continue
        compared += 1
        sizes = np.nan_to_num(movement(packed, rows), nan=np.inf)
        size = float(sizes.max())
        greatest = max(greatest, size)
        kind = context.noise.classify(size, magnitude(packed, rows), doubtful=False)
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
        leaks.append(Leak(query, key, float(sizes[row, query - start]), row, note=note))
    measured = {
        "documents": [list(piece) for piece in pieces],
        "compared": compared,
        "refused": refused,
        "greatest": greatest,
    }
    if not compared:
        why = next(iter(refused.values()))
        return Finding("skipped", f"no document could be run alone: {why}", (), measured)
    if leaks:
        message = f"{len(leaks)} of {compared} documents answer differently packed, {by(greatest)}"
        return Finding("leak" if status == "leak" else "doubt", message, tuple(leaks), measured)
    return Finding("clean", f"{compared} documents answer packed as alone", (), measured)


def _no_documents(context: Context) -> str | None:
    if len(_pieces(context.allowed)) < 2:
        return "the mask has one document"
    known = context.options.get("alone") is not None or context.inputs.settings
    return None if known else "how one document runs alone is not known (say alone=)"


def _pieces(allowed: Bools) -> list[tuple[int, int]]:
    """Runs of positions that nothing crosses."""
    table = allowed.any(axis=0)
    table = table | table.T
    n = len(table)
    furthest = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) if row.any() else q for q, row in enumerate(table)])
    starts = [0, *[t for t in range(1, n) if furthest[t - 1] < t]]
    return list(zip(starts, [*starts[1:], n], strict=True))


PROBE = Probe(
    name="packing",
    does="runs each document of a packed row alone (`alone=`)",
    finds="boundaries and positions that differ",
    function=_packing,
    needs=(Need("packed documents", _no_documents), REPEATABLE),
    reshapes=True,
    argument="alone",
)
