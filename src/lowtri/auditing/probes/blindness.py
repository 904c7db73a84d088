"""The opposite fault: something the mask shows that no output ever sees. A warning."""

from __future__ import annotations

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding

__all__ = ["blindness"]


def blindness(context: Context) -> Finding:
    """Visible pairs that neither moved with a change nor had a gradient, in everything the probes before have seen."""
    if context.discrete_output:
        return Finding("blindness", "skipped", "integer outputs move too rarely to say what is never seen")
    looked = ~np.isnan(context.seen)
    visible = (
        context.allowed & ~np.broadcast_to(~context.allowed.any(axis=1), context.allowed.shape[:2])[:, :, None]
    ).any(axis=0)
    blind = visible & looked & ~(np.nan_to_num(context.seen) > 0)
    count, of = int(blind.sum()), int((visible & looked).sum())
    if not of:
        return Finding("blindness", "skipped", "no visible pair was looked at")
    measured: dict[str, object] = {"blind": count, "visible": of, "looked_at": int(looked.sum())}
    if not count:
        return Finding("blindness", "clean", f"all {of} visible pairs looked at are seen", (), measured)
    query, key = (int(place) for place in np.argwhere(blind)[0])
    reach = [
        q - int(np.flatnonzero(row)[0]) + 1
        for q, row in enumerate(visible & (np.nan_to_num(context.seen) > 0))
        if row.any()
    ]
    message = (
        f"{count} of {of} visible pairs are never seen: output {query} does not move with input {key}, which the mask shows "
        f"(it sees at most {max(reach, default=0)} back)"
    )
    measured["first"] = [query, key]
    return Finding("blindness", "warning", message, (), measured)
