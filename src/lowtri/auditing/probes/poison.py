"""Put NaN into hidden inputs and check whether it spreads. This gives a warning, never a leak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.adapter import Rows
from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.options import Bools
from lowtri.auditing.probe import Need, Probe

__all__ = ["PROBE"]


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
    known = context.adapter.in_torch or not context.inputs.discrete
    return None if known else "token ids hold no NaN, and the model does not compute in torch"


def _poisoned(context: Context, where: Bools, value: float) -> Rows | None:
    """The rows with `value` in the vectors of the positions `where`; None if the vectors of the ids are not found."""
    inputs = context.inputs
    if not inputs.discrete:
        bad = replace(inputs, sequences=tuple(np.full_like(values, value) for values in inputs.sequences))
        with np.errstate(all="ignore"):
            return context.adapter(inputs.change(where, bad))
    import torch

    from lowtri.auditing.leaves import run_with_leaves

    def poisoned(vectors: Any) -> Any:
        shape = [1] * vectors.dim()
        shape[context.adapter.signature.position_axes[0]] = -1
        return torch.where(torch.as_tensor(where, device=vectors.device).reshape(shape), value, vectors)

    with torch.no_grad():
        rows, leaves = run_with_leaves(context.adapter, inputs, poisoned)
    return rows.double().cpu().numpy() if leaves else None


PROBE = Probe(
    name="poison",
    does="puts NaN and inf into hidden inputs",
    finds="NaN that spreads; a warning only, since 0 * NaN is NaN in most correct models",
    function=_poison,
    needs=(Need("vectors, or torch", _no_vectors),),
)
