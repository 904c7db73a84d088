"""Which kernel runs a call: the spec that reads its arrays, and the kernel of few queries."""

from __future__ import annotations

from typing import Any

from lowtri.backends.cpu.fields import packed
from lowtri.kernels.variants import Array
from lowtri.ops.call import ArrayInfo, Call

__all__ = ["is_decoded", "pack", "spec_for", "spec_of"]

_FEW_QUERIES = 16  # the other kernels compute groups of 16 queries whole
# With products on tile registers a group takes less time than 16 queries one by one: half of it, estimated from the numbers of
# instructions; not measured on a CPU with AMX yet.
_FEW_QUERIES_TILES = 8


def is_decoded(call: Call) -> bool:
    """Whether the decode kernel runs the call: few queries, and rows that can be read in whole vectors."""
    spec = spec_of("forward", call)
    if call.q.shape[2] >= (_FEW_QUERIES_TILES if spec is not None and spec.on_tiles else _FEW_QUERIES):
        return False
    arrays = [pack(x) if spec is None else x for x in (call.q, call.k, call.v)]  # without a spec, after a cast
    return spec_for("decode", "float32" if spec is None else call.dtype, [pack(arrays[0]), *arrays[1:]]) is not None


def spec_of(family: str, call: Call) -> Any:
    """The spec of the kernel that reads the call's arrays without a cast, or None."""
    return spec_for(family, call.dtype, [call.q, call.k, call.v])


def spec_for(family: str, dtype: str, arrays: list[ArrayInfo]) -> Any:
    """The spec of the kernel that reads arrays of this dtype and layout, or None."""
    # Imported late: the import finds out which CPU this is, and raises if LOWTRI_ISA names another.
    from lowtri.kernels import select

    return select.spec_of(family, dtype, *(Array(x.strides, x.shape[3]) for x in arrays))


def pack(x: ArrayInfo) -> ArrayInfo:
    """The layout of a contiguous array of the same shape."""
    return x._replace(strides=packed(x.shape))
