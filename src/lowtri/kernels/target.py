"""The features of this CPU, and its instruction set: the best one that it supports, or the one that LOWTRI_ISA names.

LOWTRI_ISA selects the operations and the register tiles. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES set the instructions that LLVM may
emit.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

from lowtri.errors import EngineError
from lowtri.kernels.isa import ALL, PERMISSION, Amx, Baseline

__all__ = ["HAS_AMX", "HAS_FLOAT16", "ISA", "features", "instruction_set"]

_MACHINE = platform.machine().lower()


def features() -> frozenset[str]:
    """The CPU features that code may use: the host's, or those that NUMBA_CPU_FEATURES names.

    Where AMX is among them, the operating system is asked whether this process may use it, and the answer is one more feature.
    LLVM names a feature of the host only if the operating system saves its registers (CPUID and XCR0).
    """
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is None and os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
        given = ""  # Numba then compiles for a CPU without any
    if given is not None:
        has = frozenset(flag[1:] for flag in given.split(",") if flag.startswith("+"))
    else:
        import llvmlite.binding as llvm

        try:
            has = frozenset(flag for flag, present in llvm.get_host_cpu_features().items() if present)
        except RuntimeError:  # LLVM does not know this host: assume nothing
            return frozenset()
    wanted = os.environ.get("LOWTRI_ISA") or Amx.name  # another name forbids AMX, and nothing is requested
    if wanted == Amx.name and Amx.features - {PERMISSION} <= has and _amx_permission():
        has |= {PERMISSION}
    return has


@cache
def _amx_permission() -> bool:
    """Request the use of tile data for this process; old kernels of Linux, sandboxes and other systems refuse it."""
    if sys.platform != "linux" or _MACHINE != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    except (OSError, AttributeError):  # a C library without it
        return False


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
    reason = "which is no instruction set"
    for isa in ALL:
        if isa.name == name:
            refused = isa.features - features == {PERMISSION}
            reason = "which the operating system refuses" if refused else "which this CPU does not have"
    raise EngineError(
        f"LOWTRI_ISA is {name!r}, {reason}. It has: {', '.join(isa.name for isa in supported)}.\n"
        "Fix: name one of these, or unset LOWTRI_ISA."
    )


ISA = instruction_set(os.environ.get("LOWTRI_ISA") or None, features(), _MACHINE)
# Without the instruction LLVM calls a library function that may be missing.
HAS_FLOAT16 = "f16c" in features() or "avx512f" in features() or _MACHINE in ("arm64", "aarch64")
# Tiles of bf16. torch uses them whether or not the kernels may.
HAS_AMX = "amx-bf16" in features()
