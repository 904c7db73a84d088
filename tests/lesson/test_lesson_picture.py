"""docs/lesson.png is what tools/lesson_picture.py draws: the size tells an older picture, and one of another layout."""

from __future__ import annotations

import runpy
import struct
from pathlib import Path

import pytest
from browser import chromium

if chromium() is None:
    pytest.skip("no browser: apt-get install chromium", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_the_stored_picture_has_the_size_that_the_program_draws() -> None:
    drawn = size(runpy.run_path(str(ROOT / "tools" / "lesson_picture.py"))["picture"]())
    stored = size((ROOT / "docs" / "lesson.png").read_bytes())
    assert drawn == pytest.approx(stored, rel=0.1), "fonts differ between machines"
    assert 1500 < stored[0] < 2400 and len((ROOT / "docs" / "lesson.png").read_bytes()) < 300_000
