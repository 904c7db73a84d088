"""Which kernel runs a call: the spec that reads its arrays, and the kernel of few queries."""

from __future__ import annotations

from typing import Any

from lowtri.backends.cpu.fields import packed
from lowtri.kernels.variants import Array
from lowtri.ops.call import ArrayInfo, Call

__all__ = ["FEW_QUERIES", "is_decoded", "kernel_spec", "pack", "spec_for", "spec_of"]

FEW_QUERIES = 16  # the other kernels compute groups of 16 queries whole
# With products on tile registers a group takes less time than 16 queries one by one: half of it, estimated from the numbers of
# instructions; not measured on a CPU with AMX yet.
FEW_QUERIES_TILES = 8


def is_decoded(call: Call) -> bool:
    """Whether the decode kernel runs the call: few queries, and rows that can be read in whole vectors."""
    spec = spec_of("forward", call)
    few = FEW_QUERIES_TILES if spec is not None and spec.on_tiles else FEW_QUERIES
    return call.q.shape[2] < few and kernel_spec("decode", call) is not None


def spec_of(family: str, call: Call) -> Any:
    """The spec of the kernel that reads the call's arrays without a cast, or None."""
    return spec_for(family, call.dtype, [call.q, call.k, call.v])


def kernel_spec(family: str, call: Call) -> Any:
    """The spec of the kernel that runs the call: the one that reads its arrays, or that of float32 after a cast."""
    spec = spec_of("forward", call)
    if family == "forward":
        return spec or spec_for("forward", "float32", [pack(x) for x in (call.q, call.k, call.v)])
    arrays = [pack(x) if spec is None else x for x in (call.q, call.k, call.v)]
    return spec_for(family, "float32" if spec is None else call.dtype, [pack(arrays[0]), *arrays[1:]])


def spec_for(family: str, dtype: str, arrays: list[ArrayInfo]) -> Any:
    """The spec of the kernel that reads arrays of this dtype and layout, or None."""
    # Imported late: the import finds out which CPU this is, and raises if LOWTRI_ISA names another.
    from lowtri.kernels import select

    return select.spec_of(family, dtype, *(Array(x.strides, x.shape[3]) for x in arrays))


def pack(x: ArrayInfo) -> ArrayInfo:
    """The same array, contiguous."""
    return x._replace(strides=packed(x.shape))
