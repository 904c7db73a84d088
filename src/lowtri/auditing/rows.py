"""Trials of rows: what other rows of a batch, and other documents of a row, may not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import BATCH, REPEATABLE, Context, Need
from lowtri.auditing.finding import Leak, compare, moves
from lowtri.auditing.inputs import Inputs, first_line
from lowtri.auditing.options import Bools
from lowtri.auditing.system import Rows
from lowtri.auditing.trial import Case, Cases, Summary, Trial, watch

__all__ = ["BATCH_ROWS", "PACKING"]


def _rows(context: Context) -> Cases:
    """One row changed at a time, which no other row may notice; and rows alone, where the model takes a batch of one."""
    inputs = context.inputs if context.inputs.batch > 1 else _three_rows(context)
    batch = inputs.batch
    measured: dict[str, Any] = {"alone": None, "rows": batch}
    try:
        before = context.base if inputs is context.inputs else context.system(inputs)
    except Exception:
        return Summary("", "", measured, "the model takes no batch of two")
    if before.shape[0] != batch:
        return Summary("", "", measured, "the output has no batch")
    rows = np.arange(batch)[:, None]  # (B, 1)
    real = np.broadcast_to(~context.ignored, (batch, context.n)) if batch == context.inputs.batch else ~context.ignored
    some = list(dict.fromkeys([0, batch - 1, 1, batch // 2]))
    named: set[int] = set()  # the rows that are known to see another
    for other in some:
        for salt, kind in ((200, "random"), (201, "random"), (202, "extreme")):
            fresh = context.fresh(salt, kind, inputs)
            # Extreme vectors of a neighbour may overflow; any other number that turns infinite or NaN counts.
            bound = np.inf if kind == "random" or inputs.discrete else 0.0
            changed = inputs.change(rows == other, fresh)

            def leak(row: int, query: int, size: float, other: int = other, fresh: Inputs = fresh) -> Leak:
                key = _key_of(context, inputs, fresh, before, (row, query, other))
                how = f"when input {key} of row {other} changes, output {query} of row {row} {moves(size)}"
                return Leak(query, key, size, row, note=f"row {row} sees row {other}: {how}")

            unnamed = np.array([row not in named for row in range(batch)])[:, None]
            difference = yield Case(
                changed,
                real & (rows != other) & unnamed,
                leak,
                before,
                same_order=True,
                non_finite=bound,
                watch=lambda r, q, i=changed: (watch(context, inputs, r, q), watch(context, i, r, q)),  # type: ignore[misc]
            )
            if difference is not None and difference.status == "leak":
                named |= set(np.flatnonzero(difference.sizes.max(axis=1) > 0).tolist())
    for row in [] if context.noise.random else some:
        one = inputs.rows([row])

        def answers(_: int, query: int, size: float, row: int = row) -> Leak:
            return Leak(
                query, query, size, row, note=f"row {row} answers differently alone: output {query} {moves(size)}"
            )

        unnamed = np.array([[row not in named]])
        alone = yield Case(
            one,
            real[[row % len(real)]] & unnamed,
            answers,
            before[[row]],
            watch=lambda _, q, i=one, r=row: (watch(context, inputs, r, q), watch(context, i, 0, q)),  # type: ignore[misc]
        )
        measured["alone"] = alone if alone is None else max(alone.greatest, measured["alone"] or 0.0)
    return Summary("a row does not depend on its neighbours", "a row depends on its neighbours in the batch", measured)


def _three_rows(context: Context) -> Inputs:
    """The example and two changed copies of it as a batch of three."""
    inputs, others = context.inputs, [context.fresh(203), context.fresh(204)]
    all_rows = zip(inputs.sequences, *(other.sequences for other in others), strict=True)
    settings = {
        key: np.concatenate([value] * 3) if value.ndim > 1 and value.shape[0] == 1 else value
        for key, value in inputs.settings.items()
    }
    per_row = {key: value[[0, 0, 0]] for key, value in inputs.per_row.items()}
    return replace(inputs, sequences=tuple(map(np.concatenate, all_rows)), settings=settings, per_row=per_row)


def _key_of(context: Context, inputs: Inputs, fresh: Inputs, before: Rows, pair: tuple[int, int, int]) -> int:
    """One position of the other row that moves the output."""
    row, query, other = pair
    rows, positions = np.arange(inputs.batch)[:, None], np.arange(context.n)
    for key in context.sample(32):
        after = context.system(inputs.change((rows == other) & (positions == key), fresh))
        at = (rows == row) & (positions == query)
        if compare(before, after, context.noise, at, same_order=True).status != "clean":
            return key
    return 0


def _packing(context: Context) -> Cases:
    """Cut the row where no query sees across in the declared mask, and run each document alone.

    A document is run by `alone=` where it is given, else by the model itself when its per-position settings
    (document or position numbers) come with the example and can be cut with it.
    """
    documents, alone, system = _documents(context.declared), context.options.alone, context.system
    if alone is not None:
        system = replace(system, model=alone, signature=replace(system.signature, constants={}))
    compared, refused = 0, dict[str, str]()
    for start, stop in documents:
        inputs = context.inputs.span(start, stop)
        if alone is not None:
            inputs = replace(inputs, settings={}, per_row={})
        try:
            rows = system(inputs)
            if rows.shape != context.base[:, start:stop].shape:
                raise ValueError(f"alone it answers {rows.shape}, packed {context.base[:, start:stop].shape}")
        except Exception as error:
            refused[f"{start} to {stop - 1}"] = first_line(error)
            continue
        compared += 1

        def leak(row: int, query: int, size: float, start: int = start, stop: int = stop) -> Leak:
            note = (
                f"position {query + start} answers differently packed: with its document ({start} to {stop - 1}) alone "
                f"its output {moves(size)}"
            )
            # The nearest position of another document: before this one, or just behind it.
            return Leak(query + start, start - 1 if start else stop, size, row, note=note)

        yield Case(
            inputs,
            ~context.ignored[:, start:stop],
            leak,
            context.base[:, start:stop],
            lambda _, rows=rows: rows,  # type: ignore[misc]
        )
    measured = {"documents": [list(document) for document in documents], "compared": compared, "refused": refused}
    skipped = "" if compared else f"no document could be run alone: {next(iter(refused.values()))}"
    message = f"{{count}} of {compared} documents answer differently packed"
    return Summary(f"{compared} documents answer packed as alone", message, measured, skipped)


def _no_documents(context: Context) -> str | None:
    if len(_documents(context.declared)) < 2:
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


BATCH_ROWS = Trial(
    name="batch",
    does="changes each row of the batch in turn, and runs rows alone",
    finds="rows that depend on one another",
    function=_rows,
    needs=(BATCH,),
    reshapes=True,
)
PACKING = Trial(
    name="packing",
    does="runs each document of a packed row alone (`alone=`)",
    finds="outputs that differ in a packed row, from wrong boundaries or positions",
    function=_packing,
    needs=(Need("packed documents", _no_documents), REPEATABLE),
    reshapes=True,
    argument="alone",
)
