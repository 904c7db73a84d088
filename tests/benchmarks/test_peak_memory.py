"""The memory that a call takes, on this system and on faked ones."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

import peak_memory


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
