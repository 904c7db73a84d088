"""Plans, kept: one for each mask and its positions, the newest ones, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.engines.descriptor import Fields, of_plan
from lowtri.masks.mask import FULL
from lowtri.masks.plan import Plan, plan
from lowtri.ops.call import Call

__all__ = ["Kept", "all_seen", "asked", "between", "plan_of"]

_PLAN_BYTES = 64 * 2**20
_plans: OrderedDict[Any, Kept] = OrderedDict()
_lock = Lock()


class Kept(NamedTuple):
    plan: Plan
    fields: Fields  # what a descriptor says of it


def asked(call: Call) -> Any:
    """The mask and the positions: what a plan, or a table of who sees whom, depends on."""
    if not call.positions_given:
        return call.mask, call.q.shape[2], call.k.shape[2]
    q, k = call.q_positions, call.k_positions
    return call.mask, q.shape, q.tobytes(), k.shape, k.tobytes()


def all_seen(call: Call) -> bool:
    """Whether every query sees every key, by one question about the box of positions around them."""
    if call.mask.batch:
        return False
    if not call.positions_given:
        nq, nk = call.q.shape[2], call.k.shape[2]
        start = max(nk - nq, 0)
        return call.mask.tile(start, start + nq, 0, nk) is FULL
    q, k = call.q_positions, call.k_positions
    if q.min() < 0 or k.min() < 0:
        return False
    return bool(call.mask.tile(int(q.min()), int(q.max()) + 1, int(k.min()), int(k.max()) + 1) == FULL)


def between(visible: NDArray[np.bool_]) -> slice | None:
    """The keys from the first to the last that anybody sees in a table (B|1, Hq|1, Nq, Nk), where that leaves some out."""
    some = np.flatnonzero(visible.any(axis=(0, 1, 2)))
    if not 0 < len(some) < visible.shape[3]:
        return None
    return slice(int(some[0]), int(some[-1]) + 1)


def plan_of(call: Call, tile_k: int) -> Kept:
    """The plan of a call, from the cache where the same mask and positions came before."""
    key = (asked(call), tile_k)
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    made = plan(call.mask, call.q_positions, call.k_positions, tile_k=tile_k)
    found = Kept(made, of_plan(made))
    with _lock:
        _plans[key] = found
        while len(_plans) > 1 and sum(one.plan.nbytes for one in _plans.values()) > _PLAN_BYTES:
            _plans.popitem(last=False)
    return found
