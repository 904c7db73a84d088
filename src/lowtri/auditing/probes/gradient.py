"""Differentiate: d output[i] / d input[j] must be exactly zero wherever the mask hides j from i."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak
from lowtri.auditing.probe import TORCH, Probe

__all__ = ["PROBE"]


def _gradient(context: Context) -> Finding:
    """One backward pass for each query, from a random cotangent, so that no sum over features can cancel.

    Finds leaks too small to move a float32 output; blind to every leak through a discrete choice (top-k, sort, argmax).
    """
    import torch

    from lowtri.auditing.leaves import run_with_leaves

    try:
        with torch.enable_grad():
            rows, leaves = run_with_leaves(
                context.adapter, context.inputs, lambda value: value.detach().clone().requires_grad_(True)
            )
    except Exception as error:
        return _skip(f"the model cannot be differentiated: {_first_line(error)}")
    if not leaves:
        return _skip("no look-up of the example's ids was found to differentiate by")
    if not (rows.is_floating_point() and rows.requires_grad):
        return _skip("the output carries no gradient")
    queries = context.queries()
    cotangents = np.random.default_rng([context.seed, 7]).standard_normal(rows.shape)
    batch, n = context.inputs.batch, context.n
    sizes = np.zeros((batch, len(queries), n))

    def reach(positions: list[int], *, last: bool = False) -> Any:
        """How far each input, (B, N), reaches any of these outputs."""
        cotangent = torch.as_tensor(cotangents[:, positions], dtype=rows.dtype, device=rows.device)
        found = torch.autograd.grad(rows[:, positions], leaves, cotangent, retain_graph=not last, allow_unused=True)
        by_leaf = [_by_position(context, grad, number) for number, grad in enumerate(found) if grad is not None]
        return np.max(by_leaf, axis=0) if by_leaf else np.zeros((batch, n))

    try:
        for done, query in enumerate(queries):
            if context.chosen is None:
                sizes[:, done] = reach([query], last=done + 1 == len(queries))
            elif not sizes.any() and (found := _one_of_many(context, query, reach)) is not None:
                queries[done] = found
                sizes[:, done] = reach([found])
            context.tick(done + 1, len(queries))
    except Exception as error:
        return _skip(f"the model cannot be differentiated: {_first_line(error)}")
    return _judge(context, sizes, queries)


def _one_of_many(context: Context, query: int, reach: Callable[[list[int]], Any]) -> int | None:
    """Of the outputs that see nothing hidden from the query, one that something hidden reaches, by halving."""
    where = ~context.allowed[:, query, :]  # (1 or B, N)
    many = [int(place) for place in np.flatnonzero(context.independent_of(where).all(axis=0))]
    if not where.any() or not np.where(where, reach(many), 0.0).any():
        return None
    while len(many) > 1:
        half = many[len(many) // 2 :]
        many = half if np.where(where, reach(half), 0.0).any() else many[: len(many) // 2]
    return many[0]


def _judge(context: Context, sizes: Any, queries: list[int]) -> Finding:
    finite = np.isfinite(sizes)
    for number, query in enumerate(queries):
        row = np.where(finite[:, number], sizes[:, number], 0).max(axis=0)
        context.seen[query] = np.fmax(context.seen[query], row)
    hidden = ~np.broadcast_to(context.allowed[:, queries], sizes.shape) & ~context.ignored[:, queries, None]
    scale = float(sizes[finite].max(initial=0.0))
    wrong = np.where(hidden & finite, sizes, 0.0)
    greatest = float(wrong.max())
    measured = {
        "queries": len(queries),
        "of": context.n,
        "every_pair": len(queries) == context.n,
        "greatest": greatest,
        "not_finite": int((hidden & ~finite).sum()),
    }
    kind = context.noise.classify(greatest, scale)
    looked = "every query" if len(queries) == context.n else f"{len(queries)} queries of {context.n}"
    if kind == "clean":
        return Finding("clean", f"no gradient reaches a hidden input ({looked})", (), measured)
    if kind == "leak":
        wrong[wrong <= context.noise.eps * scale] = 0.0
    leaks = _leaks(wrong, queries)
    return Finding(kind, f"{len(leaks)} hidden pairs have a gradient, up to {greatest:.2g}", leaks, measured)


def _leaks(sizes: Any, queries: list[int]) -> tuple[Leak, ...]:
    """Every positive entry of a table (B, len(queries), N) as a leak, the largest over the batch."""
    largest, row = sizes.max(axis=0), sizes.argmax(axis=0)
    found = []
    for index, key in np.argwhere(largest > 0).tolist():
        query, size = queries[index], float(largest[index, key])
        note = f"position {query} sees position {key}: d output {query} / d input {key} is {size:.2g}"
        found.append(Leak(query, key, size, int(row[index, key]), note=note))
    return tuple(found)


def _by_position(context: Context, grad: Any, number: int) -> Any:
    """The greatest gradient at each position, (B, N)."""
    signature = context.adapter.signature
    values = grad.detach().abs().double().cpu().numpy()
    axis = signature.position_axes[0 if context.inputs.discrete else number]
    if signature.batch_axis is None:
        values = np.moveaxis(values, axis, 0)[None]
    else:
        values = np.moveaxis(values, (signature.batch_axis, axis), (0, 1))
    values = values.reshape(values.shape[0], values.shape[1], -1)
    return np.asarray(np.broadcast_to(values.max(axis=-1), (context.inputs.batch, context.n)))


def _skip(reason: str) -> Finding:
    return Finding("skipped", reason)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


PROBE = Probe(
    name="gradient",
    does="one backward pass for each query from a random cotangent",
    finds="leaks too small to move a float32 output; blind to discrete choices",
    function=_gradient,
    needs=(TORCH,),
    pairs=True,
)
