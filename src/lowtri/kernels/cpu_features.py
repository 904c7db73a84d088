"""The features of a CPU that the operating system lets a process use.

x86-64: what CPUID and XGETBV say. Source: Intel, Software Developer's Manual, volume 2, CPUID, and volume 1, chapter 13; AMD's leaf
0x80000001. 64-bit ARM: programs may not read its registers of features, so the system says: Linux in the auxiliary vector, macOS by
sysctl. Source: Linux, arch/arm64/elf_hwcaps; Apple, Determining instruction set characteristics.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from lowtri.system import sysctl_number

__all__ = ["arm_features", "cpu_features"]

_EAX, _EBX, _ECX, _EDX = range(4)
_EXTENDED = 0x80000000
# By LLVM's name: leaf, subleaf, register, bit.
_BITS = {
    "sse3": (1, 0, _ECX, 0),
    "ssse3": (1, 0, _ECX, 9),
    "fma": (1, 0, _ECX, 12),
    "cx16": (1, 0, _ECX, 13),
    "sse4.1": (1, 0, _ECX, 19),
    "sse4.2": (1, 0, _ECX, 20),
    "crc32": (1, 0, _ECX, 20),
    "movbe": (1, 0, _ECX, 22),
    "popcnt": (1, 0, _ECX, 23),
    "xsave": (1, 0, _ECX, 26),
    "avx": (1, 0, _ECX, 28),
    "f16c": (1, 0, _ECX, 29),
    "bmi": (7, 0, _EBX, 3),
    "avx2": (7, 0, _EBX, 5),
    "bmi2": (7, 0, _EBX, 8),
    "avx512f": (7, 0, _EBX, 16),
    "avx512dq": (7, 0, _EBX, 17),
    "avx512cd": (7, 0, _EBX, 28),
    "avx512bw": (7, 0, _EBX, 30),
    "avx512vl": (7, 0, _EBX, 31),
    "amx-bf16": (7, 0, _EDX, 22),
    "amx-tile": (7, 0, _EDX, 24),
    "avx512bf16": (7, 1, _EAX, 5),
    "sahf": (_EXTENDED + 1, 0, _ECX, 0),
    "lzcnt": (_EXTENDED + 1, 0, _ECX, 5),
}
_OSXSAVE = 27  # in ECX of leaf 1: XGETBV may be used
# The registers that the system must save (bits of XCR0): those of SSE and AVX; besides, of AVX-512; besides, tiles.
_AVX, _AVX512, _AMX = 0x6, 0xE6, 0x60006
_SAVED = {name: _AVX for name in ("avx", "avx2", "f16c", "fma", "xsave")}


def cpu_features(cpuid: Callable[[int, int], tuple[int, ...]], xgetbv: Callable[[], int]) -> frozenset[str]:
    """The features, by LLVM's names.

    Args:
        cpuid: (leaf, subleaf) -> EAX, EBX, ECX, EDX.
        xgetbv: the lower half of XCR0; called only where the CPU has the instruction and the system allows it.
    """
    last, last_extended, last_subleaf = cpuid(0, 0)[_EAX], cpuid(_EXTENDED, 0)[_EAX], 0
    if last >= 7:
        last_subleaf = cpuid(7, 0)[_EAX]
    saved = xgetbv() if cpuid(1, 0)[_ECX] >> _OSXSAVE & 1 else 0
    present = set()
    for name, (leaf, subleaf, register, bit) in _BITS.items():
        if leaf > (last_extended if leaf >= _EXTENDED else last) or subleaf > last_subleaf:
            continue
        needs = _AVX512 if name.startswith("avx512") else _AMX if name.startswith("amx") else _SAVED.get(name, 0)
        if saved & needs == needs and cpuid(leaf, subleaf)[register] >> bit & 1:
            present.add(name)
    return frozenset(present)


_AT_HWCAP2 = 26  # the type of an entry of the auxiliary vector
_HWCAP2_BITS = {"bf16": 14}
_SYSCTL_NAMES = {"bf16": "hw.optional.arm.FEAT_BF16"}


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
