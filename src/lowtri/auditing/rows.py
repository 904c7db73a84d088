"""Trials of rows: what other rows of a batch, other documents of a row, and pads may not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import BATCH, REPEATABLE, Bools, Context, Requirement
from lowtri.auditing.finding import Leak, compare, describe_difference, describe_movement
from lowtri.auditing.inputs import Inputs, first_line
from lowtri.auditing.system import Rows
from lowtri.auditing.trial import Case, Cases, Summary, Trial, watch


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
                how = f"when input {key} of row {other} changes, output {query} of row {row} {describe_movement(size)}"
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
                query,
                query,
                size,
                row,
                note=f"row {row} has other outputs alone: output {query} {describe_movement(size)}",
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
    (document or position numbers) are part of the example and can be cut with it.
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
                f"position {query + start} has another output packed: with its document ({start} to {stop - 1}) alone "
                f"its output {describe_movement(size)}"
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
    message = f"{{count}} of {compared} documents have other outputs packed"
    return Summary(f"{compared} documents have the same outputs packed and alone", message, measured, skipped)


def _no_documents(context: Context) -> str | None:
    if len(_documents(context.declared)) < 2:
        return "the mask has one document"
    known = context.options.alone is not None or context.inputs.settings
    return None if known else "how one document runs alone is not known (say alone=)"


def blocks(pairs: Bools) -> list[int]:
    """A number for each position, (N,), the same in each run of positions that no pair (N, N) crosses."""
    table = pairs | pairs.T
    furthest = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) if row.any() else q for q, row in enumerate(table)])
    return np.cumsum([0, *(furthest[:-1] < np.arange(1, len(table)))]).tolist()


def _documents(allowed: Bools) -> list[tuple[int, int]]:
    """Runs of positions, (start, stop), that no visible pair crosses."""
    stops = np.cumsum(np.bincount(blocks(np.asarray(allowed.any(axis=0))))).tolist()
    return list(zip([0, *stops], stops, strict=False))


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
    needs=(Requirement("packed documents", _no_documents), REPEATABLE),
    reshapes=True,
    argument="alone",
)


_AMOUNTS = ((0, 3), (0, 8), (3, 0), (8, 0), (2, 5))
# Keywords that mark real positions, and whether True (or 1) means real.
_KEYWORDS = {"attention_mask": True, "padding_mask": True, "positions": True, "key_padding_mask": False}


def pad_keyword(context: Context) -> str | None:
    """The keyword that marks this model's real positions."""
    if context.options.pad_mask:
        return context.options.pad_mask
    names = [context.system.signature.prefix + name for name in _KEYWORDS]
    for name in names:
        if name in context.inputs.settings:
            return name
    # A signature alone is believed only of libraries whose words are known.
    if _library(context):
        return next((name for name in names if context.system.accepts(name)), None)
    return None


def real_positions(inputs: Inputs, prefix: str, pad_mask: str | None) -> Bools:
    """The positions (B, N) that the example's own padding mask does not mark as pads."""
    for name in filter(None, [pad_mask, *(prefix + name for name in _KEYWORDS)]):
        value = inputs.settings.get(name)
        if value is not None and value.shape in ((inputs.batch, inputs.n), (inputs.n,)):
            if name.endswith("positions"):
                real = value >= 0
            else:
                real = value.astype(bool) == _KEYWORDS.get(name.removeprefix(prefix), True)
            return np.broadcast_to(real, (inputs.batch, inputs.n))
    return np.ones((inputs.batch, inputs.n), bool)


def pad(context: Context, name: str, left: int, right: int, salt: int) -> Inputs:
    """The example with pads around it, their content and that of its own pads drawn at random."""
    inputs, signature = context.inputs, context.system.signature
    real = np.pad(np.broadcast_to(context.real, (inputs.batch, inputs.n)), ((0, 0), (left, right)))
    wide = replace(inputs, sequences=tuple(_wider(a, left, right, 1, "edge") for a in inputs.sequences), settings={})
    wide = wide.change(~real, context.fresh(salt, inputs=wide))
    options: dict[str, Any] = {**inputs.options}
    for key, value in inputs.settings.items():
        mode = "constant" if key == name else "edge"
        options[str(key)] = _wider(value, left, right, value.ndim - 1, mode, _pad_value(name, signature.prefix))
    place = f"{signature.prefix}position_ids"
    position = np.tile(np.arange(wide.n) - left, (inputs.batch, 1))
    if name == "positions":
        options.setdefault(name, np.where(real, position, -1))
    elif name not in options:
        means_real = _pad_value(name, signature.prefix) == 0
        marks = (real if means_real else ~real).astype(np.int64 if means_real else np.bool_)
        options[name] = marks[0] if signature.batch_axis is None else marks
    if name != "positions" and place not in options and context.system.accepts(place):
        options[place] = np.where(real, position, 0)
    return replace(wide, options=options)


def _wider(value: Any, left: int, right: int, axis: int, mode: Any, pad_value: int = 0) -> Any:
    more = {"constant_values": pad_value} if mode == "constant" else {}
    return np.pad(value, [(left, right) if i == axis else (0, 0) for i in range(value.ndim)], mode=mode, **more)


def _pad_value(name: str, prefix: str) -> int:
    """What a padding mask has at pads."""
    return -1 if name == "positions" else 0 if _KEYWORDS.get(name.removeprefix(prefix), True) else 1


def _library(context: Context) -> set[str]:
    return {part.__module__.split(".")[0] for part in type(context.system.model).__mro__} & {"transformers", "lowtri"}


def _padding(context: Context) -> Cases:
    """Pads on the right, on the left and on both sides, with two contents each, against the input alone."""
    name, n = str(pad_keyword(context)), context.n
    prefix, system = context.system.signature.prefix, context.system
    placed = name == "positions" or any(system.accepts(prefix + key) for key in ("position_ids", "positions"))
    library = _library(context)
    given, own = name in context.inputs.settings, ~context.ignored
    # What the caller does with the other side is not known.
    right_only = not own.all() and bool((own[:, :-1] >= own[:, 1:]).all())
    declared = ("lowtri" in library or given or context.options.pad_mask is not None) and not right_only
    try:
        # Without pads, but with positions passed the same way: some models start to count at another number by default.
        whole = system(pad(context, name, 0, 0, 300))
    except Exception:
        whole = context.base
    real, tried, warning, why = own, [], "", "its answer has another shape"
    leaking = by_amount = False
    for left, right in _AMOUNTS:
        cut = slice(left, left + n)
        examples = [pad(context, name, left, right, salt) for salt in (300, 301)]
        try:
            first, second = (system(example)[:, cut] for example in examples)
        except Exception as error:
            why = first_line(error)
            continue
        if first.shape != context.base.shape:
            continue
        tried.append([left, right])
        side = "left" if left else "right"
        by_content = compare(first, second, context.noise, real, same_order=True).status != "clean"
        pair = (second, first) if by_content else (first, whole)
        what = (
            f"the content of the pads on the {side}"
            if by_content
            else f"{left + right} pads on the {side} that are hidden from it"
        )
        if left and not by_content and by_amount:
            continue  # that the amount counts is known from the right
        # Many models of transformers take the keyword under left padding, and count positions from the pads.
        if left and (not declared or (not by_content and not placed and "transformers" in library)):
            moved = compare(*pair, context.noise, real, same_order=by_content)
            if moved.status == "leak":
                why = what if by_content else "having pads"
                warning = f"left padding is not kept with {name}: {why} moves real outputs, {describe_difference(moved.greatest)}"
            continue

        def leak(row: int, query: int, size: float, left: int = left, what: str = what) -> Leak:
            key = -1 if left else n  # counted as the real positions are
            return Leak(
                query, key, size, row, note=f"position {query} sees {what}: its output {describe_movement(size)}"
            )

        def two(row: int, q: int, content: bool = by_content, pads: Any = examples, left: int = left) -> Any:
            other = watch(context, pads[1], row, q + left) if content else watch(context, context.inputs, row, q)
            return watch(context, pads[0], row, q + left), other

        difference = yield Case(
            examples[0],
            real,
            leak,
            pair[1],
            lambda _, rows=pair[0]: rows,  # type: ignore[misc]
            same_order=by_content,
            watch=two,
        )
        differs = difference is not None and difference.status != "clean"
        leaking |= differs
        by_amount |= differs and not by_content
    measured = {"keyword": name, "tried": tried}
    skipped = "" if tried else f"the model does not run with {name} for a padded input: {why}"
    message = f"{{count}} of {len(tried)} ways to pad change real positions"
    clean = f"padded equals alone ({len(tried)} ways to pad)"
    return Summary(clean, message, measured, skipped, "" if leaking else warning)


def _no_padding(context: Context) -> str | None:
    name, prefix = pad_keyword(context), context.system.signature.prefix
    if name is None:
        return "the model takes no padding mask that is known (say pad_mask=)"
    known = {name, f"{prefix}position_ids", "token_type_ids"}
    if set(map(str, context.inputs.settings)) - known:
        return "other inputs follow the positions, and how to pad them is not known"
    table = context.declared
    own = table.shape[0] > 1 or not (table[0].diagonal().all() or not table[0].diagonal().any())
    return "the declared mask speaks of pads of its own" if own else None


PADDING = Trial(
    name="padding",
    does="adds pads on either side, with different contents and amounts",
    finds="pads that change outputs at real positions",
    function=_padding,
    needs=(Requirement("a padding mask", _no_padding), REPEATABLE),
    reshapes=True,
    argument="pad_mask",
)
