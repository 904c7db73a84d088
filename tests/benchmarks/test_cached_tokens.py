"""A token against the tokens before it: what is measured, and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest

import cached_tokens
from cached_tokens import OURS, THEIRS


def test_both_caches_are_measured_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(cached_tokens, "QUICK", (8, 64))
    monkeypatch.setattr(cached_tokens, "TURNS", 2)
    file = tmp_path / "tokens.svg"
    cached_tokens.main(["--quick", "--out", str(file), "--mask", "causal & window(4)"])
    out, err = capsys.readouterr()
    assert "64 tokens, EvictingCache: " in err and f"wrote {file}" in err
    rows = [line.split() for line in out.splitlines()]
    assert rows[-3][:2] == ["tokens", "before"] and [row[0] for row in rows[-2:]] == ["8", "64"]
    assert all(words in file.read_text() for words in (OURS, "time of a token, ms", "memory of the cache, MB"))


def test_only_the_cache_that_keeps_everything_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_tokens, "TURNS", 1)
    points = cached_tokens.grow((256, 2048), "causal & window(16)", lambda line: None)
    assert points[OURS][2048][1] <= points[OURS][256][1]
    assert points[THEIRS][2048][1] > 7 * points[THEIRS][256][1]
