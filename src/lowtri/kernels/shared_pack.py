"""The shared packed copies of key tiles: each is packed by the first thread that needs it, and read by all.

A tile has a state: 0 not packed, 1 being packed, 2 packed. A thread that needs a tile while another one packs it packs its own copy,
so that no thread ever waits. Memory of tiles that no query sees is never touched.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.simd import I64, pointer

__all__ = ["claim", "is_packed", "publish"]

_PACKING, _PACKED = ir.Constant(I64, 1), ir.Constant(I64, 2)


@intrinsic
def is_packed(typing, state):
    """Whether the tile is packed; if so, this thread sees its numbers."""

    def emit(c, b, s, a):
        return b.icmp_unsigned("==", b.load_atomic(pointer(b, a[0], I64), "acquire", 8), _PACKED)

    return types.boolean(types.intp), emit


@intrinsic
def claim(typing, state):
    """Whether this thread is the one that packs the tile."""

    def emit(c, b, s, a):
        result = b.cmpxchg(pointer(b, a[0], I64), ir.Constant(I64, 0), _PACKING, "acq_rel", "acquire")
        return b.extract_value(result, 1)

    return types.boolean(types.intp), emit


@intrinsic
def publish(typing, state):
    """Mark the tile as packed, for all threads."""

    def emit(c, b, s, a):
        b.store_atomic(_PACKED, pointer(b, a[0], I64), "release", 8)
        return c.get_dummy_value()

    return types.void(types.intp), emit
