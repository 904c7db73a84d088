"""The peak memory use during a call, as Linux counts it, and how much memory is left."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from lowtri.system import available_memory

__all__ = ["available_bytes", "peak_bytes"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_ELSEWHERE = 8 * 2**30  # bytes assumed to be available where the system does not say


def peak_bytes(function: Callable[[], object]) -> int | None:
    """How far the memory in use rose during the call, in bytes; None where the system does not say."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system, where its reuse would not be counted
        _RESET.write_text("5", encoding="ascii")  # resets the peak
        before = _kilobytes("VmRSS")
    except (OSError, AttributeError, TypeError, StopIteration):  # another system, or another C library
        return None
    function()
    return max(0, _kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def available_bytes() -> int:
    """What new allocations may take without swapping; 8 GB where the system does not say."""
    return available_memory() or _ELSEWHERE
