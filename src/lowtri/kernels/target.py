"""This CPU: its features, its instruction set (the best one that was built, or the one LOWTRI_ISA names), and its kernels.

x86-64: what CPUID and XGETBV say. Source: Intel, Software Developer's Manual, volume 2, CPUID, and volume 1, chapter 13; AMD's leaf
0x80000001. 64-bit ARM: programs may not read its registers of features, so the system says: Linux in the auxiliary vector, macOS by
sysctl. Source: Linux, arch/arm64/elf_hwcaps; Apple, Determining instruction set characteristics.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from lowtri.errors import EngineError
from lowtri.kernels import library
from lowtri.kernels.isa import PERMISSION, Amx, Baseline, fastest_first
from lowtri.kernels.spec import KernelSpec, variants_of
from lowtri.ops.call import ArrayInfo
from lowtri.system import sysctl_number

_MACHINE = platform.machine().lower()
_EAX = 0
_EBX = 1
_ECX = 2
_EDX = 3
_EXTENDED = 0x80000000
# By leaf, subleaf and register: the bit of each feature, by LLVM's name.
_BITS: dict[tuple[int, int, int], dict[str, int]] = {
    (1, 0, _ECX): {
        **{"sse3": 0, "ssse3": 9, "fma": 12, "cx16": 13, "sse4.1": 19, "sse4.2": 20, "crc32": 20},
        **{"movbe": 22, "popcnt": 23, "xsave": 26, "avx": 28, "f16c": 29},
    },
    (7, 0, _EBX): {
        **{"bmi": 3, "avx2": 5, "bmi2": 8},
        **{"avx512f": 16, "avx512dq": 17, "avx512cd": 28, "avx512bw": 30, "avx512vl": 31},
    },
    (7, 0, _EDX): {"amx-bf16": 22, "amx-tile": 24},
    (7, 1, _EAX): {"avx512bf16": 5},
    (_EXTENDED + 1, 0, _ECX): {"sahf": 0, "lzcnt": 5},
}
_OSXSAVE = 27  # in ECX of leaf 1: XGETBV may be used
# The registers that the system must save (bits of XCR0): those of SSE and AVX; besides, of AVX-512; besides, tiles.
_AVX = 0x6
_AVX512 = 0xE6
_AMX = 0x60006
_SAVED = {name: _AVX for name in ("avx", "avx2", "f16c", "fma", "xsave")}

_AT_HWCAP2 = 26  # the type of an entry of the auxiliary vector
_HWCAP2_BITS = {"bf16": 14}
_SYSCTL_NAMES = {"bf16": "hw.optional.arm.FEAT_BF16"}


def cpu_features(cpuid: Callable[[int, int], tuple[int, ...]], xgetbv: Callable[[], int]) -> frozenset[str]:
    """The features of an x86-64 that the operating system lets a process use, by LLVM's names.

    Args:
        cpuid: (leaf, subleaf) -> EAX, EBX, ECX, EDX.
        xgetbv: the lower half of XCR0; called only where the CPU has the instruction and the system allows it.
    """
    last = cpuid(0, 0)[_EAX]
    last_extended = cpuid(_EXTENDED, 0)[_EAX]
    last_subleaf = 0
    if last >= 7:
        last_subleaf = cpuid(7, 0)[_EAX]
    saved = xgetbv() if cpuid(1, 0)[_ECX] >> _OSXSAVE & 1 else 0
    present = set()
    for (leaf, subleaf, register), bits in _BITS.items():
        if leaf > (last_extended if leaf >= _EXTENDED else last) or subleaf > last_subleaf:
            continue
        word = cpuid(leaf, subleaf)[register]
        for name, bit in bits.items():
            needs = _saved_registers(name)
            if saved & needs == needs and word >> bit & 1:
                present.add(name)
    return frozenset(present)


def _saved_registers(name: str) -> int:
    """The registers that the system must save where a feature is used: bits of XCR0."""
    if name.startswith("avx512"):
        return _AVX512
    if name.startswith("amx"):
        return _AMX
    return _SAVED.get(name, 0)


def cpu_vendor(cpuid: Callable[[int, int], tuple[int, ...]]) -> str:
    """The vendor of an x86-64, such as GenuineIntel.

    Args:
        cpuid: (leaf, subleaf) -> EAX, EBX, ECX, EDX.
    """
    words = cpuid(0, 0)
    return b"".join(words[register].to_bytes(4, "little") for register in (_EBX, _EDX, _ECX)).decode("latin-1")


def arm_features(system: str, c_library: Any) -> frozenset[str]:
    """The features of a 64-bit ARM beyond those that every one has, by LLVM's names; none on systems that do not say.

    Args:
        system: as in ``sys.platform``.
        c_library: the C library, loaded by ctypes.
    """
    if system == "linux":
        c_library.getauxval.restype, c_library.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        bits = c_library.getauxval(_AT_HWCAP2)
        return frozenset(name for name, bit in _HWCAP2_BITS.items() if bits >> bit & 1)
    if system == "darwin":
        return frozenset(name for name, key in _SYSCTL_NAMES.items() if sysctl_number(key, c_library))
    return frozenset()


def vendor() -> str:
    """The vendor of this CPU; "" if it is no x86-64, or there are no kernels."""
    if _MACHINE not in ("x86_64", "amd64") or library.unusable():
        return ""
    return cpu_vendor(library.cpuid)


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
    arch_prctl = 158
    request_permission = 0x1023
    tile_data = 18
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
    except (OSError, AttributeError):  # a C library without it
        return False


def instruction_set(
    name: str | None,
    features: frozenset[str],
    machine: str,
    built: Callable[[str], bool] = lambda name: True,
    vendor: str = "",
) -> Baseline:
    """The instruction set of that name, or the best one.

    Args:
        built: whether there are kernels of an instruction set.
        vendor: of the CPU, on which the order of preference depends.

    Raises:
        EngineError: if there is no instruction set of that name, the CPU does not support it, or it was not built.
    """
    order = fastest_first(vendor)
    supported = [isa for isa in order if isa.runs_on(features, machine) and built(isa.name)]
    if name is None:
        return supported[0] if supported else Baseline()  # where there are no kernels at all, the backend says so
    named = next((isa for isa in order if isa.name == name), None)
    if named in supported:
        assert named is not None
        return named
    if named is None:
        reason = "which is no instruction set"
    elif named.runs_on(features, machine):
        reason = "of which the library has no kernels"
    elif named.features - features == {PERMISSION}:
        reason = "which the operating system refuses"
    else:
        reason = "which this CPU does not have"
    raise EngineError(
        f"LOWTRI_ISA is {name!r}, {reason}. It has: {', '.join(isa.name for isa in supported) or 'none'}.\n"
        "Fix: name one of these, or unset LOWTRI_ISA."
    )


ISA = instruction_set(os.environ.get("LOWTRI_ISA") or None, features(), _MACHINE, library.can_use, vendor())
# Tiles of bf16. torch uses them whether or not the kernels may.
HAS_AMX = "amx-bf16" in features()
VARIANTS = variants_of(ISA)  # in order of preference


def spec_of(family: str, dtype: str, q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> KernelSpec | None:
    """The spec of the kernel that reads these arrays, or None."""
    for variant in VARIANTS:
        if (variant.family, variant.spec.dtype) == (family, dtype) and variant.enabled:
            if variant.accepts is None or variant.accepts(q, k, v):
                return variant.spec
    return None
