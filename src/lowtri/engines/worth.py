"""When a call is worth a CPU kernel, and where torch's own is known to be faster: the rules of ``engine="auto"``.

The rule looks at the call alone and never at what ran before, so that the same call always takes the same road and gives the same
bits. A smaller call is over in about a millisecond on any road, and must not wait seconds for a first compilation.
"""

from __future__ import annotations

from typing import Any

from lowtri.engines.plans import all_seen, between
from lowtri.masks.atoms import causal
from lowtri.ops.call import Call

__all__ = ["FEW_QUERIES", "torch_is_faster", "worth_a_kernel"]

FEW_QUERIES = 16  # below, reading the keys and values is the work
_MULTIPLICATIONS = 2**25  # about a millisecond on one core
_NUMBERS = 2**20  # of keys and values, for few queries: 4 MB in float32
_LARGE_CAST = 2**24  # of keys and values in a half type: 64 MB in float32, which no cache holds


def worth_a_kernel(call: Call) -> bool:
    """Whether the work is large enough: multiplications, or for few queries the keys and values to be read."""
    rows, heads, nq, size = call.q.shape
    nk, value_size = call.v.shape[2:]
    if nq < FEW_QUERIES:
        whole = size % 32 == 0 and value_size % 16 == 0
        return whole and rows * int(call.k.shape[1]) * nk * (size + value_size) >= _NUMBERS
    return rows * heads * nq * nk * (size + value_size) >= _MULTIPLICATIONS


def torch_is_faster(call: Call) -> str | None:
    """Why torch's function beats the kernel on this call of tensors, where that was measured; None elsewhere.

    Windows, documents and other masks that hide much stay with the kernel, since torch computes what they hide.
    """
    from lowtri.kernels import target

    if call.dtype not in ("bfloat16", "float16"):
        return None
    if call.q.shape[2] >= FEW_QUERIES:
        dense = all_seen(call) or (call.mask == causal() and not call.positions_given)
        return "torch multiplies dense bf16 on AMX" if target.AMX and call.dtype == "bfloat16" and dense else None
    if call.dtype == "bfloat16" and target.BF16:
        return None
    if call.dtype == "float16" and (target.FLOAT16 or target.AMX):
        return "torch reads a cache of float16 as it is"
    large = call.group == 1 and _numbers_read(call) >= _LARGE_CAST
    return f"a large cache of {call.dtype} would be copied to float32" if large else None


def _numbers_read(call: Call) -> Any:
    """Numbers of keys and values between the first and the last key that anybody sees."""
    rows, kv_heads, nk, size = call.k.shape
    seen = None if all_seen(call) else between(call.visible())
    return rows * kv_heads * (nk if seen is None else seen.stop - seen.start) * (size + call.v.shape[3])
