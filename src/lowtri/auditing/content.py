"""Trials of content and length: change inputs, cut the input off, put NaN into it; and the opposite fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import REPEATABLE, Context, Need
from lowtri.auditing.finding import Difference, Finding, Leak, compare, moves
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.options import Bools
from lowtri.auditing.system import Rows
from lowtri.auditing.trial import Case, Cases, Summary, Trial

__all__ = ["CHANGE", "POISON", "PREFIX", "SENSITIVITY"]


def _change(context: Context) -> Cases:
    """Every key alone, and for every query all that is hidden from it at once, by random and by extreme values.

    Token ids are also changed to what the row itself holds: a leak of equality shows in no random draw from many ids.
    Short inputs are looked at pair by pair. Of long ones some positions are chosen, and a query that moves is
    bisected down to one key.
    """
    inputs, n, queries = context.inputs, context.n, context.queries()
    keys = queries if context.by_pair else []
    draws = context.options.draws * (4 if context.discrete_output else 1)
    sparse = len(queries) < n  # a query that is not looked at may be found through one that is
    kinds = [(100, "random"), (101, "extreme"), *([(102, "echoed")] if inputs.discrete else [])]
    if not context.by_pair and context.discrete_output:  # discrete answers move rarely
        kinds += [(103 + more, "random") for more in range(draws - 1)]
    total, done = draws * len(keys) + len(kinds) * len(queries), 0
    for salt in range(draws):
        fresh = context.fresh(salt)
        for key in keys:
            difference = yield _of_key(context, key, fresh)
            if difference is not None:
                context.see(difference.moved.max(axis=0), key)
            done += 1
            context.tick(done, total)
    for salt, kind in kinds:
        fresh = inputs if kind == "echoed" else context.fresh(salt, kind)
        for query in queries:
            done += 1
            context.tick(done, total)
            if not context.allowed[:, query].all():
                yield _of_hidden(context, query, context.echoed(query) if kind == "echoed" else fresh, kind, sparse)
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


def _of_key(context: Context, key: int, fresh: Inputs) -> Case:
    """One key, everywhere in the batch: one column of the table of pairs."""
    where = np.arange(context.n) == key

    def only(row: int) -> Difference:
        rows = context.system(context.inputs.change(where & (np.arange(context.inputs.batch)[:, None] == row), fresh))
        return context.compare(rows, same_order=True)

    return Case(
        context.inputs.change(where, fresh),
        context.independent_of(where),
        lambda row, query, size: Leak(query, key, size, row),
        same_order=True,
        every=True,
        refusable=False,
        only=only,
    )


def _of_hidden(context: Context, query: int, fresh: Inputs, kind: str, sparse: bool) -> Case:
    """All that is hidden from a query; it must not move, and neither must one that sees no more of it."""
    where, positions = ~context.allowed[:, query], np.arange(context.n)  # (1 or B, N)
    hidden = context.independent_of(where)

    def narrow(keys: Any, row: int) -> Inputs:
        one = np.arange(context.inputs.batch)[:, None] == row
        return context.inputs.change(np.isin(positions, keys) & one, fresh)

    return Case(
        context.inputs.change(where, fresh),
        hidden if sparse else hidden & (positions == query),
        lambda row, position, size: Leak(position, position, size, row),
        same_order=True,
        # Extreme vectors may overflow on the way and reach an output as 0 * inf; that is counted, and is no leak.
        non_finite=np.inf if kind != "extreme" or context.inputs.discrete else 0.0,
        refusable=False,
        narrow=narrow,
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
    for done, t in enumerate(lengths):
        where = context.independent_of(np.arange(context.n) >= t)[:, :t]
        if where.any():
            difference = yield _cut_off(context, t, where)
            (refused if difference is None else tried).append(t)
            context.tick(done + 1, len(lengths))
    measured = {"lengths": tried, "refused": refused}
    message = f"{{count}} of {len(tried)} shorter inputs answer differently"
    skipped = "" if tried else "the model takes no shorter input"
    return Summary(f"{len(tried)} shorter inputs answer as the whole does", message, measured, skipped)


def _cut_off(context: Context, t: int, where: Bools) -> Case:
    def only(row: int) -> Difference | None:
        try:
            one = context.inputs.rows([row])
            whole, short = context.system(one)[:, :t], context.system(one.span(0, t))
            difference = compare(whole, short, context.noise, where[row])
        except Exception:
            return None
        sizes = np.zeros(where.shape)
        sizes[row] = difference.sizes[0]
        return replace(difference, sizes=sizes)

    def leak(row: int, query: int, size: float) -> Leak:
        how = moves(size, f" when the input ends before {t}")
        return Leak(query, t, size, row, note=f"position {query} sees the length: output {query} {how}")

    return Case(context.inputs.span(0, t), where, leak, context.base[:, :t], only=only, watch=_shorter(context, t))


def _shorter(context: Context, t: int) -> Any:
    from lowtri.auditing.trial import watch

    short = context.inputs.span(0, t)
    return lambda row, q: (watch(context, context.inputs, row, q), watch(context, short, row, q))


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


def _no_vectors(context: Context) -> str | None:
    known = context.system.in_torch or not context.inputs.discrete
    return None if known else "token ids hold no NaN, and the model does not compute in torch"


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


def _discrete(context: Context) -> str | None:
    return "integer outputs move too rarely to say what is never seen" if context.discrete_output else None


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
    needs=(Need("vectors, or torch", _no_vectors),),
)
SENSITIVITY = Trial(
    name="sensitivity",
    does="searches the recordings of the earlier trials for visible inputs that no output reacts to",
    finds="the opposite fault, as a warning: an input that the mask shows and no output uses",
    function=_sensitivity,
    needs=(Need("float outputs", _discrete),),
)
