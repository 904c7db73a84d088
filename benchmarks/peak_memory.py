"""How much memory a call takes: what the system says of this process and of the machine, and the peak during a call."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowtri import system

_RESET = Path("/proc/self/clear_refs")
_ELSEWHERE = 8 * 2**30  # bytes assumed to be available where the system does not say


def peak_bytes(function: Callable[[], object]) -> int | None:
    """How far the memory in use rose during the call, in bytes.

    None where the system does not say (the function is then not called), or where an earlier peak hides that of the call: Linux alone
    can reset it.
    """
    with suppress(OSError, AttributeError, TypeError):  # another system, or another C library
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system, where its reuse would not be counted
        _RESET.write_text("5", encoding="ascii")
    before = memory_use()
    if before is None:
        return None
    function()
    after = memory_use()
    if after is None or (after[1] <= before[1] and before[1] - before[0] > 2**20):  # Linux counts pages in batches
        return None
    return max(0, after[1] - before[0])


def available_bytes() -> int:
    """What new allocations may take without swapping; 8 GB where the system does not say."""
    return available_memory() or _ELSEWHERE


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
        return system.sysctl_number("hw.memsize") // 2 or None
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
            info = kind()  # mach_task_basic_info
            count = ctypes.c_uint32(ctypes.sizeof(kind) // 4)
            failed = c_library.task_info(c_library.mach_task_self(), 20, ctypes.byref(info), ctypes.byref(count))
            return None if failed else (int(info.now), int(info.peak))
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        sizes = dict(line.split(":", 1) for line in lines if line.startswith("Vm"))
        now, peak = (int(sizes[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, peak
    except (OSError, AttributeError, KeyError, ValueError):
        return None
