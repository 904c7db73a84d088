"""The opposite fault, reported as a warning: inputs that the mask shows and no output depends on."""

from __future__ import annotations

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding
from lowtri.auditing.probe import Need, Probe

__all__ = ["PROBE"]


def _sensitivity(context: Context) -> Finding:
    """Visible pairs that neither moved with a change nor had a gradient, in everything the probes before have recorded."""
    looked, moved = ~np.isnan(context.seen), np.nan_to_num(context.seen) > 0
    visible = (context.allowed & np.asarray(context.allowed.any(axis=1))[:, :, None]).any(axis=0)
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


PROBE = Probe(
    name="sensitivity",
    does="searches the recordings of the earlier probes for visible inputs that no output reacts to",
    finds="the opposite fault, as a warning: an input that the mask shows and no output uses",
    function=_sensitivity,
    needs=(Need("float outputs", _discrete),),
)
