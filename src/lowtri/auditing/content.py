"""Trials of content and length: change inputs, differentiate, cut the input off, put NaN into it; and the opposite fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.context import REPEATABLE, TORCH, Bools, Context, Requirement
from lowtri.auditing.finding import Finding, Leak, describe_movement
from lowtri.auditing.inputs import Inputs, first_line, positions_first
from lowtri.auditing.system import Rows
from lowtri.auditing.trial import Case, Cases, Summary, Trial


def _change(context: Context) -> Cases:
    """Every key alone, and for every query all that is hidden from it at once, by random and by extreme values.

    Token ids are also changed to other ids of the same row: a leak of equality shows in no random draw from many ids.
    Short inputs are looked at pair by pair. Of long ones some positions are chosen, and a query that moves is
    bisected down to one key.
    """
    inputs, n, queries = context.inputs, context.n, context.queries()
    keys = queries if context.by_pair else []
    draws = context.options.draws * (4 if context.discrete_output else 1)
    sparse = len(queries) < n  # a query that is not looked at may be found through one that is
    kinds = [(100, "random"), (101, "extreme"), *([(102, "repeated")] if inputs.discrete else [])]
    if not context.by_pair and context.discrete_output:  # discrete answers move rarely
        kinds += [(103 + more, "random") for more in range(draws - 1)]
    for salt in range(draws):
        fresh = context.fresh(salt)
        for key in keys:
            where = np.arange(n) == key
            difference = yield Case(
                inputs.change(where, fresh),
                context.independent_of(where),
                lambda row, query, size, key=key: Leak(query, key, size, row),  # type: ignore[misc]
                same_order=True,
                every=True,
                refusable=False,
                by_row=True,
            )
            if difference is not None:
                context.record_movement(difference.moved.max(axis=0), key)
    for salt, kind in kinds:
        fresh = inputs if kind == "repeated" else context.fresh(salt, kind)
        for query in queries:
            if not context.allowed[:, query].all():
                yield _of_hidden(
                    context, query, context.repeated_token(query) if kind == "repeated" else fresh, kind, sparse
                )
    looked = "every pair" if len(keys) == n else f"{len(keys)} keys and {len(queries)} queries of {n}"
    own = ", one of its own ids" if inputs.discrete else ""
    extent = f"{looked}, {draws * inputs.batch} draws and one extreme{own}"
    measured = {
        "draws": draws * inputs.batch,
        "keys": len(keys),
        "queries": len(queries),
        "of": n,
        "every_pair": len(keys) == n,
    }
    return Summary(f"no hidden input moves an output ({extent})", f"{{count}} pairs leak ({extent})", measured)


def _of_hidden(context: Context, query: int, fresh: Inputs, kind: str, sparse: bool) -> Case:
    """All that is hidden from a query; it must not move, and neither must one that sees no more of it."""
    where, positions = ~context.allowed[:, query], np.arange(context.n)  # (1 or B, N)
    hidden = context.independent_of(where)

    return Case(
        context.inputs.change(where, fresh),
        hidden if sparse else hidden & (positions == query),
        lambda row, position, size: Leak(position, position, size, row),
        same_order=True,
        # Extreme vectors may overflow on the way and reach an output as 0 * inf; that is counted, and is no leak.
        non_finite=np.inf if kind != "extreme" or context.inputs.discrete else 0.0,
        refusable=False,
        keys=where,
    )


def _prefix(context: Context) -> Cases:
    """The rows of the first t inputs alone against the same rows of the whole.

    Finds dependence on the length, which no change of content shows: statistics over time, positions counted from the
    end, buckets whose size follows the length.
    """
    lengths = [t for t in context.chosen or context.sample(16) if t > 0]
    refused: list[int] = []
    tried: list[int] = []
    for t in lengths:
        where = context.independent_of(np.arange(context.n) >= t)[:, :t]
        if where.any():

            def leak(row: int, query: int, size: float, t: int = t) -> Leak:
                how = describe_movement(size, f" when the input ends before {t}")
                return Leak(query, t, size, row, note=f"position {query} sees the length: output {query} {how}")

            difference = yield Case(context.inputs.span(0, t), where, leak, context.base[:, :t], by_row=True)
            (refused if difference is None else tried).append(t)
    measured = {"lengths": tried, "refused": refused}
    message = f"{{count}} of {len(tried)} shorter inputs have other outputs"
    skipped = "" if tried else "the model takes no shorter input"
    return Summary(f"{len(tried)} shorter inputs have the outputs of the whole", message, measured, skipped)


def _poison(context: Context) -> Finding:
    """NaN and inf in hidden vectors against outputs that may not see them.

    Many right models spread it: 0 * NaN is NaN, and a masked softmax multiplies hidden values by 0.
    """
    spread: dict[str, int] = {}
    queries = [q for q in context.sample(6) if not context.allowed[0, q].all()]
    if not queries:
        return Finding("skipped", "the mask hides nothing")
    for query in queries:
        where = ~context.allowed[0, query]
        for name in ("nan", "inf"):
            try:
                rows = _poisoned(context, where, float(name))
            except Exception:
                return Finding("skipped", "the model does not run with NaN or inf in its inputs")
            if rows is None:
                return Finding("skipped", "no look-up of the example's ids was found to poison")
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


def _sensitivity(context: Context) -> Finding:
    """Visible pairs that neither moved with a change nor had a gradient, in everything the trials before have recorded."""
    looked, moved = ~np.isnan(context.seen), np.nan_to_num(context.seen) > 0
    visible = (context.allowed & ~context.ignored[:, :, None]).any(axis=0)
    unseen = visible & looked & ~moved
    count, of = int(unseen.sum()), int((visible & looked).sum())
    if not of:
        return Finding("skipped", "no visible pair was looked at")
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


CHANGE = Trial(
    name="change",
    does="changes each input alone, then all inputs hidden from a query at once, token ids also to other ids "
    "of the same row",
    finds="leaks of content: every pair for short inputs, pairs found by bisection for long ones",
    function=_change,
    pairs=True,
)
PREFIX = Trial(
    name="prefix",
    does="cuts the input off after t positions",
    finds="outputs that depend on the length of the input",
    function=_prefix,
    needs=(REPEATABLE,),
    reshapes=True,
)
POISON = Trial(
    name="poison",
    does="puts NaN and inf into hidden inputs",
    finds="NaN that spreads; a warning only, since 0 * NaN is NaN in most correct models",
    function=_poison,
    needs=(
        Requirement(
            "vectors, or torch",
            lambda c: (
                None
                if c.system.in_torch or not c.inputs.discrete
                else "token ids cannot be NaN, and the model does not compute in torch"
            ),
        ),
    ),
)
SENSITIVITY = Trial(
    name="sensitivity",
    does="searches the recordings of the earlier trials for visible inputs that no output reacts to",
    finds="the opposite fault, as a warning: an input that the mask shows and no output uses",
    function=_sensitivity,
    needs=(
        Requirement(
            "float outputs",
            lambda c: "integer outputs move too rarely to say what is never seen" if c.discrete_output else None,
        ),
    ),
)


Sizes = npt.NDArray[np.float64]
Reach = Callable[..., Sizes]


def _gradient(context: Context) -> Finding:
    """One backward pass for each query, from a random cotangent, so that no sum over features can cancel.

    Finds leaks too small to move a float32 output; blind to every leak through a discrete choice (top-k, sort, argmax).
    """
    import torch

    from lowtri.auditing.torch_hooks import run_with_leaves

    try:
        with torch.enable_grad():
            rows, leaves = run_with_leaves(
                context.system, context.inputs, lambda value: value.detach().clone().requires_grad_(True)
            )
    except Exception as error:
        return _not_differentiable(error)
    if not leaves:
        return Finding("skipped", "no look-up of the example's ids was found to differentiate by")
    if not (rows.is_floating_point() and rows.requires_grad):
        return Finding("skipped", "the output carries no gradient")
    queries = context.queries()
    cotangents = np.random.default_rng([context.options.seed, 7]).standard_normal(rows.shape)
    sizes = np.zeros((context.inputs.batch, len(queries), context.n))

    def reach(positions: list[int], row: int | None = None) -> Sizes:
        """How far each input, (B, N), reaches any of these outputs (of one row)."""
        chosen = cotangents[:, positions]
        if row is not None:
            chosen = chosen * (np.arange(len(chosen)) == row)[:, None, None]
        cotangent = torch.as_tensor(chosen, dtype=rows.dtype, device=rows.device)
        grads = torch.autograd.grad(rows[:, positions], leaves, cotangent, retain_graph=True, allow_unused=True)
        by_leaf = [_by_position(context, grad, number) for number, grad in enumerate(grads) if grad is not None]
        return np.max(by_leaf, axis=0) if by_leaf else np.zeros((context.inputs.batch, context.n))

    try:
        for done, query in enumerate(queries):
            if context.chosen is None:
                sizes[:, done] = reach([query])
            elif not sizes.any() and (reached := _reached(context, query, reach)) is not None:
                queries[done] = reached
                sizes[:, done] = reach([reached])
            context.show_progress(context.trial, done)
    except Exception as error:
        return _not_differentiable(error)
    return _judge(context, sizes, queries, reach)


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
    measured = {
        "queries": len(queries),
        "of": context.n,
        "greatest": greatest,
    }
    kind = context.noise.classify(greatest, scale)
    if kind == "clean":
        looked = "every query" if len(queries) == context.n else f"{len(queries)} queries of {context.n}"
        return Finding("clean", f"no gradient reaches a hidden input ({looked})", (), measured)
    if kind == "leak":
        wrong[wrong <= context.noise.eps * scale] = 0.0
    largest, row = wrong.max(axis=0), wrong.argmax(axis=0)  # (queries, N)
    leaks = []
    for index, key in np.argwhere(largest > 0).tolist():
        query, size = queries[index], float(largest[index, key])
        note = f"position {query} sees position {key}: d output {query} / d input {key} is {size:.2g}"
        leaks.append(Leak(query, key, size, int(row[index, key]), note=note))
    message = f"{len(leaks)} hidden pairs have a gradient, up to {greatest:.2g}"
    return Finding(kind, message, tuple(leaks), measured)


def _by_position(context: Context, grad: Any, number: int) -> Sizes:
    """The greatest gradient at each position, (B, N)."""
    signature = context.system.signature
    axis = signature.position_axes[0 if context.inputs.discrete else number]
    values = positions_first(grad.detach().abs().double().cpu().numpy(), signature.batch_axis, axis)
    largest = values.reshape(values.shape[0], values.shape[1], -1).max(axis=-1)
    return np.broadcast_to(largest, (context.inputs.batch, context.n))


def _not_differentiable(error: Exception) -> Finding:
    return Finding("skipped", f"the model cannot be differentiated: {first_line(error, typed=False)}")


GRADIENT = Trial(
    name="gradient",
    does="runs one backward pass for each query, from a random output gradient",
    finds="leaks too small to move a float32 output, but not leaks through discrete choices",
    function=_gradient,
    needs=(TORCH,),
    pairs=True,
)
