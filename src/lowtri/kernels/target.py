"""What this CPU has, and the register tile that follows from it.

A product keeps ROWS x VECTORS accumulators in registers, each a vector of 16 floats. A CPU with 32 registers of 512 bits holds
6 x 4 of them and has room for four loads and a broadcast. One with sixteen registers of 256 bits needs two for a vector of 16:
6 x 1 fill twelve. The tile decides the speed and nothing else; every shape computes the same.
"""

from __future__ import annotations

import os
import platform

import llvmlite.binding as llvm

__all__ = [
    "AMX",
    "BF16",
    "FEW_KEYS",
    "FEW_VECTORS",
    "FLOAT16",
    "FMA",
    "LANES",
    "NAME",
    "NARROW_ROWS",
    "ROWS",
    "SCALES",
    "VECTORS",
    "features",
]

LANES = 16  # floats in a vector; LLVM cuts it up where the registers are smaller


def features() -> frozenset[str]:
    """The instruction sets that code may use: the host's, or those that NUMBA_CPU_FEATURES names."""
    told = os.environ.get("NUMBA_CPU_FEATURES")
    if told is not None:
        return frozenset(flag[1:] for flag in told.split(",") if flag.startswith("+"))
    try:
        return frozenset(flag for flag, has in llvm.get_host_cpu_features().items() if has)
    except RuntimeError:  # LLVM does not know this host: assume nothing
        return frozenset()


_HAS = features()
_ARM = platform.machine().lower() in ("arm64", "aarch64")

if "avx512f" in _HAS:
    NAME, ROWS, VECTORS = "avx512", 6, 4
    NARROW_ROWS = 16  # of a tile that is one vector wide
    FEW_KEYS, FEW_VECTORS = 8, 4  # for few queries: keys that meet four of them at once; vectors of a value row
elif "avx2" in _HAS and "fma" in _HAS:
    NAME, ROWS, VECTORS = "avx2", 6, 1
elif _ARM:
    NAME, ROWS, VECTORS = "neon", 6, 1
else:
    NAME, ROWS, VECTORS = "baseline", 2, 1

if NAME != "avx512":
    NARROW_ROWS = ROWS
    FEW_KEYS, FEW_VECTORS = 4, 1
FMA = _ARM or "fma" in _HAS or "avx512f" in _HAS  # without the instruction llvm.fma is a slow library call
BF16 = "avx512bf16" in _HAS  # dot products of bf16 pairs
AMX = "amx-bf16" in _HAS  # tiles of bf16: the kernels do not use them, torch does
FLOAT16 = "avx512fp16" in _HAS  # arithmetic in float16: likewise
SCALES = NAME == "avx512"  # multiplies by a power of two, safely at both ends, in one instruction
