"""Probes of neighbours: other rows of the batch, other documents of a packed row, and what earlier calls left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowtri.auditing.context import Context, Movement, Run, compare
from lowtri.auditing.declared import blocks
from lowtri.auditing.example import Inputs, first_line
from lowtri.auditing.pads import pad_keyword
from lowtri.auditing.probe import (
    Leak,
    PairOfRuns,
    PairsOfRuns,
    ProbeResult,
    Skipped,
    Summary,
    describe_movement,
    probe,
    require_repeatable,
)
from lowtri.auditing.reading import extended


@probe(
    "batch",
    "changes each row of the batch in turn, and runs rows alone",
    "rows that depend on one another",
    needs="a batch",
    reshapes=True,
)
def batch(context: Context) -> PairsOfRuns:
    if context.tested.signature.batch_axis is None:
        raise Skipped("the example has no batch")
    before = context.example
    if context.inputs.batch == 1:  # the example and two changed copies of it
        three = context.inputs.rows([0, 0, 0])
        before = context.run(three.change(np.arange(3)[:, None] > 0, context.fresh(203, inputs=three)))
    inputs, count = before.inputs, before.inputs.batch
    measured: dict[str, Any] = {"alone": None, "rows": count}
    try:
        has_batch = len(before.output) == count
    except Exception:
        raise Skipped("the model takes no batch of two", measured) from None
    if not has_batch:
        raise Skipped("the output has no batch", measured)
    rows, real = np.arange(count)[:, None], context.real  # (B, 1), (1 or B, N)
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
    # A document is run by `alone=` where it is given, else by the model itself when its per-position settings (document or
    # position numbers) are part of the example and can be cut with it.
    alone, tested = context.tested.adapter.alone, context.tested
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
        yield PairOfRuns(run, context.real[rows, start:stop], note, key, before, (rows.start or 0, start))
    measured = {"documents": [[start, stop] for _, start, stop in documents], "compared": compared, "refused": refused}
    if not compared:
        raise Skipped(f"no document could be run alone: {next(iter(refused.values()))}", measured)
    message = f"{{count}} of {compared} documents have other outputs packed"
    return Summary(f"{compared} documents have the same outputs packed and alone", message, measured)


def is_packed(context: Context) -> bool:
    """Whether rows hold several documents: the mask names them, positions begin anew, or an input says what a table has.

    A table alone may as well be that of chunks or of a window.
    """
    mask, settings = context.mask, context.inputs.settings
    place = f"{context.tested.signature.prefix}position_ids"
    positions = settings.get(place)
    if isinstance(positions, np.ndarray) and positions.shape[-1] == context.n:
        falls = np.diff(np.broadcast_to(positions, context.real.shape), axis=1) < 0
        if (falls & context.real[:, 1:] & context.real[:, :-1]).any():
            return True
    if mask.documents(context.n) is None:
        return False
    told = [value for key, value in settings.items() if key not in (place, pad_keyword(context))]
    return mask.names_documents or any(isinstance(value, np.ndarray) for value in told)


def _documents(context: Context) -> Iterator[tuple[slice, int, int]]:
    """The rows, the start and the end of each document; of all rows at once where they have the same boundaries."""
    labels = [blocks(row) for row in context.declared]
    same = all(row == labels[0] for row in labels)
    for number, row in enumerate(labels[:1] if same else labels):
        stops = np.cumsum(np.bincount(row)).tolist()
        rows = slice(None) if same else slice(number, number + 1)
        if len(stops) > 1:
            yield from ((rows, start, stop) for start, stop in zip([0, *stops], stops, strict=False))


@probe(
    "state",
    "calls copies of the model with other, longer and shorter inputs first",
    "state that one call leaves to the next",
    needs="a torch module",
)
def state(context: Context) -> ProbeResult:
    if context.fresh_copy is None:
        raise Skipped("the model cannot be copied before its first call")
    first, histories = _used(context), list[tuple[str, Inputs]]()
    measured = {"histories": list[str]()}
    differs = False
    for words, inputs in _histories(context):
        try:
            run = _used(context, inputs)
        except Exception:
            continue
        histories.append((words, inputs))
        measured["histories"].append(words)
        differs = _difference(context, first, run).status == "leak"
        if differs:
            break
    if not differs:
        calls = f"another input, {len(histories)} kinds of calls before it"
        message = f"a used model has the outputs of one that was never called ({calls})"
        return ProbeResult("clean", message, (), measured)
    one, other = (_used(context, context.fresh(salt)) for salt in (900, 905))
    if _difference(context, one, other).status == "clean" and _difference(context, first, one).status != "clean":
        # Another call changes the answer whatever it is given: a count, or random numbers of the model's own.
        first, histories = one, [(words, inputs) for words, inputs in histories if inputs.n == context.n]
    for words, inputs in histories:
        found = _found(context, words, first, _used(context, inputs))
        if found is not None:
            return replace(found, measured={**measured, **found.measured})
    raise Skipped("each call changes the output, whatever its input", measured)


def state_after(context: Context) -> ProbeResult | None:
    """What the calls of the whole audit have left behind, where that shows."""
    unseen = context.fresh(940)
    return _found(context, "the calls of this audit", Run(context.copied(), unseen), context.run(unseen))


def _found(context: Context, words: str, before: Run, run: Run) -> ProbeResult | None:
    difference = _difference(context, before, run)
    if difference.status != "leak":
        return None
    row, query, size = difference.first(of_all_rows=True)
    note = f"the model keeps state between calls: after {words}, output {query} {describe_movement(size)}"
    leak = Leak(query, query, size, row, note=note, probe="state")
    watch = Run(context.copied(), run.inputs), run, (row, query)
    return ProbeResult("leak", note, (leak,), {"greatest": size}, probe="state", watch=watch)


def _used(context: Context, *earlier: Inputs) -> Run:
    """The run on the example of a copy that was called with these inputs before."""
    tested = context.copied()
    for inputs in earlier:
        tested(inputs)
    run = Run(tested, context.inputs)
    run.output  # noqa: B018 (run now)
    return run


def _difference(context: Context, before: Run, after: Run) -> Movement:
    # The model's own noise is no measure: state shows as noise.
    quiet = replace(context.noise, repeat=0.0, reorder=0.0)
    return compare(before.output, after.output, quiet, context.real)


def _histories(context: Context) -> Iterator[tuple[str, Inputs]]:
    """What may be called before the example: (words, inputs)."""
    inputs, n = context.inputs, context.n
    positions = np.arange(n)
    yield "a call with other inputs", context.fresh(900)
    yield "a call with the same first position", inputs.change(positions > 0, context.fresh(903))
    yield "a call with another second half", inputs.change(positions >= n // 2, context.fresh(901))
    yield "a call with another first half", inputs.change(positions < n // 2, context.fresh(902))
    yield "a call with a shorter input", inputs.span(0, n // 2)
    for key, value in {**inputs.per_row, **inputs.settings}.items():
        if getattr(value, "ndim", 0) > 1 and value.dtype != bool:
            moved = value.roll(1, 0) if hasattr(value, "roll") else np.roll(value, 1, 0)
            other = value + moved if "float" in str(value.dtype) else moved
            yield f"a call with another {key}", inputs.having({key: other})
    with contextlib.suppress(Exception):  # what the model takes may not be known
        yield "a call with a longer input", extended(context, max(256, 2 * n)).inputs
