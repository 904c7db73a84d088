"""What this CPU has, and the instruction set that follows: the best one that it has, or the one that LOWTRI_ISA names.

LOWTRI_ISA chooses words and register tiles. What LLVM may emit for them is Numba's to say: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.
"""

from __future__ import annotations

import os
import platform

import llvmlite.binding as llvm

from lowtri.errors import EngineError
from lowtri.kernels.isa import ALL, Baseline

__all__ = ["HAS_AMX", "HAS_FLOAT16", "ISA", "features", "instruction_set"]


def features() -> frozenset[str]:
    """The instructions that code may use: the host's, or those that NUMBA_CPU_FEATURES names."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is not None:
        return frozenset(flag[1:] for flag in given.split(",") if flag.startswith("+"))
    try:
        return frozenset(flag for flag, has in llvm.get_host_cpu_features().items() if has)
    except RuntimeError:  # LLVM does not know this host: assume nothing
        return frozenset()


def instruction_set(name: str | None, features: frozenset[str], machine: str) -> Baseline:
    """The instruction set of that name, or the best one.

    Raises:
        EngineError: if there is none of that name, or the CPU does not have it.
    """
    fitting = [isa for isa in ALL if isa.fits(features, machine)]
    if name is None:
        return fitting[0]
    for isa in fitting:
        if isa.name == name:
            return isa
    known = name in {isa.name for isa in ALL}
    raise EngineError(
        f"LOWTRI_ISA is {name!r}, {'which this CPU does not have' if known else 'which is no instruction set'}. "
        f"It has: {', '.join(isa.name for isa in fitting)}.\nFix: name one of these, or unset LOWTRI_ISA."
    )


_MACHINE = platform.machine().lower()
ISA = instruction_set(os.environ.get("LOWTRI_ISA") or None, features(), _MACHINE)
# Without the instruction LLVM calls a function that may not be there.
HAS_FLOAT16 = "f16c" in features() or "avx512f" in features() or _MACHINE in ("arm64", "aarch64")
# Tiles of bf16: the kernels do not use them, torch does.
HAS_AMX = "amx-bf16" in features()
