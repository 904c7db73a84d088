"""How many threads run a call: as many as its work is worth, at most as many as the call may use.

A thread whose core is busy with something else starts up to 8 ms late, and the others wait for it. So a small call runs on one
thread, as torch's own operations do below their grain size. The number depends on the call alone, so equal calls give equal results.
"""

from __future__ import annotations

from lowtri.masks.plan import TILE_Q, Plan
from lowtri.ops.call import Call

__all__ = ["decode_threads", "tile_threads"]

# Multiplications for each thread: about as long as to wake a thread takes, tens of thousands of cycles on any CPU, so that a factor of
# two in it matters little. On an AMD EPYC (Zen 4) two threads take 0.6 to 0.75 of the time where the work is worth them by this number,
# and 0.75 to 1.2 of it where it is not. It chooses no algorithm.
GRAIN = 2**20
_READ = 2  # a byte of keys and values takes as long as so many multiplications
_STARTED = (
    16  # NumPy arrays: without torch each run starts its threads, which takes some ten times as long as to wake them
)

_PRODUCTS = {"forward": 2, "backward": 5}  # of matrices


def tile_threads(family: str, call: Call, plan: Plan) -> int:
    """For the tiles that the kernel of this family computes: forward or backward."""
    batch, heads, _, nq, nk, d, dv = call.sizes
    tiles = int((plan.runs[:, 1] - plan.runs[:, 0]).sum())  # of all masks, each taken to be as frequent as the others
    pairs = min(nq * nk, tiles * TILE_Q * plan.tile_k // len(plan.mask_pairs))
    return _threads(call, batch * heads * pairs * (d + dv) * _PRODUCTS[family] // 2)


def decode_threads(call: Call, keys: int, number_bytes: int) -> int:
    """For few queries and so many keys: what is multiplied or read, whichever takes longer."""
    batch, heads, kv_heads, nq, _, d, dv = call.sizes
    return _threads(call, batch * keys * (d + dv) * max(heads * nq, kv_heads * number_bytes * _READ))


def _threads(call: Call, multiplications: int) -> int:
    grain = GRAIN * _STARTED if call.is_numpy else GRAIN
    return max(1, min(call.threads, multiplications // grain))
