"""What Linux, macOS and Windows do in ways of their own: what the machine has, replacing a file, and forking."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_BUSY = 20  # times that Windows may refuse to replace a file, 1.05 s in all


def replace(source: Path, target: Path) -> None:
    """Rename a file over another one, which may exist. Windows refuses that while somebody reads the other one: it is tried again."""
    for tried in range(_BUSY + 1):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if sys.platform != "win32" or tried == _BUSY:
                raise
            time.sleep(0.005 * (tried + 1))


def sysctl_text(name: str) -> str:
    """What macOS says of a name, such as machdep.cpu.brand_string; "" if it does not know it."""
    return _sysctl(name).rstrip(b"\0").decode(errors="replace")


def sysctl_number(name: str, c_library: Any = None) -> int:
    """The number that macOS has under a name; 0 if it does not know it. ``c_library`` is loaded by default."""
    return int.from_bytes(_sysctl(name, c_library), "little")


def _sysctl(name: str, c_library: Any = None) -> bytes:
    try:
        call: Any = (ctypes.CDLL(None) if c_library is None else c_library).sysctlbyname
    except (OSError, AttributeError, TypeError):  # another system
        return b""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(256)
    failed = call(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return b"" if failed else value.raw[: size.value]


def cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fast_cpus() -> int:
    """The CPUs that this process may use; on Apple's, only the fast ones: a team waits for its slowest thread.

    >>> fast_cpus() >= 1
    True
    """
    if sys.platform == "darwin" and (fast := sysctl_number("hw.perflevel0.logicalcpu")):
        return fast
    return cpus()


def windows_cpu_name() -> str:
    """The name in Windows' registry; "" elsewhere."""
    try:
        import winreg
    except ImportError:
        return ""
    registry: Any = winreg
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(registry.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        return ""


_CPU_INFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 32 * 2**20
_ARM_PARTS = {  # of Linux's "CPU part", by ARM's numbers
    **{"0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse N1"},
    **{"0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2", "0xd84": "Neoverse V3"},
}


def cpu_name() -> str:
    """The CPU's name, as its maker writes it; the machine's kind where the system does not say.

    >>> cpu_name() != ""
    True
    """
    if sys.platform == "darwin":
        return sysctl_text("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    if sys.platform == "win32":
        return windows_cpu_name() or platform.processor() or platform.machine()
    with suppress(OSError):
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if name := values.get("model name") or _ARM_PARTS.get(values.get("CPU part", "")):
            return name
    return platform.processor() or platform.machine()


def load() -> float | None:
    """The load average of the last minute; None where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def last_cache_bytes() -> int:
    """The size of the last cache before memory; 32 MB where the system does not say."""
    if sys.platform == "darwin":
        sizes = [sysctl_number(name) for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize")]
        return next(filter(None, sizes), _UNKNOWN_CACHE)
    sizes = []
    for file in _CACHES.glob("index*/size"):
        with suppress(OSError, ValueError):
            text = file.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KM")) * (2**20 if text.endswith("M") else 2**10))
    return max(sizes, default=_UNKNOWN_CACHE)
