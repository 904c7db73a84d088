"""Which kernel runs a call: the family, and the spec that reads its arrays."""

from __future__ import annotations

from typing import Any

from lowtri.backends.cpu.fields import packed
from lowtri.backends.cpu.launch import kernel_file
from lowtri.ops.call import ArrayInfo, Call

__all__ = ["FEW_QUERIES", "chosen_spec", "is_decoded", "kernel_spec", "packed_info", "spec_of"]

FEW_QUERIES = 16  # below, reading the keys and values takes most of the time


def is_decoded(call: Call) -> bool:
    """Whether the decode kernel runs the call: few queries, and rows that can be read in whole vectors."""
    return call.q.shape[2] < FEW_QUERIES and kernel_spec("decode", call) is not None


def spec_of(family: str, call: Call) -> Any:
    """The spec of the kernel that reads the call's arrays without a cast, or None."""
    return chosen_spec(family, call.dtype, [call.q, call.k, call.v])


def kernel_spec(family: str, call: Call) -> Any:
    """The spec of the kernel that runs the call: the one that reads its arrays, or that of float32 after a cast."""
    spec = spec_of("forward", call)
    if family == "forward":
        return spec or chosen_spec("forward", "float32", [packed_info(x) for x in (call.q, call.k, call.v)])
    arrays = [packed_info(x) if spec is None else x for x in (call.q, call.k, call.v)]
    return chosen_spec(family, "float32" if spec is None else call.dtype, [packed_info(arrays[0]), *arrays[1:]])


def chosen_spec(family: str, dtype: str, arrays: list[ArrayInfo]) -> Any:
    select = kernel_file("select")
    return select.spec_of(family, dtype, *(select.Array(x.strides, x.shape[3]) for x in arrays))


def packed_info(x: ArrayInfo) -> ArrayInfo:
    return x._replace(strides=packed(x.shape))
