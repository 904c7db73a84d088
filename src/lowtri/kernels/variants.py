"""Kernel families by dtype and by the way in which rows are read: which arrays each variant accepts, on each instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowtri.kernels.isa import Baseline
from lowtri.kernels.spec import KernelSpec

__all__ = ["Array", "Variant", "functions_of", "kernels_of", "spec_of_variant", "symbol", "variants_of"]


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
    operand: str
    accepts: Callable[[Array, Array, Array], bool]
    enabled: bool = True


def variants_of(isa: Baseline) -> tuple[Variant, ...]:
    """Of an instruction set. The first that accepts the arrays is chosen; if there is none, backends do not decode, or cast."""
    return (
        Variant("forward", "float32", "direct", _any),
        Variant("forward", "float64", "direct", _any),
        Variant("forward", "bfloat16", "tiles", _any, isa.has_tiles),
        Variant("forward", "bfloat16", "pairs", _in_pairs, isa.has_pairs),
        Variant("forward", "bfloat16", "widened", _any),
        Variant("forward", "float16", "widened", _any, isa.has_float16),
        Variant("decode", "float32", "direct", _packed_rows),
        Variant("decode", "bfloat16", "pairs", _packed_pairs, isa.has_pairs and not isa.has_tiles),
        Variant("decode", "bfloat16", "widened", _packed_rows),
        Variant("decode", "float16", "widened", _packed_rows, isa.has_float16),
    )


def spec_of_variant(variant: Variant, isa: Baseline) -> KernelSpec:
    """The spec of a variant."""
    return KernelSpec(variant.dtype, variant.operand, isa)


_FAMILIES = {"forward": ("forward", "backward"), "decode": ("decode",)}


def kernels_of(isa: Baseline) -> tuple[tuple[str, KernelSpec], ...]:
    """The kernels that calls may use on an instruction set: family (a kernel's name) and spec."""
    enabled = ((variant, spec_of_variant(variant, isa)) for variant in variants_of(isa) if variant.enabled)
    return tuple((family, spec) for variant, spec in enabled for family in _FAMILIES[variant.family])


def functions_of(isa: Baseline) -> tuple[tuple[str, KernelSpec], ...]:
    """All kernels of an instruction set, with those that measure the ceilings of a CPU."""
    floats = KernelSpec("float32", "direct", isa)
    products = [floats, *([KernelSpec("bfloat16", "pairs", isa)] if isa.has_pairs else [])]
    return (*kernels_of(isa), *(("multiply", spec) for spec in products), ("read", floats))


def symbol(family: str, spec: KernelSpec) -> str:
    """The name of a kernel's code in the library, which debuggers and profilers show."""
    return f"lowtri_{family}_{spec.name}".replace("-", "_")
