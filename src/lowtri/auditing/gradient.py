"""Differentiate: d output[i] / d input[j] must be exactly zero wherever the mask hides j from i."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.context import TORCH, Context
from lowtri.auditing.finding import Finding, Leak
from lowtri.auditing.inputs import first_line, positions_first
from lowtri.auditing.trial import Trial

__all__ = ["GRADIENT"]

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
            context.tick(done + 1, len(queries))
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
        "every_pair": len(queries) == context.n,
        "greatest": greatest,
        "not_finite": int((hidden & ~finite).sum()),
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
