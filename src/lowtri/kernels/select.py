"""Which kernel reads which arrays on this CPU: for each dtype the variants of each family, in order of preference."""

from __future__ import annotations

from lowtri.kernels.spec import KernelSpec
from lowtri.kernels.target import ISA
from lowtri.kernels.variants import Array, kernels_of, spec_of_variant, variants_of

__all__ = ["KERNELS", "SPECS", "spec_of"]

_VARIANTS = variants_of(ISA)
# Tests enable variants that this CPU does not use.
SPECS = {variant[:3]: spec_of_variant(variant, ISA) for variant in _VARIANTS}
KERNELS = kernels_of(ISA)


def spec_of(family: str, dtype: str, q: Array, k: Array, v: Array) -> KernelSpec | None:
    """The spec of the kernel that reads these arrays, or None."""
    for variant in _VARIANTS:
        if variant[:2] == (family, dtype) and variant.enabled and variant.accepts(q, k, v):
            return SPECS[variant[:3]]
    return None
