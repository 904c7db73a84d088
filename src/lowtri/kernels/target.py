"""The features of this CPU, and its instruction set: the best one that it supports and that was built, or the one LOWTRI_ISA names."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from functools import cache

from lowtri.errors import EngineError
from lowtri.kernels import library
from lowtri.kernels.cpu_features import arm_features, cpu_features
from lowtri.kernels.isa import ALL, PERMISSION, Amx, Baseline

__all__ = ["HAS_AMX", "ISA", "features", "instruction_set"]

_MACHINE = platform.machine().lower()


def features() -> frozenset[str]:
    """The CPU features that code may use.

    Where AMX is among them, the operating system is asked whether this process may use it, and the answer is one more feature.
    """
    if _MACHINE in ("aarch64", "arm64"):
        return arm_features(sys.platform, None if sys.platform == "win32" else ctypes.CDLL(None))
    if _MACHINE not in ("x86_64", "amd64") or library.unusable():
        return frozenset()
    has = cpu_features(library.cpuid, library.xgetbv)
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


def instruction_set(
    name: str | None, features: frozenset[str], machine: str, built: Callable[[str], bool] = lambda name: True
) -> Baseline:
    """The instruction set of that name, or the best one.

    Args:
        built: whether there are kernels of an instruction set.

    Raises:
        EngineError: if there is no instruction set of that name, the CPU does not support it, or it was not built.
    """
    supported = [isa for isa in ALL if isa.runs_on(features, machine) and built(isa.name)]
    if name is None:
        return supported[0] if supported else Baseline()  # where there are no kernels at all, the backend says so
    for isa in supported:
        if isa.name == name:
            return isa
    reason = "which is no instruction set"
    for isa in ALL:
        if isa.name == name:
            refused = isa.features - features == {PERMISSION}
            reason = "which the operating system refuses" if refused else "which this CPU does not have"
            if isa.runs_on(features, machine):
                reason = "of which the library has no kernels"
    raise EngineError(
        f"LOWTRI_ISA is {name!r}, {reason}. It has: {', '.join(isa.name for isa in supported) or 'none'}.\n"
        "Fix: name one of these, or unset LOWTRI_ISA."
    )


ISA = instruction_set(os.environ.get("LOWTRI_ISA") or None, features(), _MACHINE, library.can_use)
# Tiles of bf16. torch uses them whether or not the kernels may.
HAS_AMX = "amx-bf16" in features()
