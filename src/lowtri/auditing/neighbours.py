"""Probes of neighbours: other rows of the batch, and other documents of a packed row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowtri.auditing.context import Context, Run, compare
from lowtri.auditing.declared import blocks
from lowtri.auditing.example import Inputs, first_line
from lowtri.auditing.pads import pad_keyword
from lowtri.auditing.probe import PairOfRuns, PairsOfRuns, Skipped, Summary, probe, require_repeatable


@probe(
    "batch",
    "changes each row of the batch in turn, and runs rows alone",
    "rows that depend on one another",
    needs="a batch",
    reshapes=True,
)
def batch(context: Context) -> PairsOfRuns:
    """One row changed at a time, which no other row may notice; and rows alone, where the model takes a batch of one."""
    if context.tested.signature.batch_axis is None:
        raise Skipped("the example has no batch")
    before = context.example if context.inputs.batch > 1 else context.run(_three_rows(context))
    inputs, count = before.inputs, before.inputs.batch
    measured: dict[str, Any] = {"alone": None, "rows": count}
    try:
        has_batch = len(before.output) == count
    except Exception:
        raise Skipped("the model takes no batch of two", measured) from None
    if not has_batch:
        raise Skipped("the output has no batch", measured)
    rows, real = np.arange(count)[:, None], ~context.ignored  # (B, 1), (1 or B, N)
    some = list(dict.fromkeys([0, count - 1, 1, count // 2]))
    unnamed = np.ones((count, 1), bool)  # the rows that are not known to see another
    for other in some:
        for salt, kind in ((200, "random"), (201, "random"), (202, "extreme")):
            fresh = context.fresh(salt, kind, inputs)
            difference = yield PairOfRuns(
                context.run(inputs.change(rows == other, fresh)),
                real & (rows != other) & unnamed,
                f"row {{row}} sees row {other}: when input {{key}} of row {other} changes, output {{query}} of row {{row}} {{moves}}",
                partial(_key_of, context, before, fresh, other),
                before,
                same_order=True,
                # Extreme vectors of a neighbour may overflow; any other number that turns infinite or NaN counts.
                overflows=kind == "extreme" and not inputs.discrete,
            )
            if difference is not None and difference.status == "leak":
                unnamed = unnamed & (difference.sizes.max(axis=1, keepdims=True) == 0)
    for row in [] if context.noise.random else some:
        run, note = context.run(inputs.rows([row])), f"row {row} has other outputs alone: output {{query}} {{moves}}"
        same = real[[row % len(real)]] & unnamed[[row]]
        alone = yield PairOfRuns(run, same, note, None, before.part(slice(row, row + 1)), (row, 0))
        measured["alone"] = alone if alone is None else max(alone.greatest, measured["alone"] or 0.0)
    clean = "a row does not depend on its neighbours"
    if not context.noise.random and measured["alone"] is None:
        clean += " (no row runs alone)"
    return Summary(clean, "a row depends on its neighbours in the batch", measured)


def _three_rows(context: Context) -> Inputs:
    """The example and two changed copies of it as a batch of three."""
    inputs = context.inputs
    copies = [inputs, context.fresh(203), context.fresh(204)]
    sequences = zip(*(copy.sequences for copy in copies), strict=True)
    return replace(inputs.rows([0, 0, 0]), sequences=tuple(map(np.concatenate, sequences)))


def _key_of(context: Context, before: Run, fresh: Inputs, other: int, row: int, query: int) -> int:
    """One position of the other row that moves the output."""
    inputs, positions = before.inputs, np.arange(context.n)
    rows = np.arange(inputs.batch)[:, None]
    for key in context.sample(32):
        after = context.tested(inputs.change((rows == other) & (positions == key), fresh))
        at = (rows == row) & (positions == query)
        if compare(before.output, after, context.noise, at, same_order=True).status != "clean":
            return key
    return 0


@probe(
    "packing",
    "runs each document of each packed row alone (`alone=`)",
    "outputs that differ in a packed row, from wrong boundaries or positions",
    needs="packed documents, no random numbers",
    reshapes=True,
    argument="alone",
)
def packing(context: Context) -> PairsOfRuns:
    """Cut each row where no query sees across in the declared mask, and run each document alone.

    A document is run by `alone=` where it is given, else by the model itself when its per-position settings
    (document or position numbers) are part of the example and can be cut with it.
    """
    alone, tested = context.options.adapter.alone, context.tested
    documents = list(_documents(context))
    if not documents or not (is_packed(context) or alone is not None):
        raise Skipped("the mask has one document")
    if alone is None and not context.inputs.settings:
        raise Skipped("how one document runs alone cannot be inferred; pass alone=")
    require_repeatable(context)
    if alone is not None:
        tested = replace(tested, model=alone, signature=replace(tested.signature, constants={}))
    compared, refused = 0, dict[str, str]()
    for rows, start, stop in documents:
        inputs = context.inputs.rows(range(*rows.indices(context.inputs.batch))).span(start, stop)
        before = context.example.part(rows, slice(start, stop))
        run = Run(tested, inputs if alone is None else Inputs(inputs.sequences), calls=None)
        try:
            if run.output.shape != before.output.shape:
                raise ValueError(f"alone it answers {run.output.shape}, packed {before.output.shape}")
        except Exception as error:
            refused[f"{start} to {stop - 1}"] = first_line(error)
            continue
        compared += 1
        note = f"position {{query}} has another output packed: with its document ({start} to {stop - 1}) alone its output {{moves}}"
        # The nearest position of another document: before this one, or just behind it.
        key = start - 1 if start else stop
        yield PairOfRuns(run, ~context.ignored[rows, start:stop], note, key, before, (rows.start or 0, start))
    measured = {"documents": [[start, stop] for _, start, stop in documents], "compared": compared, "refused": refused}
    if not compared:
        raise Skipped(f"no document could be run alone: {next(iter(refused.values()))}", measured)
    message = f"{{count}} of {compared} documents have other outputs packed"
    return Summary(f"{compared} documents have the same outputs packed and alone", message, measured)


def is_packed(context: Context) -> bool:
    """Whether rows hold several documents: the mask names them, positions begin anew, or an input says what a table has.

    A table alone may as well be that of chunks or of a window.
    """
    inputs, mask = context.inputs, context.options.mask
    place = f"{context.tested.signature.prefix}position_ids"
    positions = inputs.settings.get(place)
    if isinstance(positions, np.ndarray) and positions.shape[-1] == context.n:
        falls = np.diff(np.broadcast_to(positions, (inputs.batch, context.n)), axis=1) < 0
        if (falls & context.real[:, 1:] & context.real[:, :-1]).any():
            return True
    if mask.documents(context.n) is None:
        return False
    told = [value for key, value in inputs.settings.items() if key not in (place, pad_keyword(context))]
    return mask.names_documents or any(isinstance(value, np.ndarray) for value in told)


def _documents(context: Context) -> Iterator[tuple[slice, int, int]]:
    """The rows, the start and the end of each document; of all rows at once where they have the same boundaries."""
    labels = [blocks(row) for row in context.declared]
    same = all(row == labels[0] for row in labels)
    for number, row in enumerate(labels[:1] if same else labels):
        stops = np.cumsum(np.bincount(row)).tolist()
        if len(stops) > 1:
            yield from (
                (slice(None) if same else slice(number, number + 1), start, stop)
                for start, stop in zip([0, *stops], stops, strict=False)
            )
