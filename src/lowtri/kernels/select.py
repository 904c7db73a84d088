"""Which kernel reads which arrays: for each dtype the variants of each family, in order of preference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowtri.kernels.isa import AmxEmulated
from lowtri.kernels.spec import KernelSpec
from lowtri.kernels.target import HAS_FLOAT16, ISA

__all__ = ["KERNELS", "SPECS", "Array", "spec_of"]


class Array(NamedTuple):
    """The properties of an array (B, H, N, D) that decide: its strides in numbers, and its last size."""

    strides: tuple[int, ...]
    size: int

    @property
    def even(self) -> bool:
        """Whether rows are packed and begin at whole words, so that two neighbours are one word."""
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


class Variant(NamedTuple):
    """A kernel family for one dtype and one way to read rows."""

    family: str  # forward (and its gradients), or decode
    dtype: str
    rows: str
    accepts: Callable[[Array, Array, Array], bool]
    enabled: bool = True  # on this CPU


# The first variant that accepts the arrays is chosen. If there is none, backends do not decode, or cast to float32.
_VARIANTS = (
    Variant("forward", "float32", "direct", _any),
    Variant("forward", "float64", "direct", _any),
    Variant("forward", "bfloat16", "tiles", _any, ISA.has_tiles),
    Variant("forward", "bfloat16", "pairs", _in_pairs, ISA.has_pairs),
    Variant("forward", "bfloat16", "widened", _any),
    Variant("forward", "float16", "widened", _any, HAS_FLOAT16),
    Variant("decode", "float32", "direct", _packed_rows),
    Variant("decode", "bfloat16", "pairs", _packed_pairs, ISA.has_pairs and not ISA.has_tiles),
    Variant("decode", "bfloat16", "widened", _packed_rows),
    Variant("decode", "float16", "widened", _packed_rows, HAS_FLOAT16),
)
# Tests enable variants that this CPU does not use; tiles are then emulated.
_TILES = ISA if ISA.has_tiles else AmxEmulated()
SPECS = {
    variant[:3]: KernelSpec(variant.dtype, variant.rows, _TILES if variant.rows == "tiles" else ISA)
    for variant in _VARIANTS
}

_FAMILIES = {"forward": ("forward", "backward"), "decode": ("decode",)}

# The kernels that calls may use on this CPU: family (a kernel's name) and spec.
KERNELS = tuple(
    (family, SPECS[variant[:3]]) for variant in _VARIANTS if variant.enabled for family in _FAMILIES[variant.family]
)


def spec_of(family: str, dtype: str, q: Array, k: Array, v: Array) -> KernelSpec | None:
    """The spec of the kernel that reads these arrays, or None."""
    for variant in _VARIANTS:
        if variant[:2] == (family, dtype) and variant.enabled and variant.accepts(q, k, v):
            return SPECS[variant[:3]]
    return None
