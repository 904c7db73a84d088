"""The memory that a call takes, on this system and on faked ones."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from systems import Library, Sysctl, pretend_macos, pretend_windows

import peak_memory


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_macos(monkeypatch)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_windows(monkeypatch)


def test_what_a_mac_has(apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_memory.available_bytes() == 16 * 2**30
    monkeypatch.setattr(Sysctl, "sysctlbyname", lambda *arguments: -1)
    assert peak_memory.available_bytes() == 8 * 2**30, "the system does not say"


def test_what_a_windows_machine_has(windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(pointer: Any) -> int:
        assert pointer._obj.length == 64, "the size of MEMORYSTATUSEX"
        pointer._obj.available = 3 * 2**30
        return 1

    monkeypatch.setattr(
        ctypes, "windll", SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=status)), raising=False
    )
    assert peak_memory.available_bytes() == 3 * 2**30


def test_the_peak_of_memory_is_seen() -> None:
    def touch_new_pages() -> None:  # np.ones may get pages that the allocator has kept
        with mmap.mmap(-1, 2**24) as pages:
            pages[::4096] = b"1" * 2**12

    seen = peak_memory.peak_bytes(touch_new_pages)
    assert seen is None or 0.9 * 2**24 <= seen < 2**26  # Linux counts pages in batches


def during(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uses: list[Any]) -> int | None:
    """The peak of a call, before and after which the process uses so much memory."""
    left = iter(uses)
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "no folder" / "clear_refs")
    monkeypatch.setattr(peak_memory, "memory_use", lambda: next(left))
    return peak_memory.peak_bytes(lambda: None)


def test_the_peak_of_a_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mb = 2**20
    assert during(monkeypatch, tmp_path, [(50 * mb, 60 * mb), (55 * mb, 90 * mb)]) == 40 * mb
    assert during(monkeypatch, tmp_path, [(50 * mb, 60 * mb), (55 * mb, 60 * mb)]) is None, "an earlier peak hides it"
    assert during(monkeypatch, tmp_path, [(50 * mb, 50 * mb), (50 * mb, 50 * mb)]) == 0
    called: list[int] = []
    monkeypatch.setattr(peak_memory, "memory_use", lambda: None)
    assert peak_memory.peak_bytes(lambda: called.append(1)) is None and not called


def test_the_memory_of_this_process() -> None:
    now, peak = peak_memory.memory_use() or (0, 0)
    ones = bytearray(b"1" * 2**25)
    later = peak_memory.memory_use() or (0, 0)
    assert 2**20 < now <= peak <= later[1] and later[0] - now > 0.9 * len(ones)


def test_the_memory_of_a_process_on_windows(windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def info(process: Any, pointer: Any, size: Any) -> int:
        assert process.value == 2**64 - 1 and size.value == pointer._obj.length == 72, "the size of the structure"
        numbers = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))
        numbers[1], numbers[2] = 7 * 2**20, 5 * 2**20  # PeakWorkingSetSize, WorkingSetSize
        return answer

    kernel32 = SimpleNamespace(K32GetProcessMemoryInfo=info)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    answer = 1
    assert peak_memory.memory_use() == (5 * 2**20, 7 * 2**20)
    answer = 0
    assert peak_memory.memory_use() is None
    del kernel32.K32GetProcessMemoryInfo
    assert peak_memory.memory_use() is None


def test_the_memory_of_a_process_on_macos(apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_memory.memory_use() is None, "a C library without task_info"

    def task_info(task: int, flavor: int, pointer: Any, count: Any) -> int:
        assert (task, flavor, count._obj.value) == (259, 20, 12), (
            "MACH_TASK_BASIC_INFO, and its size in words of 32 bits"
        )
        numbers = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))
        numbers[1], numbers[2] = 5 * 2**20, 7 * 2**20  # resident_size, resident_size_max
        return failure

    failure = 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(task_info=task_info, mach_task_self=lambda: 259))
    assert peak_memory.memory_use() == (5 * 2**20, 7 * 2**20)
    failure = 5
    assert peak_memory.memory_use() is None
