"""The rows of ``benchmarks/entry_points.py``: what is compared computes the same, and the table says what was measured."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

import entry_points
from entry_points import GROUPS, Row, as_lines, main, microseconds

SMALL = {"sdpa": 4, "flash": 2, "flex": 2}  # rows that take no time


@pytest.mark.parametrize("group", SMALL)
def test_what_is_compared_computes_the_same(group: str) -> None:
    with torch.no_grad():
        for row in islice(GROUPS[group](), SMALL[group]):
            output = row.calls["entry"]()
            for name, call in row.calls.items():
                other = call()
                if output.shape != other.shape:  # tokens before heads, or a row without its batch
                    other = other.transpose(1, 2).reshape(output.shape)
                torch.testing.assert_close(output, other, atol=2e-5, rtol=0, msg=f"{row.name}: {name}")


def test_calls_run_interleaved_each_after_what_empties_the_caches() -> None:
    ran: list[str] = []
    times = microseconds({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 2, lambda: ran.append("-"))
    assert "".join(ran) == "aabb" + "-a-b" * 2 and set(times) == {"a", "b"}


def test_the_table_has_ratios_and_says_where_it_was_measured(monkeypatch, capsys) -> None:
    def rows():
        calls = {"entry": lambda: None, "own": lambda: None}
        yield Row("a row", "its shape", "1.5 x own", calls)
        yield Row(
            "of a model", "its shape", "not slower", {"entry": lambda: None, "torch": lambda: None}, in_model=True
        )

    monkeypatch.setattr(entry_points, "GROUPS", {"some": rows})
    assert main(["--rows", "some", "--turns", "3"]) == 0
    text = capsys.readouterr().out
    assert "1 thread" in text and "torch" in text and "a row" in text and "1.5 x own" in text
    assert main(["--rows", "some", "--turns", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["cold"] is None for row in found["rows"]] == [False, True]
    assert found["facts"]["dtype"] == "float32" and found["rows"][0]["shape"] == "its shape"


def test_ratios_are_of_the_entry_point() -> None:
    result = {"row": "x", "goal": "g", "warm": {"entry": 30.0, "own": 20.0, "torch": 60.0}, "cold": None}
    assert as_lines([result])[1].split() == ["x", "30", "20", "60", "1.50", "0.50", "g"]
