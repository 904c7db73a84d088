"""The facts about the machine on which the measurements depend."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lowtri._version import __version__

__all__ = ["cpu_name", "cpus", "facts", "last_cache_bytes", "load", "versions"]

_PACKAGES = ("numpy", "torch")


def facts(threads: int) -> dict[str, Any]:
    """What is printed with figures: machine, threads, load, versions, date."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cpus": cpus(),
        "threads": threads,
        "load": load(),
        "versions": versions(),
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """The load average of the last minute; None where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def last_cache_bytes() -> int:
    """The size of the last cache before memory; 32 MB where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 32 * 2**20


def versions() -> dict[str, str | None]:
    """Versions of Python, lowtri and its numerical packages; None for what is not installed."""
    numbers: dict[str, str | None] = {"lowtri": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = None
    return numbers
