"""The grid of calls by turns with torch: what counts as slower, and what is shown."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import lowtri
import never_slower
from lowtri.benching import facts, medians
from never_slower import TURN, Comparison, as_json, as_text, calls, compare
from presets import PLAIN, TABLED, PresetCall, grid, mask_text

CALL = PresetCall("forward", "causal", 16, 64, "float32", 4, 4, "causal")


def test_the_grid_has_every_combination_once() -> None:
    calls = grid()
    assert len(set(calls)) == len(calls)
    assert {call.label for call in calls} == {*PLAIN, *TABLED}
    assert {call.work for call in calls} == {"forward", "training", "decode"}
    assert {(call.dtype, call.threads) for call in calls} == {
        (dtype, threads) for dtype in ("float32", "bf16", "float16") for threads in (1, 2)
    }
    for call in calls:
        assert lowtri.mask(call.mask).dense(1, call.n).any()
    assert set(grid(quick=True)) < set(calls)


@pytest.mark.parametrize(
    ("ours", "theirs", "slower"),
    [
        (100e-6, 100e-6, False),
        (119e-6, 100e-6, False),  # 19 us more
        (121e-6, 100e-6, True),
        (1040e-6, 1000e-6, False),  # 40 us more, but 0.96 times
        (1060e-6, 1000e-6, True),
        (50e-6, 1000e-6, False),
    ],
)
def test_slower_is_a_twentieth_and_twenty_microseconds(ours: float, theirs: float, slower: bool) -> None:
    assert Comparison(CALL, "cpu", ours, theirs).is_slower is slower


class Machine:
    """A clock that calls advance: torch's take 100 us, ours ``takes(case, now)`` seconds."""

    def __init__(self, takes: Callable[[PresetCall, float], float]) -> None:
        self.now, self.takes, self.order = 0.0, takes, list[int]()

    def measure(self, case: PresetCall, turns: int) -> Comparison:
        self.order.append(case.n)
        tasks = {"ours": lambda: self._advance(self.takes(case, self.now)), "torch": lambda: self._advance(100e-6)}
        return Comparison(case, "cpu", **medians(tasks, turns, lambda: self.now, TURN))

    def _advance(self, seconds: float) -> None:
        self.now += seconds


def measured(machine: Machine) -> tuple[list[Comparison], list[str]]:
    """The comparisons of four cases, of 1 to 4 tokens, and the lines about them."""
    said: list[str] = []
    cases = [PresetCall("forward", "causal", n, 64, "float32", label="causal", threads=1 + n % 2) for n in (1, 2, 3, 4)]
    return compare(cases, said.append, measure=machine.measure), said


def test_load_that_lasts_longer_than_the_turns_of_a_call_is_not_reported() -> None:
    machine = Machine(lambda call, now: 300e-6 if now < 0.3 else 90e-6)
    found, said = measured(machine)
    assert machine.order == [1, 2, 3, 4, 1, 2], "the second pass comes after the whole grid"
    assert not any(one.is_slower for one in found) and said == ["2 of 4 calls look slower and are measured again."]
    assert [one.ours for one in found] == pytest.approx([90e-6] * 4)


@pytest.mark.parametrize("least", [1.3, 3.0])
def test_a_call_that_is_slower_is_reported_whatever_else_runs(least: float) -> None:
    def takes(call: PresetCall, now: float) -> float:
        load = 2 if now % 0.01 < 0.003 else 1  # for a third of the time, in both passes
        return load * 100e-6 * (least if call.n == 3 else 0.8)

    machine = Machine(takes)
    found, said = measured(machine)
    assert [one.call.n for one in found] == [1, 2, 3, 4]
    assert [one.is_slower for one in found] == [False, False, True, False]
    assert any(line.startswith("slower  forward causal 3 ") for line in said)


def test_the_second_pass_has_more_turns() -> None:
    turns: list[int] = []
    slower = Comparison(CALL, "cpu", 1e-3, 1e-4)
    found = compare([CALL, CALL], turns=3, measure=lambda _, count: (turns.append(count), slower)[1])
    assert [one.is_slower for one in found] == [True, True]
    assert turns == [3, 3, 31, 31]


@pytest.mark.parametrize("work", ["forward", "training", "decode"])
def test_both_sides_compute_the_same(work: str) -> None:
    for who in (*PLAIN, *TABLED):
        call = PresetCall(work, mask_text(who, 32, 8), 32, 64, "float32", 4, 4, who)
        ours, theirs, engine = calls(call)
        assert engine in ("cpu", "sdpa")
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours(), theirs())), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_what_is_shown() -> None:
    found = [Comparison(CALL, "cpu", 200e-6, 100e-6), Comparison(CALL, "cpu", 100e-6, 300e-6)]
    text = as_text(found, "a machine")
    assert text.startswith("a machine\n") and "1 of 2 calls are slower than torch." in text
    assert "slower  forward causal 16 float32 1 thread" in text and "0.50x" in text
    shown = json.loads(json.dumps(as_json(found, facts(1)), allow_nan=False))
    assert shown["slower"] == 1 and shown["calls"][1]["times"] == pytest.approx(3.0)


def test_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, code in ((1e-3, 1), (1e-5, 0)):
        slow = lambda case, n, s=seconds: Comparison(case, "cpu", s, 1e-4)  # noqa: E731
        monkeypatch.setattr(never_slower, "in_turns_with_torch", slow)
        assert never_slower.main(["--quick", "--json"]) == code
        out, err = capsys.readouterr()
        assert json.loads(out)["slower"] == (39 if code else 0) and ("slower  forward" in err) == bool(code)
