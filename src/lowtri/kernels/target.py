"""The features of this CPU, and its instruction set: the best one that it supports, or the one that LOWTRI_ISA names.

LOWTRI_ISA selects the operations and the register tiles. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES set the instructions that LLVM may
emit.
"""

from __future__ import annotations

import os
import platform

import llvmlite.binding as llvm

from lowtri.errors import EngineError
from lowtri.kernels.isa import ALL, Baseline

__all__ = ["HAS_AMX", "HAS_FLOAT16", "ISA", "features", "instruction_set"]


def features() -> frozenset[str]:
    """The CPU features that code may use: the host's, or those that NUMBA_CPU_FEATURES names."""
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
        EngineError: if there is no instruction set of that name, or the CPU does not support it.
    """
    supported = [isa for isa in ALL if isa.runs_on(features, machine)]
    if name is None:
        return supported[0]
    for isa in supported:
        if isa.name == name:
            return isa
    known = name in {isa.name for isa in ALL}
    raise EngineError(
        f"LOWTRI_ISA is {name!r}, {'which this CPU does not have' if known else 'which is no instruction set'}. "
        f"It has: {', '.join(isa.name for isa in supported)}.\nFix: name one of these, or unset LOWTRI_ISA."
    )


_MACHINE = platform.machine().lower()
ISA = instruction_set(os.environ.get("LOWTRI_ISA") or None, features(), _MACHINE)
# Without the instruction LLVM calls a library function that may be missing.
HAS_FLOAT16 = "f16c" in features() or "avx512f" in features() or _MACHINE in ("arm64", "aarch64")
# Tiles of bf16: torch uses them, the kernels do not.
HAS_AMX = "amx-bf16" in features()
