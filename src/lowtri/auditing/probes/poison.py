"""Put NaN where nobody may look: does it spread? A warning, never the verdict."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding

__all__ = ["poison"]


def poison(context: Context) -> Finding:
    """NaN and inf in hidden vectors against outputs that may not see them.

    Many right models spread it: 0 * NaN is NaN, and a masked softmax multiplies hidden values by 0.
    """
    if context.inputs.discrete and not (context.subject.form.torch or context.subject.module is not None):
        return Finding("poison", "skipped", "token ids hold no NaN, and the model does not compute in torch")
    spread: dict[str, int] = {}
    places = [q for q in context.places(6) if (~context.allowed[0, q]).any()]
    if not places:
        return Finding("poison", "skipped", "the mask hides nothing")
    for query in places:
        where = ~context.allowed[0, query]
        for name, value in (("nan", np.nan), ("inf", np.inf)):
            try:
                rows = _poisoned(context, where, value)
            except Exception:
                return Finding("poison", "skipped", "the model does not run with NaN or inf in its inputs")
            if rows is None:
                return Finding("poison", "skipped", "no look-up of the example's ids was found to poison")
            if rows.dtype.kind == "f":
                bad = ~np.isfinite(rows).all(axis=-1) & np.isfinite(context.base).all(axis=-1)
                spread[name] = spread.get(name, 0) + int((bad & context.untouched(where)).sum())
    total = sum(spread.values())
    if total:
        text = " and ".join(f"{name} ({count})" for name, count in spread.items() if count)
        return Finding("poison", "warning", f"hidden {text} reaches visible outputs", (), {"spread": spread})
    return Finding("poison", "clean", "hidden NaN and inf reach no visible output", (), {"spread": spread})


def _poisoned(context: Context, where: Any, value: float) -> Any:
    inputs = context.inputs
    if not inputs.discrete:
        from dataclasses import replace

        bad = replace(inputs, sequences=tuple(np.full_like(values, value) for values in inputs.sequences))
        with np.errstate(all="ignore"):
            return context.subject(inputs.change(where, bad))
    import torch

    from lowtri.auditing.leaves import run_with_leaves

    def put(vectors: Any) -> Any:
        axis = context.subject.form.position_axes[0]
        shape = [1] * vectors.dim()
        shape[axis] = -1
        return torch.where(torch.as_tensor(where, device=vectors.device).reshape(shape), value, vectors)

    with torch.no_grad():
        rows, leaves = run_with_leaves(context.subject, inputs, put)
    return rows.double().cpu().numpy() if leaves else None
