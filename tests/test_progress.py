"""The line on stderr that says how far a check is."""

from __future__ import annotations

import time

import pytest

import lowtri
from lowtri import progress
from lowtri.progress import ProgressLine


def wait(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now + seconds)


def test_a_long_check_has_a_line_that_is_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressLine("audit", True) as line:
        line.show("change, run 1")
        assert capsys.readouterr().err == ""  # a short check says nothing
        wait(monkeypatch, 60)
        line.show("change, run 3")
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "\raudit: change, run 3, 60 s\x1b[K")
        line.show("change, run 4")
        assert capsys.readouterr().err == ""  # not more than five times in a second
    assert capsys.readouterr().err == "\r\x1b[K"


@pytest.mark.parametrize("requested", [None, False])
def test_without_a_terminal_there_is_none(
    requested: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressLine("audit", requested) as line:
        wait(monkeypatch, 60)
        line.show("change, run 3")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("check", ["audit", "verify"])
def test_both_checks_have_one(check: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    if check == "audit":
        lowtri.audit(lambda x: x.cumsum(0), [1.0, 2.0, 3.0], probes="change", progress=True)
        words = "audit: change, run 1, "
    else:
        lowtri.verify(lowtri.attention, dtypes=["float32"], cases=["causal"], gradients=False, progress=True)
        words = "verify: 1 of 1, causal, float32, "
    assert words in capsys.readouterr().err
