"""Time and memory against length: the lines, where they end, and the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import growth
from growth import Line, Point
from lowtri.benching import OURS, SDPA, facts
from lowtri.errors import UndecidedError


def lines(torch_ends: str | None = None) -> list[Line]:
    made = []
    for who in growth.MASKS:
        made.append(Line(who, OURS, [Point(n, n * 1e-6, n * 300) for n in (512, 1024, 2048)]))
        made.append(Line(who, SDPA, [Point(512, 1e-3, None), Point(1024, 4e-3, 2**20)], torch_ends))
    return made


def texts(file: Path) -> str:
    return "\n".join("".join(one.itertext()).strip() for one in ET.parse(file).iter() if one.tag.endswith("text"))


def test_both_are_measured_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "available_bytes", lambda: 2 * 5 * 1023 * 1024)  # no table of 1,024 x 1,024
    before, said = torch.get_num_threads(), []
    measured = list(growth.grow(lengths=(512, 1024), progress=said.append))
    assert [line.split(" tokens: ")[0] for line in said] == [
        f"{who} {n}" for who in growth.MASKS for n in ("512", "1,024")
    ]
    assert [(line.mask, line.name) for line in measured] == [
        (who, name) for who in growth.MASKS for name in (OURS, SDPA)
    ]
    for line in measured:
        ends = line.name == SDPA and line.mask != "causal"
        assert [point.n for point in line.points] == ([512] if ends else [512, 1024])
        assert line.ended == ("for 1,024 tokens its table takes 0.00524 GB" if ends else None)
        for point in line.points:
            assert point.seconds > 0 and (point.bytes is None or point.bytes >= (512**2 if ends else 0))
    assert torch.get_num_threads() == before


def test_a_line_ends_where_a_run_would_take_too_long() -> None:
    line = Line("causal", OURS, [Point(1024, 3.0, None)])
    assert growth._reason_to_end(line, 2048, 12.0) is None
    assert growth._reason_to_end(line, 2048, 11.9) == "2,048 tokens would take about 12 s"
    assert "131,072" in str(growth._reason_to_end(Line("window", SDPA, []), 131_072, 30.0))


def test_nothing_is_timed_where_outputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "sdpa", lambda *given: lambda q, k, v: v + 1)
    with pytest.raises(
        UndecidedError, match=r"causal, 512 tokens: lowtri and torch SDPA differ by .*\nNothing is timed"
    ):
        list(growth.grow(lengths=(512,)))


def test_text_and_json() -> None:
    text = growth.as_text(lines("for 2,048 tokens its table takes 9 GB"))
    rows = [line.split() for line in text.splitlines()]
    assert ["1,024", "1.02", "0.3", "4.00", "1.0"] in rows and ["2,048", "2.05", "0.6", "-", "-"] in rows
    assert "torch SDPA ends: for 2,048 tokens its table takes 9 GB" in text
    shown = json.loads(json.dumps(growth.as_json(lines(), facts(1)), allow_nan=False))
    assert shown["heads"] == 1 and shown["lines"][1]["points"][0] == {"n": 512, "seconds": 1e-3, "bytes": None}


def test_the_picture_says_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "growth.svg"
    machine = {**facts(1), "cpu": "A CPU"}
    growth.draw(lines("for 2,048 tokens its table takes 9 GB"), machine, "bf16", file)
    assert list(tmp_path.iterdir()) == [file]
    shown = texts(file)
    for words in (
        *("bf16", "A CPU, 1 thread", f"torch {version('torch')}", machine["date"], "median CPU time", "tokens"),
        *("time of a call, ms", "memory beyond the inputs, MB", "window of 256 tokens", OURS, SDPA),
        "torch SDPA ends:\nfor 2,048 tokens its table takes 9 GB",
    ):
        assert words in shown, words
    png = tmp_path / "growth.png"
    growth.draw(lines()[:2], machine, "float32", png)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_program_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(growth, "QUICK", (512,))
    file = tmp_path / "growth.svg"
    growth.main(["--out", str(file), "--quick", "--json"])
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert shown["dtype"] == "float32" and [line["mask"] for line in shown["lines"][::2]] == list(growth.MASKS)
    assert f"wrote {file}" in err and "documents 512" in err and "float32" in texts(file)
