"""The backend ``sdpa``: torch's own fused attention, with ``is_causal`` or without a mask where that is equivalent, else with a table.

torch multiplies hidden values by a weight of 0, so a NaN that is hidden from *some* queries spreads to them; it may also drop a
NaN or an infinity that a query does see. Under ``engine="auto"`` the inputs are inspected; unless they are finite and moderate, the
backend ``formula`` runs instead. Keys hidden from *every* query (padding, cache tails) are set to 0 before the call; queries that
see nothing give 0.
"""

from __future__ import annotations

import math

from lowtri.backends.base import Prepared
from lowtri.masks.formulas import causal, full
from lowtri.ops.call import Call

__all__ = ["cost", "name", "prepare", "supports"]

name = "sdpa"

_NEVER = 1e9  # while another backend supports the call
_TABLE_PAIRS = 2**24  # above, a table costs more than the formula's tiles

# Microseconds for a call, the inspection of its inputs included, and for a million multiplications; for few queries for a million
# numbers of K and V. Fitted by benchmarks/costs.py as those of the backend cpu.
_FORWARD = {"float32": (50, 52), "bfloat16": (90, 54), "float16": (90, 93)}
_TRAINING = {"float32": (460, 150), "bfloat16": (545, 910), "float16": (450, 1530)}
_READING = {"float32": 660, "bfloat16": 1520, "float16": 3300}


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


def cost(call: Call) -> float:
    """All pairs, or half of them under ``is_causal``; for few queries the time to read the keys and values."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    products: float = batch * heads * nq * nk * (d + dv)  # multiplications
    table = 0.0
    if not (call.bias is None and (call.mask == full() or _is_torch_causal(call))):
        tables = math.prod(call.mask.batch) * max(len(call.q_positions), len(call.k_positions))
        table = (500 if call.needs_grad else 100) + nq * nk * tables / 500
        table += _NEVER if nq * nk * tables > _TABLE_PAIRS else 0
    elif _is_torch_causal(call):
        products /= 2
    if call.transformation:  # the inputs cannot be inspected
        table += _NEVER
    if call.device != "cpu":  # a guess, on the scale of the backends varlen and flex
        return 50 + table + products / 25_000
    of_dtype = _TRAINING if call.needs_grad else _FORWARD
    fixed, rate = of_dtype.get(call.dtype, of_dtype["float32"])
    reading = batch * kv_heads * nk * (d + dv) * _READING.get(call.dtype, _READING["float32"])
    return fixed + table + max(products * rate, reading) / 1e6


def prepare(call: Call) -> Prepared:
    """Prepare ``is_causal`` or no mask where that is equivalent, else a table."""
    from lowtri.backends.sdpa.fused import Fused

    is_causal = call.bias is None and _is_torch_causal(call)
    return Fused(call, is_causal, with_table=not (is_causal or (call.bias is None and call.shows_all)))


def _is_torch_causal(call: Call) -> bool:
    """Whether torch's is_causal (key index <= query index) is equivalent: queries and keys at the same positions."""
    return not call.positions_given and call.q.shape[2] == call.k.shape[2] and call.mask == causal()
