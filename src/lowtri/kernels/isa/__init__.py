"""Instruction sets: the operations that differ between them, and the shape of the register tile that fits the registers of each.

An instruction set is a class; it inherits the operations of the one that it extends. ``ALL`` lists them, the fastest first.
"""

from __future__ import annotations

from lowtri.kernels.isa.amx import Amx
from lowtri.kernels.isa.amx_emulated import AmxEmulated
from lowtri.kernels.isa.avx2 import Avx2
from lowtri.kernels.isa.avx512 import Avx512
from lowtri.kernels.isa.avx512_bf16 import Avx512Bf16
from lowtri.kernels.isa.baseline import Baseline
from lowtri.kernels.isa.neon import Neon

__all__ = ["ALL", "Baseline"]

ALL: tuple[Baseline, ...] = (Amx(), Avx512Bf16(), Avx512(), Avx2(), Neon(), Baseline(), AmxEmulated())
