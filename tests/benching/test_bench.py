"""Measuring: in turns, medians, against ceilings; what is shown of it; and what the doctor says."""

from __future__ import annotations

import itertools
import json
import math
import mmap
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import StringIO

import numpy as np
import pytest
import torch

import mkl_avx512
from lowtri import mask
from lowtri.benching import ceilings, checkup, machine, peers, table, timing
from lowtri.benching.cases import CASES, Case, choose
from lowtri.benching.machine import facts, headline
from lowtri.benching.table import CEILING, Figure, Row
from lowtri.benching.timing import in_turns, peak_bytes
from lowtri.cli.main import main
from lowtri.errors import DataError, UndecidedError
from lowtri.kernels import abi, library
from lowtri.kernels.isa import Amx, Avx2, Avx512Bf16
from lowtri.kernels.spec import functions_of
from lowtri.kernels.target import ISA

SMALL = Case("forward", "causal", 40, 32, "float32", heads=2, kv_heads=2)
TINY = [
    SMALL,
    Case("forward", "window", 300, 32, "bf16", heads=2, kv_heads=2),
    Case("forward", "documents", 41, 32, "float16", heads=2, kv_heads=2),
    Case("forward", "full", 33, 32, "float32", heads=2, kv_heads=2),
    Case("training", "documents", 48, 32, "float32", heads=2, kv_heads=2),
    Case("decode", "causal", 512, 64, "float32", heads=4, kv_heads=2),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that turn within a megabyte, and ceilings of a moment."""
    monkeypatch.setattr(timing, "last_cache_bytes", lambda: 2**18)
    real = ceilings.multiply
    monkeypatch.setattr(table, "multiply", lambda threads, pairs: real(threads, pairs, 10))


# Cases.


def test_the_table_has_every_kind_once() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert {case.work for case in CASES} == {"forward", "training", "decode"}
    assert {case.mask_name for case in CASES} == {"causal", "full", "window", "documents"}
    assert {case.dtype for case in CASES} == {"float32", "bf16", "float16"}
    assert {case.d for case in CASES} == {64, 128}
    assert {case.n for case in CASES if case.mask_name == "window"} >= {512, 4096, 65_536}
    assert 5 <= len(choose()) <= 12 and all(case.short for case in choose())
    assert len(choose(full=True)) == len(CASES)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_work_is_counted_on_visible_pairs(case: Case) -> None:
    visible = mask(case.mask).dense(case.queries, case.n)
    assert case.pairs == visible.sum()
    products = 5 + 2 if case.work == "training" else 2
    assert case.flops == products * 2 * case.d * visible.sum() * case.heads
    if case.work == "decode":
        assert case.unit == "GB/s" and case.amount == 2 * 2 * 512 * 64 * 4 / 1e9
    else:
        assert case.unit == "GFLOP/s" and case.amount == case.flops / 1e9


def test_a_window_is_256_keys_and_documents_are_eight() -> None:
    assert Case("forward", "window", 4096, 64, "bf16").mask == "window(256)"
    assert Case("forward", "documents", 4096, 64, "bf16").lengths == [512] * 8
    assert sum(Case("forward", "documents", 41, 64, "bf16").lengths) == 41


def test_a_filter_takes_whole_words_and_any_of_several() -> None:
    assert {case.work for case in choose(words=["DECODE"])} == {"decode"}
    both = choose(words=["window 512 bf16", "decode float32"])
    assert [case.name for case in both] == ["forward window 512 D64 bf16", "decode causal 4096 D128 float32"]
    with pytest.raises(
        DataError, match=r"no case is named by --case 'windows'\. Did you mean 'window'\? Fix: words of"
    ):
        choose(words=["windows"])
    with pytest.raises(DataError, match=r"no case is named by --case 'decode window'\. Fix: words of f"):
        choose(words=["decode window"])


# Turns and medians.


def test_implementations_run_in_turns_at_least_as_often_as_given() -> None:
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in ("ours", "torch", "ceiling")}
    taken = in_turns(ways, rounds=7, seconds=0)
    assert order == ["ours", "torch", "ceiling"] * 7
    assert taken["torch"] == [2, 5, 8, 11, 14, 17, 20]


def test_cheap_implementations_run_until_a_limit_of_time_or_of_rounds() -> None:
    now = [0.0]

    def run() -> float:
        now[0] += 1.0
        return 1.0

    assert len(in_turns({"a": run}, rounds=7, seconds=10, clock=lambda: now[0])["a"]) == 10
    assert len(in_turns({"a": run, "b": run}, rounds=7, seconds=10, clock=lambda: now[0])["b"]) == 7
    assert len(in_turns({"a": lambda: 1.0}, rounds=7, seconds=10, clock=lambda: 0.0)["a"]) == 51


def test_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow run in seven, as when another process comes by, changes nothing."""
    seconds = {name: itertools.cycle([2.0, 2.0, 900.0]) for name in (peers.OURS, peers.SDPA)}
    real = table.in_turns

    def scripted(ways, rounds):
        assert list(ways) == [peers.OURS, peers.SDPA, CEILING]
        fake = {name: lambda name=name: next(seconds[name]) * (3 if name == peers.SDPA else 1) for name in seconds}
        return real({**fake, CEILING: lambda: 1.0}, rounds, 0)

    monkeypatch.setattr(table, "in_turns", scripted)
    (row,) = table.measure([SMALL], [peers.SDPA])
    assert row.figures[peers.OURS].seconds == 2.0 and row.figures[peers.SDPA].seconds == 6.0
    assert row.figures[peers.OURS].runs == 7 and row.times(peers.SDPA) == 3.0
    assert row.figures[peers.OURS].rate == SMALL.flops / 1e9 / 2
    assert row.ceiling == pytest.approx(ceilings.multiply_flops(1, False) / 1e9)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_kind_of_case_is_measured(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "in_turns", partial(in_turns, seconds=0))
    before = torch.get_num_threads()
    said: list[str] = []
    (row,) = table.measure([case], [peers.SDPA, peers.FORMULA], progress=said.append)
    assert said == [f"1/1  {case.name}"]
    assert list(row.figures) == [peers.OURS, peers.SDPA, peers.FORMULA]
    for figure in row.figures.values():
        assert figure.why_not is None and figure.runs >= 7 and figure.rate == case.amount / figure.seconds
    assert row.ceiling > 0 and torch.get_num_threads() == before


def test_nothing_is_timed_where_outputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.PEERS, peers.SDPA, lambda case: lambda q, k, v: v + 1)
    with pytest.raises(
        UndecidedError, match=r"lowtri and torch SDPA differ by .*, more than 1e-04\.\nNothing is timed"
    ):
        list(table.measure([SMALL], [peers.SDPA]))


def test_an_implementation_that_cannot_run_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case) -> peers.Attend:
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(table, "in_turns", partial(in_turns, seconds=0))
    monkeypatch.setitem(table.PEERS, peers.FLEX, broken)
    (row,) = table.measure([SMALL], [peers.FLEX])
    assert row.figures[peers.FLEX] == Figure(why_not="RuntimeError: no compiler")
    assert row.times(peers.FLEX) is None
    assert peers.flex(Case("training", "causal", 8, 32, "float32")) == "it has no backward on CPU"
    long = peers.sdpa(Case("forward", "window", 65_536, 64, "float32"))
    assert long == "its table of bools would hold 4,295 million pairs"
    monkeypatch.setitem(table.PEERS, peers.OURS, broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        list(table.measure([SMALL], []))


def test_what_is_too_slow_is_left_out() -> None:
    (row,) = table.measure([SMALL], [peers.FORMULA], longest=0.0)
    assert row.figures[peers.FORMULA].why_not == "one run takes 0.0 s"
    assert row.figures[peers.OURS].why_not is None


def test_decoding_finds_another_cache_each_time() -> None:
    tensors = timing.Tensors(TINY[-1])
    count = math.ceil(4 * 2**18 / TINY[-1].cache_bytes)
    assert count > 1 and len(tensors.caches) == count
    places = [tensors.next()[0].data_ptr() for _ in range(2 * count)]
    assert len(set(places)) == count and places[:count] == places[count:]


# Ceilings and memory.


@pytest.mark.parametrize("pairs", [False, True] if ISA.has_pairs else [False])
def test_the_ceiling_multiplies_correctly(pairs: bool) -> None:
    product = ceilings.multiply(2, pairs, 1)  # (threads, rows, 64), of ones
    assert (product == (128 if pairs else 64)).all() and product.shape[0] == 2
    assert ceilings.multiply_flops(2, pairs) == 2 * ceilings.multiply_flops(1, pairs)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_read_loop_reads_every_number(threads: int) -> None:
    numbers = np.arange(2**16, dtype=np.float32)
    assert ceilings.read(numbers.ctypes.data, numbers.nbytes, threads) == pytest.approx(numbers.sum(dtype=np.float64))


def test_the_peak_of_memory_is_seen() -> None:
    def touch_new_pages() -> None:  # np.ones may get pages that the allocator has kept
        with mmap.mmap(-1, 2**24) as pages:
            pages[::4096] = b"1" * 2**12

    seen = peak_bytes(touch_new_pages)
    assert seen is None or 0.9 * 2**24 <= seen < 2**26  # Linux counts pages in batches


# The other process.


def test_the_other_process_answers_line_by_line() -> None:
    fields = {**vars(SMALL)}
    fields.pop("pairs", None)
    long = {**fields, "mask_name": "window", "n": 65_536}
    questions = [{"case": fields}, {"run": True}, {"case": long}]
    answers = StringIO()
    before = torch.get_num_threads()
    try:
        mkl_avx512.serve(1, StringIO("\n".join(json.dumps(one) for one in questions)), answers)
    finally:
        torch.set_num_threads(before)
    ready, timed, refused = (json.loads(line) for line in answers.getvalue().splitlines())
    assert ready == {"ready": True} and timed["seconds"] > 0 and "million pairs" in refused["why_not"]


def test_without_a_compiler_nothing_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkl_avx512.sys, "platform", "linux")
    monkeypatch.setattr(mkl_avx512.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(mkl_avx512.shutil, "which", lambda name: None)
    with mkl_avx512.AvxWorker(1) as closed:
        assert closed.prepare(SMALL) == "no C compiler: cc was not found"
    monkeypatch.setattr(mkl_avx512.sys, "platform", "darwin")
    assert mkl_avx512.AvxWorker(1).why_not == "the preloaded library works on Linux and x86-64 only"


# What is shown.


def rows() -> list[Row]:
    made = []
    for case, rate in ((CASES[0], 100.0), *((Case("forward", "window", n, 64, "float32"), 50.0) for n in (512, 1024))):
        figures = {
            peers.OURS: Figure(0.010, 7, rate, 2_000_000),
            peers.SDPA: Figure(0.025, 7, rate / 2.5, 30_000_000),
            peers.FLEX: Figure(why_not="no compiler"),
        }
        made.append(Row(case, 125.0, figures))
    return made


def test_the_table() -> None:
    text = table.as_text(rows(), facts(1))
    lines = [line.split() for line in text.splitlines()]
    assert ["forward", "causal", "512", "D64", "float32", "GFLOP/s", "100", "80%", "40", "2.5", "-"] in lines
    names = "forward causal 512 D64 float32, forward window 512 D64 float32, forward window 1024 D64 float32"
    assert f"FlexAttention: not measured: no compiler ({names})" in text
    assert "As a window of 256 moves over more keys, float32" in text
    assert ["1,024", "10.00", "2.0", "25.00", "30.0", "-", "-"] in lines


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

    monkeypatch.setattr(machine, "version", version)
    versions = machine.versions()
    assert versions["torch"] is None and versions["numpy"] == "2.0"
    assert "torch" not in machine.headline(machine.facts(1))


def test_json_holds_what_was_measured() -> None:
    found = json.loads(json.dumps(table.as_json(rows(), facts(2)), allow_nan=False))
    assert found["threads"] == 2 and set(found["versions"]) == {*("lowtri", "python", "numpy", "torch")}
    row = found["rows"][1]
    assert (row["case"], row["mask"], row["unit"]) == ("forward window 512 D64 float32", "window(256)", "GFLOP/s")
    assert row["share"] == 0.4 and row["ceiling"] == 125.0
    ours = {"seconds": 0.01, "runs": 7, "rate": 50.0, "memory": 2_000_000, "why_not": None}
    assert row["figures"] == {
        peers.OURS: ours,
        peers.SDPA: {"seconds": 0.025, "runs": 7, "rate": 20.0, "memory": 30_000_000, "why_not": None},
        peers.FLEX: {"why_not": "no compiler"},
    }


# The command lines.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "windwo"], "no case is named by --case 'windwo'. Did you mean 'window'?"),
        (["--threads", "0"], "Invalid value for '--threads'"),
        (["--threads", "100000"], "bench: --threads is 100000, but this process may use"),
        (["--rounds", "3"], "Invalid value for '--rounds'"),
    ],
)
def test_bad_arguments_exit_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err and out == ""


def test_bench_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lowtri.benching.cases.CASES", [SMALL])
    monkeypatch.setattr(table, "in_turns", partial(in_turns, seconds=0))
    assert main(["bench", "--case", "causal", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [row["case"] for row in found["rows"]] == [SMALL.name]
    assert f"1/1  {SMALL.name}" in err
    assert main(["bench", "--case", "causal"]) == 0
    assert SMALL.name in capsys.readouterr().out
    assert main(["bench", "--full", "--list"]) == 0
    assert capsys.readouterr().out == f"{SMALL.name}\n"


def test_without_kernels_bench_and_the_doctor_say_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "unusable", lambda: "lowtri was installed without them. Fix: pip install lowtri")
    assert main(["bench"]) == 2
    assert "bench: there are no kernels: lowtri was installed without them. Fix: pip install" in capsys.readouterr().err
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "missing   there are no kernels, attention runs on torch's own or on the formula" in said
    assert "Fix: pip install lowtri" in said


def test_the_doctor_names_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    said = capsys.readouterr().out
    for words in (
        f"torch {version('torch')}",  # without the build, which some wheels leave out of their metadata
        "rows x",
        "dot products of bf16 pairs",
        "library   ",
        "missing   nothing",
    ):
        assert words in said
    assert f"torch computes with {torch.get_num_threads()}; the kernels run on" in said


def test_the_doctor_names_amx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOWTRI_ISA", raising=False)
    for has, isa, words in (
        (False, Avx2(), "AMX (tiles of bf16) no\n"),
        (
            True,
            Avx512Bf16(),
            "AMX (tiles of bf16) yes: the kernels do not use it (the system refuses it) and torch does",
        ),
        (True, Amx(), "AMX (tiles of bf16) yes: the kernels use it\n"),
    ):
        monkeypatch.setattr("lowtri.kernels.target.HAS_AMX", has)
        monkeypatch.setattr("lowtri.kernels.target.ISA", isa)
        assert main(["doctor", "--no-measure"]) == 0
        assert words in capsys.readouterr().out


def test_the_doctor_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checkup, "_READ_BYTES", 2**20)
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["trouble"] == [] and "measuring for a second" in err
    assert {"multiply", "attention", "read"} <= set(found["speed"]) and min(found["speed"].values()) > 0
    assert found["library"]["stale"] or found["kernels"]["target"] in found["library"]["sets"]
    assert "of that" in checkup.as_text(found)


def test_the_doctor_names_the_sets_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checkup.checkup(measure=False)
    report["library"] = {"sets": ["avx2", "baseline"], "bytes": 2**19, "functions": 33, "stale": None}
    assert "library   kernels for avx2, baseline: 33 functions, 512 KB" in checkup.as_text(report)
    report["library"] = {"sets": [], "bytes": None, "functions": 0, "stale": "the kernels' sources have changed"}
    assert "library   the kernels' sources have changed: each is compiled when" in checkup.as_text(report)


def test_the_doctor_knows_every_kernel() -> None:
    families = {name.lower() for name, one in vars(abi).items() if isinstance(one, abi.Abi)}
    assert families == {family for family, _ in functions_of(ISA)}
