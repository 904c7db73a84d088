"""Which kernel reads which arrays, said once: for each dtype the ways to read its rows, in order of preference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowtri.kernels.spec import KernelSpec
from lowtri.kernels.target import HAS_FLOAT16, ISA

__all__ = ["KERNELS", "SPECS", "Array", "spec_of"]


class Array(NamedTuple):
    """What the choice depends on: the strides of an array (B, H, N, D) in numbers, and its last size."""

    strides: tuple[int, ...]
    size: int

    @property
    def even(self) -> bool:
        """Rows are packed and begin at whole words, so that two neighbours are one."""
        b, h, n, d = self.strides
        return d == 1 and (b | h | n) % 2 == 0


def _any(q: Array, k: Array, v: Array) -> bool:
    return True


def _in_pairs(q: Array, k: Array, v: Array) -> bool:
    return q.size % 16 == 0 and q.size >= 32 and v.size % 16 == 0 and q.even and k.even and v.even


def _packed_rows(q: Array, k: Array, v: Array) -> bool:
    return q.size % 16 == 0 and v.size % 16 == 0 and q.strides[3] == k.strides[3] == v.strides[3] == 1


def _packed_pairs(q: Array, k: Array, v: Array) -> bool:
    return _in_pairs(q, k, v) and q.size % 32 == 0 and v.size % 32 == 0


class Way(NamedTuple):
    family: str  # forward (and its gradients), or decode
    dtype: str
    rows: str
    fits: Callable[[Array, Array, Array], bool]
    here: bool = True  # whether this CPU should


# The first row that fits is taken. A call without one is not decoded, or is cast to float32.
_TABLE = (
    Way("forward", "float32", "direct", _any),
    Way("forward", "float64", "direct", _any),
    Way("forward", "bfloat16", "pairs", _in_pairs, ISA.has_pairs),
    Way("forward", "bfloat16", "widened", _any),
    Way("forward", "float16", "widened", _any, HAS_FLOAT16),
    Way("decode", "float32", "direct", _packed_rows),
    Way("decode", "bfloat16", "pairs", _packed_pairs, ISA.has_pairs),
    Way("decode", "bfloat16", "widened", _packed_rows),
    Way("decode", "float16", "widened", _packed_rows, HAS_FLOAT16),
)
SPECS = {(way.family, way.dtype, way.rows): KernelSpec(way.dtype, way.rows, ISA) for way in _TABLE}

# The kernels that some call may choose on this CPU: family and spec.
KERNELS = tuple(
    (family, SPECS[way[:3]])
    for way in _TABLE
    if way.here
    for family in (("forward", "backward") if way.family == "forward" else ("decode",))
)


def spec_of(family: str, dtype: str, q: Array, k: Array, v: Array) -> KernelSpec | None:
    """The spec of the kernel that reads these arrays."""
    for way in _TABLE:
        if way.family == family and way.dtype == dtype and way.here and way.fits(q, k, v):
            return SPECS[way[:3]]
    return None
