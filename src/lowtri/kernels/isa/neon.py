"""NEON, on every 64-bit ARM: 32 registers of 128 bits, four for a vector; 6 x 1 accumulators fill 24 of them."""

from __future__ import annotations

from lowtri.kernels.isa.baseline import Baseline

__all__ = ["Neon"]


class Neon(Baseline):
    name = "neon"
    has_fma = True
    tile = (6, 1, 6)
    pairs_tile = (4, 1, 4)

    def runs_on(self, features: frozenset[str], machine: str) -> bool:
        return machine in ("arm64", "aarch64")
