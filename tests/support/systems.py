"""Other operating systems, faked where lowtri meets them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

APPLE = {
    "machdep.cpu.brand_string": b"Apple M2 Pro\0",
    "hw.perflevel0.logicalcpu": (6).to_bytes(4, "little"),
    "hw.perflevel0.l2cachesize": (16 * 2**20).to_bytes(4, "little"),
    "hw.memsize": (32 * 2**30).to_bytes(8, "little"),
}


class Sysctl:
    """macOS's sysctlbyname(name, value, &size, NULL, 0)."""

    def sysctlbyname(self, name: bytes, value: Any, size: Any, *rest: Any) -> int:
        if name.decode() not in APPLE:
            return -1
        known = APPLE[name.decode()]
        ctypes.memmove(value, known, len(known))
        size._obj.value = len(known)
        return 0


class Library:
    """A shared library with some functions."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)


def pretend_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Apple M2 Pro."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Sysctl())


def pretend_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
