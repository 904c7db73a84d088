"""Probes of content and length: change, gradient, prefix, poison, sensitivity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import DRAWS, EXACT, EXAMPLE, Context, Sizes
from lowtri.auditing.example import Bools, Rows, first_line, positions_first
from lowtri.auditing.probe import (
    Leak,
    PairOfRuns,
    PairsOfRuns,
    ProbeResult,
    Skipped,
    Summary,
    probe,
    require_repeatable,
)


@probe(
    "change",
    "changes each input alone, then all inputs hidden from a query at once, token ids also to other ids of the same row",
    "leaks of content: every pair for short inputs, pairs found by bisection for long ones",
    pairs=True,
)
def change(context: Context) -> PairsOfRuns:
    inputs, n = context.inputs, context.n
    queries = context.queries()
    by_pair = context.condition == EXAMPLE
    keys = queries if by_pair else []
    if by_pair and context.is_large and n <= EXACT:
        keys = list(range(n))
    draws = 1 if context.is_large else DRAWS
    draws *= 16 if context.discrete_output and not context.is_large else 1  # indices move rarely
    kinds = [(100, "random"), (101, "extreme"), *([(102, "repeated")] if inputs.discrete else [])]
    if context.is_large and not by_pair:
        kinds = kinds[:1]
    if not by_pair and context.discrete_output:  # discrete answers move rarely
        kinds += [(103 + more, "random") for more in range(draws - 1)]
    depends, least = np.zeros((inputs.batch, n, n), bool), context.noise.dependence
    for salt in range(draws):
        fresh = context.fresh(salt)
        for key in keys:
            where = np.arange(n) == key
            run, still = context.run(inputs.change(where, fresh)), context.independent_of(where)
            difference = yield PairOfRuns(
                run, still, key=key, same_order=True, all_positions=True, refusable=False, isolate_row=True
            )
            if difference is not None:
                context.seen[:, key] = np.fmax(context.seen[:, key], difference.moved.max(axis=0))
                depends[:, :, key] |= difference.moved > least
    if len(keys) == n:
        context.depends = depends
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
                yield PairOfRuns(run, still, same_order=True, refusable=False, overflows=overflows, keys=where)
    draws *= inputs.batch
    looked = "every pair" if len(keys) == n else f"{len(keys)} keys and {len(queries)} queries of {n}"
    extent = f"{looked}, {draws} draws and one extreme{', one of its own ids' if inputs.discrete else ''}"
    measured = {"draws": draws, "keys": len(keys), "queries": len(queries), "of": n, "every_pair": len(keys) == n}
    return Summary(f"no hidden input moves an output ({extent})", f"{{count}} pairs leak ({extent})", measured)


@probe(
    "gradient",
    "runs one backward pass for each query, from a random output gradient",
    "leaks too small to move a float32 output, but not leaks through discrete choices",
    needs="gradients",
    pairs=True,
)
def gradient(context: Context) -> ProbeResult:
    if not context.tested.in_torch:
        raise Skipped("the model does not compute in torch")
    import torch

    from lowtri.auditing.torch_hooks import run_with_leaves

    signature, batch = context.tested.signature, context.inputs.batch
    queries = context.queries()
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
                context.tested, context.inputs, lambda value: value.detach().clone().requires_grad_(True)
            )
        if not leaves:
            raise Skipped("no look-up of the example's ids was found to differentiate by")
        if not (rows.is_floating_point() and rows.requires_grad):
            raise Skipped("the output carries no gradient")
        # Random, so that no sum over features can cancel.
        cotangents = np.random.default_rng([context.tested.seed, 7]).standard_normal(rows.shape)
        for done, query in enumerate(queries):
            if context.chosen is None:
                sizes[:, done] = reach([query])
            elif not sizes.any() and (reached := _reached(context, query, reach)) is not None:
                queries[done] = reached
                sizes[:, done] = reach([reached])
            context.show_progress(f"{context.probe}, run {done}")
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


def _judge(context: Context, sizes: Sizes, queries: list[int], reach: Reach) -> ProbeResult:
    """The finding from the gradients (B, queries, N)."""
    finite = np.isfinite(sizes)
    context.seen[queries] = np.fmax(context.seen[queries], np.where(finite, sizes, 0).max(axis=0))
    hidden = ~np.broadcast_to(context.allowed[:, queries], sizes.shape) & context.real[:, queries, None]
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
        return ProbeResult("clean", f"no gradient reaches a hidden input ({looked})", (), measured)
    if kind == "leak":
        wrong[wrong <= context.noise.eps * scale] = 0.0
    largest, rows = wrong.max(axis=0), wrong.argmax(axis=0)  # (queries, N)
    leaks = []
    for index, key in np.argwhere(largest > 0).tolist():
        query, size = queries[index], float(largest[index, key])
        note = f"position {query} sees position {key}: d output {query} / d input {key} is {size:.2g}"
        leaks.append(Leak(query, key, size, int(rows[index, key]), note=note))
    message = f"{len(leaks)} hidden pairs have a gradient, up to {greatest:.2g}"
    return ProbeResult(kind, message, tuple(leaks), measured)


@probe(
    "prefix",
    "cuts the input off after t positions",
    "outputs that depend on the length of the input",
    needs="no random numbers",
    reshapes=True,
)
def prefix(context: Context) -> PairsOfRuns:
    # The length may come in by statistics over time, positions counted from the end, buckets whose size follows it.
    require_repeatable(context)
    measured: dict[str, list[int]] = {"lengths": [], "refused": []}
    for t in context.shorter():
        where = context.independent_of(np.arange(context.n) >= t)[:, :t]
        if where.any():
            run, before = context.run(context.inputs.span(0, t)), context.example.part(positions=slice(0, t))
            note = f"position {{query}} sees the length: output {{query}} {{moves}}{{comma}} when the input ends before {t}"
            difference = yield PairOfRuns(run, where, note, t, before, isolate_row=True)
            measured["refused" if difference is None else "lengths"].append(t)
    tried = len(measured["lengths"])
    if not tried:
        raise Skipped("the model takes no shorter input", measured)
    message = f"{{count}} of {tried} shorter inputs have other outputs"
    return Summary(f"{tried} shorter inputs have the outputs of the whole", message, measured)


@probe(
    "poison",
    "puts NaN and inf into hidden inputs",
    "NaN that spreads; a warning only, since 0 * NaN is NaN in most correct models",
    needs="vectors, or torch",
)
def poison(context: Context) -> ProbeResult:
    if context.inputs.discrete and not context.tested.in_torch:
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
        return ProbeResult("warning", f"hidden {text} reaches visible outputs", (), {"spread": spread})
    return ProbeResult("clean", "hidden NaN and inf reach no visible output", (), {"spread": spread})


def _poisoned(context: Context, where: Bools, value: float) -> Rows | None:
    """The rows with `value` in the vectors of the positions `where`; None if the vectors of the ids are not found."""
    inputs = context.inputs
    if not inputs.discrete:
        bad = replace(inputs, sequences=tuple(np.full_like(values, value) for values in inputs.sequences))
        with np.errstate(all="ignore"):
            return context.tested(inputs.change(where, bad))
    import torch

    from lowtri.auditing.torch_hooks import run_with_leaves

    def poisoned(vectors: Any) -> Any:
        shape = [1] * vectors.dim()
        shape[context.tested.signature.position_axes[0]] = -1
        return torch.where(torch.as_tensor(where, device=vectors.device).reshape(shape), value, vectors)

    with torch.no_grad():
        rows, leaves = run_with_leaves(context.tested, inputs, poisoned)
    return rows.double().cpu().numpy() if leaves else None


@probe(
    "sensitivity",
    "lists visible inputs that affect no output, from what the earlier probes recorded",
    "the opposite fault, as a warning: an input that the mask shows and no output uses",
    needs="float outputs",
)
def sensitivity(context: Context) -> ProbeResult:
    if context.discrete_output:
        raise Skipped("integer outputs move too rarely to say what is never seen")
    looked, moved = ~np.isnan(context.seen), np.nan_to_num(context.seen) > 0
    visible = (context.allowed & context.real[:, :, None]).any(axis=0)
    unseen = visible & looked & ~moved
    count, of = int(unseen.sum()), int((visible & looked).sum())
    if not of:
        raise Skipped("no visible pair was looked at")
    measured: dict[str, object] = {"blind": count, "visible": of, "looked_at": int(looked.sum())}
    if not count:
        return ProbeResult("clean", f"all {of} visible pairs looked at are seen", (), measured)
    query, key = np.argwhere(unseen)[0].tolist()
    reach = [q - int(np.flatnonzero(row)[0]) + 1 for q, row in enumerate(visible & moved) if row.any()]
    message = (
        f"{count} of {of} visible pairs are never seen: output {query} does not move with input {key}, which the mask shows "
        f"(it sees at most {max(reach, default=0)} back)"
    )
    return ProbeResult("warning", message, (), {**measured, "first": [query, key]})
