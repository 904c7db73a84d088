"""What Linux, macOS and Windows do in ways of their own: where caches are, what the machine has, and replacing a file."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BUSY = 20  # times that Windows may refuse to replace a file, 1.05 s in all


def cache_folder() -> Path:
    """The folder of all files that lowtri computes and keeps: ``LOWTRI_CACHE``, or the operating system's cache folder."""
    own = os.environ.get("LOWTRI_CACHE")
    if own:
        return Path(own)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lowtri"


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
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    return (
        value.raw[: size.value]
        if call(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)) == 0
        else b""
    )


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


def _structure(kind: Any, *names: str, before: Sequence[tuple[str, Any]] = ()) -> Any:
    """A structure of an operating system: the fields before, and then those of one kind."""
    fields = [*before, *((name, kind) for name in names)]
    return type("_Structure", (ctypes.Structure,), {"_fields_": fields})


def available_memory() -> int | None:
    """Bytes that new allocations may take without swapping; on macOS half of the memory; None where the system does not say."""
    if sys.platform == "win32":
        counts = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)]
        names = ("total", "available", "total_file", "available_file", "total_virtual", "available_virtual", "extended")
        kind = _structure(ctypes.c_uint64, *names, before=counts)  # MEMORYSTATUSEX
        status = kind(length=ctypes.sizeof(kind))
        windows: Any = ctypes
        known = windows.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.available) if known else None
    if sys.platform == "darwin":  # what is free is little: the rest is a cache that the system gives back
        return sysctl_number("hw.memsize") // 2 or None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None


def memory_use() -> tuple[int, int] | None:
    """Bytes of memory that this process occupies, and the most that it has occupied; None where the system does not say."""
    try:
        if sys.platform == "win32":
            windows: Any = ctypes
            counts = [("length", ctypes.c_uint32), ("page_faults", ctypes.c_uint32)]
            of = ("peak", "now", "peak_paged", "paged", "peak_unpaged", "unpaged", "committed", "peak_committed")
            kind = _structure(ctypes.c_size_t, *of, before=counts)  # PROCESS_MEMORY_COUNTERS
            counters = kind(length=ctypes.sizeof(kind))
            process = ctypes.c_void_p(-1)  # the handle of this process
            get = windows.windll.kernel32.K32GetProcessMemoryInfo
            known = get(process, ctypes.byref(counters), ctypes.c_uint32(counters.length))
            return (int(counters.now), int(counters.peak)) if known else None
        if sys.platform == "darwin":
            c_library: Any = ctypes.CDLL(None)
            kind = _structure(ctypes.c_int64, "virtual", "now", "peak", "user", "system", "policy_and_count")
            info, count = kind(), ctypes.c_uint32(ctypes.sizeof(kind) // 4)  # mach_task_basic_info
            failed = c_library.task_info(c_library.mach_task_self(), 20, ctypes.byref(info), ctypes.byref(count))
            return None if failed else (int(info.now), int(info.peak))
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        sizes = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
        now, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, peak
    except (OSError, AttributeError, KeyError, ValueError):
        return None
