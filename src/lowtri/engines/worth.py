"""When a call is worth a CPU kernel: the rule of ``engine="auto"``.

The rule looks at the call alone and never at what ran before, so that the same call always takes the same road and gives the same
bits. A smaller call is over in about a millisecond on any road, and must not wait seconds for a first compilation.
"""

from __future__ import annotations

from lowtri.ops.call import Call

__all__ = ["FEW_QUERIES", "worth_a_kernel"]

FEW_QUERIES = 16  # below, reading the keys and values is the work
_MULTIPLICATIONS = 2**25  # about a millisecond on one core
_NUMBERS = 2**20  # of keys and values, for few queries: 4 MB in float32


def worth_a_kernel(call: Call) -> bool:
    """Whether the work is large enough: multiplications, or for few queries the keys and values to be read."""
    rows, heads, nq, size = call.q.shape
    nk, value_size = call.v.shape[2:]
    if nq < FEW_QUERIES:
        whole = size % 32 == 0 and value_size % 16 == 0
        return whole and rows * int(call.k.shape[1]) * nk * (size + value_size) >= _NUMBERS
    return rows * heads * nq * nk * (size + value_size) >= _MULTIPLICATIONS
