"""Trials of content and length (change, gradient, prefix, poison, sensitivity), and of other rows, pads and packed documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowtri.auditing.context import Condition, Context, Run, Sizes, compare, describe_difference
from lowtri.auditing.system import Bools, Inputs, Rows, first_line, positions_first
from lowtri.auditing.trial import Case, Cases, Finding, Leak, Skipped, Summary, trial


@trial(
    "change",
    "changes each input alone, then all inputs hidden from a query at once, token ids also to other ids of the same row",
    "leaks of content: every pair for short inputs, pairs found by bisection for long ones",
    pairs=True,
)
def change(context: Context) -> Cases:
    """Every key alone, and for every query all that is hidden from it at once, by random and by extreme values.

    Token ids are also changed to other ids of the same row: a leak of equality shows in no random draw from many ids.
    Short inputs are looked at pair by pair. Of long ones some positions are chosen, and a query that moves is
    bisected down to one key.
    """
    inputs, n, queries = context.inputs, context.n, context.queries()
    by_pair = context.condition == Condition()
    keys = queries if by_pair else []
    draws = context.options.draws * (4 if context.discrete_output else 1)
    kinds = [(100, "random"), (101, "extreme"), *([(102, "repeated")] if inputs.discrete else [])]
    if not by_pair and context.discrete_output:  # discrete answers move rarely
        kinds += [(103 + more, "random") for more in range(draws - 1)]
    for salt in range(draws):
        fresh = context.fresh(salt)
        for key in keys:
            where = np.arange(n) == key
            run, still = context.run(inputs.change(where, fresh)), context.independent_of(where)
            difference = yield Case(run, still, key=key, same_order=True, every=True, refusable=False, by_row=True)
            if difference is not None:
                context.seen[:, key] = np.fmax(context.seen[:, key], difference.moved.max(axis=0))
    for salt, kind in kinds:
        fresh = context.fresh(salt, kind)
        for query in queries:
            where = ~context.allowed[:, query]  # (1 or B, N): all that is hidden from the query
            if where.any():
                changed = inputs.change(where, context.repeated_token(query) if kind == "repeated" else fresh)
                # Nor may a query move that sees no more; one that is not looked at is found through one that is.
                still = context.independent_of(where) & ((np.arange(n) == query) | (len(queries) < n))
                # Extreme vectors may overflow on the way and reach an output as 0 * inf; that is counted, and is no leak.
                overflows = kind == "extreme" and not inputs.discrete
                run = context.run(changed)
                yield Case(run, still, same_order=True, refusable=False, overflows=overflows, keys=where)
    draws *= inputs.batch
    looked = "every pair" if len(keys) == n else f"{len(keys)} keys and {len(queries)} queries of {n}"
    extent = f"{looked}, {draws} draws and one extreme{', one of its own ids' if inputs.discrete else ''}"
    measured = {"draws": draws, "keys": len(keys), "queries": len(queries), "of": n, "every_pair": len(keys) == n}
    return Summary(f"no hidden input moves an output ({extent})", f"{{count}} pairs leak ({extent})", measured)


@trial(
    "gradient",
    "runs one backward pass for each query, from a random output gradient",
    "leaks too small to move a float32 output, but not leaks through discrete choices",
    needs="gradients",
    pairs=True,
)
def gradient(context: Context) -> Finding:
    """One backward pass for each query, from a random cotangent, so that no sum over features can cancel.

    Finds leaks too small to move a float32 output; blind to every leak through a discrete choice (top-k, sort, argmax).
    """
    if not context.system.in_torch:
        raise Skipped("the model does not compute in torch")
    import torch

    from lowtri.auditing.torch_hooks import run_with_leaves

    signature, batch, queries = context.system.signature, context.inputs.batch, context.queries()
    sizes = np.zeros((batch, len(queries), context.n))

    def by_position(grad: Any, number: int) -> Sizes:
        """The greatest gradient at each position, (B, N)."""
        axis = signature.position_axes[0 if context.inputs.discrete else number]
        values = positions_first(grad.detach().abs().double().cpu().numpy(), signature.batch_axis, axis)
        largest = values.reshape(values.shape[0], values.shape[1], -1).max(axis=-1)
        return np.broadcast_to(largest, (batch, context.n))

    def reach(positions: list[int], row: int | None = None) -> Sizes:
        """How far each input, (B, N), reaches any of these outputs (of one row)."""
        chosen = cotangents[:, positions]
        if row is not None:
            chosen = chosen * (np.arange(len(chosen)) == row)[:, None, None]
        cotangent = torch.as_tensor(chosen, dtype=rows.dtype, device=rows.device)
        grads = torch.autograd.grad(rows[:, positions], leaves, cotangent, retain_graph=True, allow_unused=True)
        by_leaf = [by_position(grad, number) for number, grad in enumerate(grads) if grad is not None]
        return np.max(by_leaf, axis=0) if by_leaf else np.zeros((batch, context.n))

    try:
        with torch.enable_grad():
            rows, leaves = run_with_leaves(
                context.system, context.inputs, lambda value: value.detach().clone().requires_grad_(True)
            )
        if not leaves:
            raise Skipped("no look-up of the example's ids was found to differentiate by")
        if not (rows.is_floating_point() and rows.requires_grad):
            raise Skipped("the output carries no gradient")
        cotangents = np.random.default_rng([context.options.seed, 7]).standard_normal(rows.shape)
        for done, query in enumerate(queries):
            if context.chosen is None:
                sizes[:, done] = reach([query])
            elif not sizes.any() and (reached := _reached(context, query, reach)) is not None:
                queries[done] = reached
                sizes[:, done] = reach([reached])
            context.show_progress(context.trial, done)
    except Skipped:
        raise
    except Exception as error:
        raise Skipped(f"the model cannot be differentiated: {first_line(error, typed=False)}") from error
    return _judge(context, sizes, queries, reach)


Reach = Callable[..., Sizes]


def _reached(context: Context, query: int, reach: Reach) -> int | None:
    """Of the outputs that see nothing hidden from the query, one that something hidden reaches, by halving."""
    where = ~context.allowed[:, query, :]  # (1 or B, N)
    outputs = np.flatnonzero(context.independent_of(where).all(axis=0)).tolist()
    if not where.any() or not np.where(where, reach(outputs), 0.0).any():
        return None
    while len(outputs) > 1:
        half = outputs[len(outputs) // 2 :]
        outputs = half if np.where(where, reach(half), 0.0).any() else outputs[: len(outputs) // 2]
    return int(outputs[0])


def _judge(context: Context, sizes: Sizes, queries: list[int], reach: Reach) -> Finding:
    """The finding from the gradients (B, queries, N)."""
    finite = np.isfinite(sizes)
    context.seen[queries] = np.fmax(context.seen[queries], np.where(finite, sizes, 0).max(axis=0))
    hidden = ~np.broadcast_to(context.allowed[:, queries], sizes.shape) & ~context.ignored[:, queries, None]
    scale = float(sizes[finite].max(initial=0.0))
    wrong = np.where(hidden & finite, sizes, 0.0)
    if len(sizes) > 1 and context.noise.classify(float(wrong.max()), scale) != "clean":
        # An output of another row may have the gradient; what is left is each row's own.
        for row, index in np.argwhere(wrong.any(axis=-1)).tolist():
            wrong[row, index] = np.minimum(wrong[row, index], np.nan_to_num(reach([queries[index]], row)[row]))
    greatest = float(wrong.max())
    measured = {"queries": len(queries), "of": context.n, "greatest": greatest}
    kind = context.noise.classify(greatest, scale)
    if kind == "clean":
        looked = "every query" if len(queries) == context.n else f"{len(queries)} queries of {context.n}"
        return Finding("clean", f"no gradient reaches a hidden input ({looked})", (), measured)
    if kind == "leak":
        wrong[wrong <= context.noise.eps * scale] = 0.0
    largest, rows = wrong.max(axis=0), wrong.argmax(axis=0)  # (queries, N)
    leaks = []
    for index, key in np.argwhere(largest > 0).tolist():
        query, size = queries[index], float(largest[index, key])
        note = f"position {query} sees position {key}: d output {query} / d input {key} is {size:.2g}"
        leaks.append(Leak(query, key, size, int(rows[index, key]), note=note))
    message = f"{len(leaks)} hidden pairs have a gradient, up to {greatest:.2g}"
    return Finding(kind, message, tuple(leaks), measured)


@trial(
    "prefix",
    "cuts the input off after t positions",
    "outputs that depend on the length of the input",
    needs="no random numbers",
    reshapes=True,
)
def prefix(context: Context) -> Cases:
    """The rows of the first t inputs alone against the same rows of the whole.

    Finds dependence on the length, which no change of content shows: statistics over time, positions counted from the
    end, buckets whose size follows the length.
    """
    _require_repeatable(context)
    measured: dict[str, list[int]] = {"lengths": [], "refused": []}
    for t in context.shorter():
        where = context.independent_of(np.arange(context.n) >= t)[:, :t]
        if where.any():
            run, before = context.run(context.inputs.span(0, t)), context.example.part(positions=slice(0, t))
            note = f"position {{query}} sees the length: output {{query}} {{moves}}{{comma}} when the input ends before {t}"
            difference = yield Case(run, where, note, t, before, by_row=True)
            measured["refused" if difference is None else "lengths"].append(t)
    tried = len(measured["lengths"])
    if not tried:
        raise Skipped("the model takes no shorter input", measured)
    message = f"{{count}} of {tried} shorter inputs have other outputs"
    return Summary(f"{tried} shorter inputs have the outputs of the whole", message, measured)


@trial(
    "poison",
    "puts NaN and inf into hidden inputs",
    "NaN that spreads; a warning only, since 0 * NaN is NaN in most correct models",
    needs="vectors, or torch",
)
def poison(context: Context) -> Finding:
    """NaN and inf in hidden vectors against outputs that may not see them.

    Many right models spread it: 0 * NaN is NaN, and a masked softmax multiplies hidden values by 0.
    """
    if context.inputs.discrete and not context.system.in_torch:
        raise Skipped("token ids cannot be NaN, and the model does not compute in torch")
    spread: dict[str, int] = {}
    queries = [q for q in context.sample(6) if not context.allowed[0, q].all()]
    if not queries:
        raise Skipped("the mask hides nothing")
    for query in queries:
        where = ~context.allowed[0, query]
        for name in ("nan", "inf"):
            try:
                rows = _poisoned(context, where, float(name))
            except Exception:
                raise Skipped("the model does not run with NaN or inf in its inputs") from None
            if rows is None:
                raise Skipped("no look-up of the example's ids was found to poison")
            if rows.dtype.kind == "f":
                bad = ~np.isfinite(rows).all(axis=-1) & np.isfinite(context.base).all(axis=-1)
                spread[name] = spread.get(name, 0) + int((bad & context.independent_of(where)).sum())
    text = " and ".join(f"{name} ({count})" for name, count in spread.items() if count)
    if text:
        return Finding("warning", f"hidden {text} reaches visible outputs", (), {"spread": spread})
    return Finding("clean", "hidden NaN and inf reach no visible output", (), {"spread": spread})


def _poisoned(context: Context, where: Bools, value: float) -> Rows | None:
    """The rows with `value` in the vectors of the positions `where`; None if the vectors of the ids are not found."""
    inputs = context.inputs
    if not inputs.discrete:
        bad = replace(inputs, sequences=tuple(np.full_like(values, value) for values in inputs.sequences))
        with np.errstate(all="ignore"):
            return context.system(inputs.change(where, bad))
    import torch

    from lowtri.auditing.torch_hooks import run_with_leaves

    def poisoned(vectors: Any) -> Any:
        shape = [1] * vectors.dim()
        shape[context.system.signature.position_axes[0]] = -1
        return torch.where(torch.as_tensor(where, device=vectors.device).reshape(shape), value, vectors)

    with torch.no_grad():
        rows, leaves = run_with_leaves(context.system, inputs, poisoned)
    return rows.double().cpu().numpy() if leaves else None


@trial(
    "sensitivity",
    "searches the recordings of the earlier trials for visible inputs that no output reacts to",
    "the opposite fault, as a warning: an input that the mask shows and no output uses",
    needs="float outputs",
)
def sensitivity(context: Context) -> Finding:
    """Visible pairs that neither moved with a change nor had a gradient, in everything the trials before have recorded."""
    if context.discrete_output:
        raise Skipped("integer outputs move too rarely to say what is never seen")
    looked, moved = ~np.isnan(context.seen), np.nan_to_num(context.seen) > 0
    visible = (context.allowed & ~context.ignored[:, :, None]).any(axis=0)
    unseen = visible & looked & ~moved
    count, of = int(unseen.sum()), int((visible & looked).sum())
    if not of:
        raise Skipped("no visible pair was looked at")
    measured: dict[str, object] = {"blind": count, "visible": of, "looked_at": int(looked.sum())}
    if not count:
        return Finding("clean", f"all {of} visible pairs looked at are seen", (), measured)
    query, key = np.argwhere(unseen)[0].tolist()
    reach = [q - int(np.flatnonzero(row)[0]) + 1 for q, row in enumerate(visible & moved) if row.any()]
    message = (
        f"{count} of {of} visible pairs are never seen: output {query} does not move with input {key}, which the mask shows "
        f"(it sees at most {max(reach, default=0)} back)"
    )
    return Finding("warning", message, (), {**measured, "first": [query, key]})


def _require_repeatable(context: Context) -> None:
    if context.noise.random:
        raise Skipped("the model draws random numbers, and another length draws others")


@trial(
    "batch",
    "changes each row of the batch in turn, and runs rows alone",
    "rows that depend on one another",
    needs="a batch",
    reshapes=True,
)
def batch(context: Context) -> Cases:
    """One row changed at a time, which no other row may notice; and rows alone, where the model takes a batch of one."""
    if context.system.signature.batch_axis is None:
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
            difference = yield Case(
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
        alone = yield Case(run, same, note, None, before.part(slice(row, row + 1)), (row, 0))
        measured["alone"] = alone if alone is None else max(alone.greatest, measured["alone"] or 0.0)
    return Summary("a row does not depend on its neighbours", "a row depends on its neighbours in the batch", measured)


def _three_rows(context: Context) -> Inputs:
    """The example and two changed copies of it as a batch of three."""
    inputs = context.inputs
    rows = zip(inputs.sequences, context.fresh(203).sequences, context.fresh(204).sequences, strict=True)
    return replace(inputs.rows([0, 0, 0]), sequences=tuple(map(np.concatenate, rows)))


def _key_of(context: Context, before: Run, fresh: Inputs, other: int, row: int, query: int) -> int:
    """One position of the other row that moves the output."""
    inputs, rows, positions = before.inputs, np.arange(before.inputs.batch)[:, None], np.arange(context.n)
    for key in context.sample(32):
        after = context.system(inputs.change((rows == other) & (positions == key), fresh))
        at = (rows == row) & (positions == query)
        if compare(before.output, after, context.noise, at, same_order=True).status != "clean":
            return key
    return 0


@trial(
    "packing",
    "runs each document of a packed row alone (`alone=`)",
    "outputs that differ in a packed row, from wrong boundaries or positions",
    needs="packed documents, no random numbers",
    reshapes=True,
    argument="alone",
)
def packing(context: Context) -> Cases:
    """Cut the row where no query sees across in the declared mask, and run each document alone.

    A document is run by `alone=` where it is given, else by the model itself when its per-position settings
    (document or position numbers) are part of the example and can be cut with it.
    """
    stops = np.cumsum(np.bincount(blocks(np.asarray(context.declared.any(axis=0))))).tolist()
    documents, alone, system = list(zip([0, *stops], stops, strict=False)), context.options.alone, context.system
    if len(documents) < 2:
        raise Skipped("the mask has one document")
    if alone is None and not context.inputs.settings:
        raise Skipped("how one document runs alone is not known (say alone=)")
    _require_repeatable(context)
    if alone is not None:
        system = replace(system, model=alone, signature=replace(system.signature, constants={}))
    compared, refused = 0, dict[str, str]()
    for start, stop in documents:
        inputs, before = context.inputs.span(start, stop), context.example.part(positions=slice(start, stop))
        run = Run(system, inputs if alone is None else Inputs(inputs.sequences), calls=None)
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
        yield Case(run, ~context.ignored[:, start:stop], note, key, before, (0, start))
    measured = {"documents": [list(document) for document in documents], "compared": compared, "refused": refused}
    if not compared:
        raise Skipped(f"no document could be run alone: {next(iter(refused.values()))}", measured)
    message = f"{{count}} of {compared} documents have other outputs packed"
    return Summary(f"{compared} documents have the same outputs packed and alone", message, measured)


def blocks(pairs: Bools) -> list[int]:
    """A number for each position, (N,), the same in each run of positions that no pair (N, N) crosses."""
    table = pairs | pairs.T
    furthest = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) if row.any() else q for q, row in enumerate(table)])
    return np.cumsum([0, *(furthest[:-1] < np.arange(1, len(table)))]).tolist()


_AMOUNTS = ((0, 3), (0, 8), (3, 0), (8, 0), (2, 5))
# Keywords that mark real positions, and whether True (or 1) means real.
_KEYWORDS = {"attention_mask": True, "padding_mask": True, "positions": True, "key_padding_mask": False}


def pad_keyword(context: Context) -> str | None:
    """The keyword that marks this model's real positions."""
    if context.options.pad_mask:
        return context.options.pad_mask
    names = [context.system.signature.prefix + name for name in _KEYWORDS]
    given = next((name for name in names if name in context.inputs.settings), None)
    # A signature alone is believed only of libraries whose words are known.
    accepted = (name for name in names if _library(context) and context.system.accepts(name))
    return given or next(accepted, None)


def real_positions(inputs: Inputs, prefix: str, pad_mask: str | None) -> Bools:
    """The positions (B, N) that the example's own padding mask does not mark as pads."""
    for name in filter(None, [pad_mask, *(prefix + name for name in _KEYWORDS)]):
        value = inputs.settings.get(name)
        if value is not None and value.shape in ((inputs.batch, inputs.n), (inputs.n,)):
            marks = value >= 0 if name.endswith("positions") else value.astype(bool) == (_pad_value(name, prefix) == 0)
            return np.broadcast_to(marks, (inputs.batch, inputs.n))
    return np.ones((inputs.batch, inputs.n), bool)


def pad(context: Context, name: str, left: int, right: int, salt: int) -> Inputs:
    """The example with pads around it, their content and that of its own pads drawn at random."""
    inputs, signature = context.inputs, context.system.signature
    pad_value, place = _pad_value(name, signature.prefix), f"{signature.prefix}position_ids"

    def wider(value: Any, axis: int, **more: Any) -> Any:
        return np.pad(value, [(left, right) if i == axis else (0, 0) for i in range(value.ndim)], **more)

    settings = {
        key: wider(value, value.ndim - 1, **({"constant_values": pad_value} if key == name else {"mode": "edge"}))
        for key, value in inputs.settings.items()
        if isinstance(value, np.ndarray)
    }
    wide = replace(inputs, sequences=tuple(wider(values, 1, mode="edge") for values in inputs.sequences))
    real = np.pad(np.broadcast_to(context.real, (inputs.batch, inputs.n)), ((0, 0), (left, right)))
    position = np.tile(np.arange(wide.n) - left, (inputs.batch, 1))
    if name == "positions":
        settings.setdefault(name, np.where(real, position, -1))
    else:
        marks = real.astype(np.int64) if pad_value == 0 else ~real
        settings.setdefault(name, marks[0] if signature.batch_axis is None else marks)
        if context.system.accepts(place):
            settings.setdefault(place, np.where(real, position, 0))
    return wide.change(~real, context.fresh(salt, inputs=wide)).having(settings)


def _pad_value(name: str, prefix: str) -> int:
    """What a padding mask has at pads."""
    return -1 if name == "positions" else 0 if _KEYWORDS.get(name.removeprefix(prefix), True) else 1


def _library(context: Context) -> set[str]:
    return {part.__module__.split(".")[0] for part in type(context.system.model).__mro__} & {"transformers", "lowtri"}


@trial(
    "padding",
    "adds pads on either side, with different contents and amounts",
    "pads that change outputs at real positions",
    needs="a padding mask, no random numbers",
    reshapes=True,
    argument="pad_mask",
)
def padding(context: Context) -> Cases:
    """Pads on the right, on the left and on both sides, with two contents each, against the input alone."""
    name, n, system, prefix = pad_keyword(context), context.n, context.system, context.system.signature.prefix
    if name is None:
        raise Skipped("the model takes no padding mask that is known (say pad_mask=)")
    arrays = {str(key) for key, value in context.inputs.settings.items() if isinstance(value, np.ndarray)}
    if arrays - {name, f"{prefix}position_ids", "token_type_ids"}:
        raise Skipped("other inputs follow the positions, and how to pad them is not known")
    table = context.declared
    if len(table) > 1 or not (table[0].diagonal().all() or not table[0].diagonal().any()):
        raise Skipped("the declared mask speaks of pads of its own")
    _require_repeatable(context)
    placed = name == "positions" or any(system.accepts(prefix + key) for key in ("position_ids", "positions"))
    library, real = _library(context), ~context.ignored
    # What the caller does with the other side is not known.
    right_only = not real.all() and bool((real[:, :-1] >= real[:, 1:]).all())
    given = "lowtri" in library or name in arrays or context.options.pad_mask is not None
    # Without pads, but with positions passed the same way: some models start to count at another number by default.
    whole = context.run(pad(context, name, 0, 0, 300))
    try:
        whole.output  # noqa: B018 (run)
    except Exception:
        whole = context.example
    tried, warning, why = [], "", "its answer has another shape"
    leaking = by_amount = False
    for left, right in _AMOUNTS:
        examples = [pad(context, name, left, right, salt) for salt in (300, 301)]
        try:
            first, second = (context.run(example).part(positions=slice(left, left + n)) for example in examples)
        except Exception as error:
            why = first_line(error)
            continue
        if first.output.shape != context.base.shape:
            continue
        tried.append([left, right])
        side = "left" if left else "right"
        by_content = compare(first.output, second.output, context.noise, real, same_order=True).status != "clean"
        if left and not by_content and by_amount:
            continue  # that the amount counts is known from the right
        what = f"{left + right} pads on the {side} that are hidden from it"
        before, run = whole, first
        if by_content:
            what, before, run = f"the content of the pads on the {side}", first, second
        # Many models of transformers take the keyword under left padding, and count positions from the pads.
        if left and (not given or right_only or (not by_content and not placed and "transformers" in library)):
            moved = compare(before.output, run.output, context.noise, real, same_order=by_content)
            if moved.status == "leak":
                why = what if by_content else "having pads"
                warning = f"left padding is not kept with {name}: {why} moves real outputs, {describe_difference(moved.greatest)}"
            continue
        note = f"position {{query}} sees {what}: its output {{moves}}"
        # The key is counted as the real positions are.
        difference = yield Case(run, real, note, -1 if left else n, before, same_order=by_content)
        differs = difference is not None and difference.status != "clean"
        leaking |= differs
        by_amount |= differs and not by_content
    measured = {"keyword": name, "tried": tried}
    if not tried:
        raise Skipped(f"the model does not run with {name} for a padded input: {why}", measured)
    message = f"{{count}} of {len(tried)} ways to pad change real positions"
    clean = f"padded equals alone ({len(tried)} ways to pad)"
    return Summary(clean, message, measured, "" if leaking else warning)
