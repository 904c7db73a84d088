"""AVX2 with FMA: sixteen registers of 256 bits, two for a vector; 6 x 1 accumulators fill twelve of them."""

from __future__ import annotations

from lowtri.kernels.isa.baseline import Baseline

__all__ = ["Avx2"]


class Avx2(Baseline):
    name = "avx2"
    features = frozenset({"avx2", "fma"})
    has_fma = True
    tile = (6, 1, 6)
    pairs_tile = (4, 1, 4)  # the two halves of B's pairs take four registers
