"""Measuring: interleaved calls, medians, the limit of the CPU; and the table of `lowtri bench`."""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import torch

from lowtri import benching, mask
from lowtri.benching import (
    CALLS,
    CEILING,
    OURS,
    SDPA,
    BenchCall,
    Figure,
    Row,
    TimedElsewhere,
    facts,
    headline,
    interleaved,
    measure,
    medians,
    sdpa,
)
from lowtri.cli.main import main
from lowtri.errors import UndecidedError
from lowtri.integrations import measured
from lowtri.kernels import library
from lowtri.kernels.target import ISA

SMALL = BenchCall("forward", "causal", 40, 32, "float32", heads=2, kv_heads=2)
TINY = [
    SMALL,
    BenchCall("forward", "window(256)", 300, 32, "bf16", heads=2, kv_heads=2),
    BenchCall("forward", "causal & documents(lengths=[20, 21])", 41, 32, "float16", heads=4, kv_heads=2),
    BenchCall("forward", "full", 33, 32, "float32", heads=2, kv_heads=2),
    BenchCall("training", "causal", 48, 32, "float32", heads=2, kv_heads=2),
]


LIBRARIES = ["torch.nn.functional.scaled_dot_product_attention", "torch.nn.MultiheadAttention", "transformers"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that takes a moment, and no more rounds than asked for."""
    monkeypatch.setattr(benching, "multiply", partial(benching.multiply, repeats=10))
    monkeypatch.setattr(benching, "interleaved", partial(interleaved, seconds=0))
    monkeypatch.setattr(measured, "_TURNS", 2)


# Calls.


def test_the_table_is_that_of_the_readme() -> None:
    assert [call.name for call in CALLS] == [
        "forward causal 4096 D64 float32",
        "forward causal 4096 D64 bf16",
        "forward window(256) 4096 D64 float32",
        "forward window(256) 4096 D64 bf16",
        "training causal 2048 D64 float32",
        "training causal 2048 D64 bf16",
    ]
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (causal.*?|window.*?) \|", readme.split("## What attention costs")[1], re.M)
    expected = ["causal, 4096 tokens, D 64", "window of 256 in 4096, D 64", "causal 2048, D 64, forward + backward"]
    assert rows == expected


@pytest.mark.parametrize("call", TINY, ids=lambda call: call.name)
def test_work_is_counted_on_visible_pairs(call: BenchCall) -> None:
    visible = mask(call.mask).dense(call.n)
    assert call.pairs == visible.sum()
    products = 5 + 2 if call.work == "training" else 2
    assert call.amount == products * 2 * call.d * visible.sum() * call.heads / 1e9


# Interleaved calls and medians.


def test_implementations_run_interleaved_at_least_as_often_as_given() -> None:
    order = []
    calls = {name: lambda name=name: order.append(name) or len(order) for name in ("ours", "torch", "ceiling")}
    taken = interleaved(calls, rounds=7, seconds=0)
    assert order == ["ours", "torch", "ceiling"] * 7
    assert taken["torch"] == [2, 5, 8, 11, 14, 17, 20]


def test_cheap_implementations_run_until_a_limit_of_time_or_of_rounds() -> None:
    now = [0.0]

    def run() -> float:
        now[0] += 1.0
        return 1.0

    assert len(interleaved({"a": run}, rounds=7, seconds=10, clock=lambda: now[0])["a"]) == 10
    assert len(interleaved({"a": run, "b": run}, rounds=7, seconds=10, clock=lambda: now[0])["b"]) == 7
    assert len(interleaved({"a": lambda: 1.0}, rounds=7, seconds=10, clock=lambda: 0.0)["a"]) == 51


def test_a_turn_repeats_a_task_for_as_long_as_asked() -> None:
    now, calls = [0.0], [0]

    def task() -> None:
        now[0] += 0.25
        calls[0] += 1

    assert medians({"a": task}, rounds=3, clock=lambda: now[0], turn=1.0) == {"a": 0.25}
    assert calls[0] == 2 + 1 + 3 * 4, "two to warm up, one to see how long it takes, and four a turn"


def test_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow run in seven, as when another process comes by, changes nothing."""
    seconds = {name: itertools.cycle([2.0, 2.0, 900.0]) for name in (OURS, SDPA)}

    def scripted(timed_calls, rounds):
        assert list(timed_calls) == [OURS, SDPA, CEILING]
        fake = {name: lambda name=name: next(seconds[name]) * (3 if name == SDPA else 1) for name in seconds}
        return interleaved({**fake, CEILING: lambda: 1.0}, rounds, 0)

    monkeypatch.setattr(benching, "interleaved", scripted)
    (row,) = measure([SMALL])
    assert row.figures[OURS].seconds == 2.0 and row.figures[SDPA].seconds == 6.0
    assert row.figures[OURS].runs == 7 and row.times(SDPA) == 3.0
    assert row.figures[OURS].rate == SMALL.amount / 2
    assert row.ceiling == pytest.approx(benching.multiply_flops(1, False) / 1e9)


@pytest.mark.parametrize("call", TINY, ids=lambda call: call.name)
def test_every_kind_of_call_is_measured(call: BenchCall) -> None:
    before = torch.get_num_threads()
    said: list[str] = []
    (row,) = measure([call], {SDPA: sdpa, "formula": partial(benching.ours, engine="formula")}, progress=said.append)
    assert said == [f"1/1  {call.name}"]
    assert list(row.figures) == [OURS, SDPA, "formula"]
    for figure in row.figures.values():
        assert figure.why_not is None and figure.runs >= 7 and figure.rate == call.amount / figure.seconds
    assert row.ceiling > 0 and torch.get_num_threads() == before


def test_nothing_is_timed_where_outputs_differ() -> None:
    words = r"lowtri and torch SDPA differ by .*, more than 1e-04\.\nNothing is timed"
    with pytest.raises(UndecidedError, match=words):
        list(measure([SMALL], {SDPA: lambda call: lambda q, k, v: v + 1}))


def test_not_a_number_differs() -> None:
    with pytest.raises(UndecidedError, match="differ by nan"):
        list(measure([SMALL], {SDPA: lambda call: lambda q, k, v: v * torch.nan}))


def test_an_implementation_that_cannot_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: BenchCall) -> benching.Attend:
        raise RuntimeError("no compiler\nsecond line")

    (row,) = measure([SMALL], {"other": broken})
    assert row.figures["other"] == Figure(why_not="RuntimeError: no compiler")
    assert row.times("other") is None
    long = sdpa(BenchCall("forward", "window(256)", 65_536, 64, "float32"))
    assert long == "its table of bools would hold 4,295 million pairs"
    monkeypatch.setattr(benching, "ours", broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        list(measure([SMALL], {}))


def test_what_is_too_slow_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "_LONGEST", 0.0)
    (row,) = measure([SMALL])
    assert row.figures[SDPA].why_not == "one run takes 0.0 s"
    assert row.figures[OURS].why_not is None


def test_another_process_times_itself() -> None:
    peers = {"there": lambda call: TimedElsewhere(lambda: 2.0), "ended": lambda call: TimedElsewhere(lambda: np.nan)}
    (row,) = measure([SMALL], peers)
    assert row.figures["there"].seconds == 2.0
    assert row.figures["ended"] == Figure(why_not="its process ended")


# The limit of the CPU.


@pytest.mark.parametrize("pairs", [False, True] if ISA.has_bf16_dot else [False])
def test_the_limit_multiplies_correctly(pairs: bool) -> None:
    product = benching.multiply(2, pairs, repeats=1)  # (threads, rows, 64), of ones
    assert (product == (128 if pairs else 64)).all() and product.shape[0] == 2
    assert benching.multiply_flops(2, pairs) == 2 * benching.multiply_flops(1, pairs)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_read_loop_reads_every_number(threads: int) -> None:
    numbers = np.arange(2**16, dtype=np.float32)
    assert benching.read(numbers.ctypes.data, numbers.nbytes, threads) == pytest.approx(numbers.sum(dtype=np.float64))


# What is shown.


def rows() -> list[Row]:
    figures = {
        OURS: Figure(0.010, 7, 50.0),
        SDPA: Figure(0.025, 7, 20.0),
        "other": Figure(why_not="no compiler"),
    }
    return [Row(call, 125.0, figures) for call in CALLS[1:3]]


def test_the_table() -> None:
    text = benching.as_text(rows(), facts(1))
    lines = [line.split() for line in text.splitlines()]
    assert ["forward", "causal", "4096", "D64", "bf16", "GFLOP/s", "50", "40%", "20", "2.5", "-"] in lines
    names = "forward causal 4096 D64 bf16, forward window(256) 4096 D64 float32"
    assert f"other: not measured: no compiler ({names})" in text


def test_the_headline_says_when_others_compute() -> None:
    quiet = {**facts(1), "cpus": 2, "load": 1.0, "cpu": "A CPU"}
    assert "A CPU, 1 thread of 2 CPUs, load 1.0\n" in headline(quiet)
    assert "(others compute, too: figures are too low" in headline({**quiet, "load": 1.9})
    assert "2 threads of 2 CPUs, load 1.0 (others" in headline({**quiet, "threads": 2})


def test_a_package_without_metadata_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torch":  # can be imported, from a folder without its metadata
            raise PackageNotFoundError(name)
        return "2.0"

    monkeypatch.setattr(benching, "version", version)
    versions = benching.versions()
    assert versions["torch"] is None and versions["numpy"] == "2.0"
    assert "torch" not in headline(facts(1))


def test_json_holds_what_was_measured() -> None:
    found = json.loads(json.dumps(benching.as_json(rows(), facts(2)), allow_nan=False))
    assert found["threads"] == 2 and set(found["versions"]) == {*("lowtri", "python", "numpy", "torch")}
    row = found["rows"][1]
    assert (row["case"], row["mask"]) == ("forward window(256) 4096 D64 float32", "window(256)")
    assert (row["unit"], row["share"], row["ceiling"]) == ("GFLOP/s", 0.4, 125.0)
    assert row["figures"] == {
        OURS: {"seconds": 0.01, "runs": 7, "rate": 50.0, "why_not": None},
        SDPA: {"seconds": 0.025, "runs": 7, "rate": 20.0, "why_not": None},
        "other": {"why_not": "no compiler"},
    }


# The command line.


def test_bench_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(benching, "CALLS", [SMALL])
    assert main(["bench", "--json"]) == 0
    out, err = capsys.readouterr()
    (row,), libraries = (json.loads(out)[name] for name in ("rows", "libraries"))
    assert [one["library"] for one in libraries] == LIBRARIES and all(one["own"] > 0 for one in libraries)
    assert row["case"] == SMALL.name and set(row["figures"]) == {OURS, SDPA}
    assert f"1/1  {SMALL.name}" in err
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert SMALL.name in out and all(library in out for library in LIBRARIES)


def test_a_library_whose_output_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = measured.Compared("a library", "a call", lambda: torch.ones(3), lambda: torch.full((3,), 1.5))
    monkeypatch.setattr(measured, "_compared", lambda: iter([wrong]))
    with pytest.raises(UndecidedError, match="a library: outputs on lowtri and on its own attention differ by"):
        list(measured.measure_libraries())


def test_only_installed_libraries_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "is_installed", lambda name: name != "transformers")
    assert [compared.library for compared in measured._compared()] == LIBRARIES[:2]


def test_outputs_that_differ_exit_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(benching, "CALLS", [SMALL])
    monkeypatch.setattr(benching, "ours", lambda call: lambda q, k, v: v + 1)
    assert main(["bench"]) == 3
    out, err = capsys.readouterr()
    assert "Nothing is timed: a wrong answer has no speed." in err and out == ""


def test_without_kernels_bench_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(library, "unusable", lambda: "lowtri was installed without them. Fix: build them")
    assert main(["bench"]) == 2
    assert "bench: there are no kernels: lowtri was installed without them. Fix: build them" in capsys.readouterr().err
