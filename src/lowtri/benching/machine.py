"""The facts about the machine on which the measurements depend."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lowtri import system
from lowtri._version import __version__

_CPU_INFO, _CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 32 * 2**20


def facts(threads: int) -> dict[str, Any]:
    """What is printed with figures: machine, threads, load, versions, date."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cpus": system.cpus(),
        "threads": threads,
        "load": load(),
        "versions": versions(),
    }


def headline(facts: dict[str, Any]) -> str:
    """Machine, threads, load, versions and date, in two lines."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    load = "" if facts["load"] is None else f", load {facts['load']}"
    crowded = facts["load"] is not None and facts["load"] > facts["cpus"] - facts["threads"] + 0.5
    note = " (others compute, too: figures are too low, look at the ratios)" if crowded else ""
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return f"{facts['date']}, {facts['cpu']}, {threads} of {facts['cpus']} CPUs{load}{note}\n{versions}"


_ARM_PARTS = {  # of Linux's "CPU part", by ARM's numbers
    **{"0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse N1"},
    **{"0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2", "0xd84": "Neoverse V3"},
}


def cpu_name() -> str:
    if sys.platform == "darwin":
        return system.sysctl_text("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    if sys.platform == "win32":
        return system.windows_cpu_name() or platform.processor() or platform.machine()
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
        sizes = [
            system.sysctl_number(name) for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize")
        ]
        return next(filter(None, sizes), _UNKNOWN_CACHE)
    sizes = []
    for file in _CACHES.glob("index*/size"):
        with suppress(OSError, ValueError):
            text = file.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KM")) * (2**20 if text.endswith("M") else 2**10))
    return max(sizes, default=_UNKNOWN_CACHE)


def versions() -> dict[str, str | None]:
    """Versions of Python, lowtri and its numerical packages; None for what is not installed, or has no metadata."""
    numbers: dict[str, str | None] = {"lowtri": __version__, "python": platform.python_version()}
    for name in ("numpy", "torch"):
        numbers[name] = None
        with suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers
