"""The backend ``sdpa``: torch's own fused attention, with ``is_causal`` or without a mask where that is equivalent, else with a table.

torch multiplies hidden values by a weight of 0, so a NaN that is hidden from *some* queries spreads to them; it may also drop a
NaN or an infinity that a query does see. Under ``engine="auto"`` the inputs are inspected; unless they are finite and moderate, the
next backend of the rules runs instead. Keys hidden from *every* query (padding, cache tails) are set to 0 before the call; queries that
see nothing give 0.
"""

from __future__ import annotations

from lowtri.backends.base import Prepared
from lowtri.masks.formulas import causal
from lowtri.ops.call import Call

__all__ = ["name", "prepare", "supports", "why_not_inspected", "why_table"]

name = "sdpa"


def supports(call: Call) -> str | None:
    """Reject what torch's function has no argument for."""
    missing = {
        "the arrays are NumPy's": call.is_numpy,
        f"{call.transformation}, which it does not have": call.transformation == "inside forward-mode differentiation",
        "it has no softcap": call.softcap is not None,
        "it has no sinks": call.sinks is not None,
        "it takes a bias of all pairs, not of distances": call.distance_low is not None,
        "it does not return weights": call.return_weights,
        "it does not return log-sum-exp": call.return_lse,
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def why_table(call: Call) -> str | None:
    """Why no single argument of torch's function expresses the mask, or None."""
    needs_none = call.bias is None and (call.shows_all or _is_torch_causal(call))
    return why_not_inspected(call) or (None if needs_none else "its mask has to be passed as a table of all pairs")


def why_not_inspected(call: Call) -> str | None:
    """Why the inputs cannot be inspected for NaN, infinity and huge numbers, or None."""
    return f"{call.transformation}, where its inputs cannot be inspected" if call.transformation else None


def prepare(call: Call) -> Prepared:
    """Prepare ``is_causal`` or no mask where that is equivalent, else a table."""
    from lowtri.backends.sdpa.fused import Fused

    is_causal = call.bias is None and _is_torch_causal(call)
    return Fused(call, is_causal, with_table=not (is_causal or (call.bias is None and call.shows_all)))


def _is_torch_causal(call: Call) -> bool:
    """Whether torch's is_causal (key index <= query index) is equivalent: queries and keys at the same positions."""
    return not call.positions_given and call.q.shape[2] == call.k.shape[2] and call.mask == causal()
