"""The grid of calls by turns with torch: what counts as slower, what is shown; and compiling ahead."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowtri
from lowtri.backends.cpu import ready
from lowtri.benching import compiling, never_slower
from lowtri.benching.grid import PLAIN, TABLED, GridCall, grid
from lowtri.benching.machine import facts
from lowtri.benching.never_slower import Comparison, as_json, as_text, compare
from lowtri.cli.main import main
from lowtri.kernels import compilation, select

CALL = GridCall("forward", "causal", 16, "float32", 1)


def test_the_grid_has_every_combination_once() -> None:
    calls = grid()
    assert len(set(calls)) == len(calls)
    assert {call.who for call in calls} == {*PLAIN, *TABLED}
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
    """A clock that calls advance: torch's take 100 us, ours ``takes(call, now)`` seconds."""

    def __init__(self, takes: Callable[[GridCall, float], float]) -> None:
        self.now, self.takes, self.order = 0.0, takes, list[int]()

    def ways(self, call: GridCall) -> tuple[Callable[[], None], Callable[[], None], str]:
        self.order.append(call.n)
        return lambda: self._advance(self.takes(call, self.now)), lambda: self._advance(100e-6), "cpu"

    def _advance(self, seconds: float) -> None:
        self.now += seconds


def measured(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> tuple[list[Comparison], list[str]]:
    """The comparisons of four calls, of 1 to 4 tokens, and the lines about them."""
    said: list[str] = []
    clock = SimpleNamespace(process_time=lambda: machine.now, perf_counter=lambda: machine.now)
    monkeypatch.setattr(never_slower, "time", clock)
    monkeypatch.setattr(never_slower, "_ways", machine.ways)
    calls = [GridCall("forward", "causal", n, "float32", 1 + n % 2) for n in (1, 2, 3, 4)]
    return compare(calls, said.append), said


def test_load_that_lasts_longer_than_the_turns_of_a_call_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda call, now: 300e-6 if now < 0.3 else 90e-6)
    found, said = measured(monkeypatch, machine)
    assert machine.order == [1, 2, 3, 4, 1, 2], "the second pass comes after the whole grid"
    assert not any(one.is_slower for one in found) and said == ["2 of 4 calls look slower and are measured again."]
    assert [one.ours for one in found] == pytest.approx([90e-6] * 4)


@pytest.mark.parametrize("least", [1.3, 3.0])
def test_a_call_that_is_slower_is_reported_whatever_else_runs(monkeypatch: pytest.MonkeyPatch, least: float) -> None:
    def takes(call: GridCall, now: float) -> float:
        load = 2 if now % 0.01 < 0.003 else 1  # for a third of the time, in both passes
        return load * 100e-6 * (least if call.n == 3 else 0.8)

    machine = Machine(takes)
    found, said = measured(monkeypatch, machine)
    assert [one.call.n for one in found] == [1, 2, 3, 4]
    assert [one.is_slower for one in found] == [False, False, True, False]
    assert any(line.startswith("slower  forward causal 3 ") for line in said)


def test_the_second_pass_has_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    slower = Comparison(CALL, "cpu", 1e-3, 1e-4)
    monkeypatch.setattr(never_slower, "_compare", lambda _, count: (turns.append(count), slower)[1])
    assert [one.is_slower for one in compare([CALL, CALL], turns=3)] == [True, True]
    assert turns == [3, 3, 31, 31]


@pytest.mark.parametrize("work", ["forward", "training", "decode"])
def test_both_sides_compute_the_same(work: str) -> None:
    for who in (*PLAIN, *TABLED):
        call = GridCall(work, who, 32, "float32", 1)  # type: ignore[arg-type]
        ours, theirs, engine = never_slower._ways(call)
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


def test_never_slower_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtri.benching.compiling.compile_kernels", lambda progress: [])
    for seconds, code in ((1e-3, 1), (1e-5, 0)):
        monkeypatch.setattr(never_slower, "_compare", lambda call, n, s=seconds: Comparison(call, "cpu", s, 1e-4))
        assert main(["bench", "--never-slower", "--quick", "--json"]) == code
        out, err = capsys.readouterr()
        assert json.loads(out)["slower"] == (39 if code else 0) and ("slower  forward" in err) == bool(code)


# Kernels that are compiled already, and compiling them ahead.


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch):
    """Pins which kernels were compiled before; prepared calls are forgotten, since they have chosen."""

    def pin(kernels: frozenset[tuple[str, str]]) -> None:
        monkeypatch.setattr(ready, "found", lambda: kernels)
        ready.compiled_before.cache_clear()

    yield pin
    ready.compiled_before.cache_clear()


def test_small_calls_run_on_kernels_that_need_no_compiler(pinned) -> None:
    q, k, v = torch.randn(3, 1, 4, 64, 64)
    spec = select.SPECS["forward", "float32", "direct"].name
    pinned(frozenset())
    choice = lowtri.which_engine(q, k, v, "causal")
    assert choice.engine == "sdpa" and "lowtri doctor --compile" in str(choice)
    pinned(frozenset({("forward", spec)}))
    choice = lowtri.which_engine(q, k, v, "causal")
    assert choice.engine == "cpu"
    training = lowtri.which_engine(q.requires_grad_(), k, v, "causal")
    assert training.answers["cpu"].startswith("only by name: a kernel is not compiled"), "that of the gradients"
    one = lowtri.which_engine(q[:, :, -1:].detach(), k, v, "causal")
    assert one.engine == "sdpa", "the kernel for few queries is another"


def test_the_choice_is_made_once_in_a_process(pinned, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 4, 64, 64)
    pinned(frozenset())
    assert lowtri.which_engine(q, k, v, "causal").engine == "sdpa"
    kernels = frozenset((family, spec.name) for family, spec in select.KERNELS)
    monkeypatch.setattr(ready, "found", lambda: kernels)  # compiled meanwhile
    assert lowtri.which_engine(q, k, v, "causal").engine == "sdpa"


def test_doctor_compiles_ahead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(compiling, "KERNELS", select.KERNELS[:1])
    monkeypatch.setattr(
        compiling, "mark_compiled_ahead", lambda kernel, spec: asked.append((kernel.__name__, spec.name))
    )
    assert main(["doctor", "--compile", "--json"]) == 0
    assert asked == [(family, spec.name) for family, spec in select.KERNELS[:1]]
    found = json.loads(capsys.readouterr().out)
    assert [kernel["family"] for kernel in found["kernels"]] == ["forward"]
    assert found["folder"] == str(compilation.cache_folder())
    assert main(["doctor", "--compile"]) == 0
    assert "was compiled" in capsys.readouterr().out
    family, spec = select.KERNELS[0]
    assert (family, spec.name) in ready_now()


def ready_now() -> set[tuple[str, str]]:
    return {(family, spec.name) for family, spec in select.KERNELS if compilation.is_compiled(kernel(family), spec)}


def kernel(family: str):
    return getattr(__import__(f"lowtri.kernels.{family}", fromlist=[family]), family)


TURNS = """
import sys, time
from pathlib import Path
from lowtri.kernels.compilation import _turn
lock, log = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
with _turn(lock):
    with log.open("a") as file: file.write("in ")
    time.sleep(0.2)
    with log.open("a") as file: file.write("out ")
"""


def test_two_processes_take_turns_and_a_killed_one_frees_its_lock(tmp_path: Path) -> None:
    lock, log = tmp_path / "kernel.lock", tmp_path / "log"

    def started() -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", TURNS, str(lock), str(log)], **pipes)  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        return process

    processes = [started(), started()]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert log.read_text() == "in out in out "
    killed = started()
    killed.stdin.write("\n")
    killed.stdin.flush()
    while log.read_text().count("in") < 3:
        pass
    killed.kill()
    killed.communicate(timeout=60)
    last = started()
    last.communicate("\n", timeout=60)
    assert log.read_text().endswith("in in out ")


@pytest.mark.sweep
def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    """The second waits and loads what the first has compiled."""
    code = """
        import time
        from lowtri.kernels import abi, compilation, decode, select
        started = time.process_time()
        compilation.compiled(decode.decode, abi.DECODE, select.SPECS["decode", "float32", "direct"])
        print(time.process_time() - started)
    """
    import os
    import textwrap

    environment = {**os.environ, "LOWTRI_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    least, most = sorted(float(out) for out, _ in answers)
    assert least < most / 2
    assert len(list(tmp_path.rglob("*.compiled"))) == 1
