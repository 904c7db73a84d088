"""Interleaved timing: all implementations run in turns in one process, so that other load on the machine affects all of them equally.

Figures are medians. The ceiling is timed in the same turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lowtri.benching.cases import Case
from lowtri.benching.ceilings import in_pairs, multiply, multiply_flops, read
from lowtri.benching.memory import peak_bytes
from lowtri.benching.peers import OURS, PEERS
from lowtri.benching.runs import Tensors, run, timed, torch_threads
from lowtri.errors import UndecidedError

__all__ = ["ALLOWED", "CEILING", "LONGEST", "Figure", "Row", "Worker", "in_turns", "measure"]

CEILING = "ceiling"
LONGEST = 1.5
_ROUNDS = 7  # at least
_SECONDS = 0.5  # cheap cases are repeated for so long, at most
_MOST_ROUNDS = 51
ALLOWED = {"float32": 1e-4, "bf16": 6e-2, "float16": 1e-2}  # the difference of two correct outputs of order 1


@dataclass(frozen=True)
class Figure:
    """One implementation's figures for one case; ``why_not`` where it could not run."""

    seconds: float = 0.0  # the median
    runs: int = 0
    rate: float = 0.0  # in the case's unit
    memory: int | None = None  # bytes beyond the inputs, at the peak
    why_not: str | None = None


@dataclass(frozen=True)
class Row:
    """One case with all its figures."""

    case: Case
    ceiling: float  # in the case's unit
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the ceiling that lowtri reaches."""
        return self.figures[OURS].rate / self.ceiling

    def times(self, name: str) -> float | None:
        """How many times faster lowtri is."""
        other = self.figures.get(name)
        return other.seconds / self.figures[OURS].seconds if other and other.why_not is None else None


class Worker(Protocol):
    """Another process that runs cases on request, so that it can be timed in turns with this one."""

    def prepare(self, case: Case) -> str | None:
        """Set the case up there; or the reason why it cannot run."""

    def seconds(self) -> float:
        """Run it once and return the seconds that it took; NaN if the process has ended."""


def in_turns(
    ways: Mapping[str, Callable[[], float]],
    rounds: int = _ROUNDS,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Call every way once a round, in their order, for at least so many rounds and so many seconds.

    >>> in_turns({"one": lambda: 1.0, "two": lambda: 2.0}, rounds=2, seconds=0)
    {'one': [1.0, 1.0], 'two': [2.0, 2.0]}

    Args:
        ways: each gives the seconds that it took.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    start, done = clock(), 0
    while done < rounds or (clock() - start < seconds and done < _MOST_ROUNDS):
        for name, way in ways.items():
            taken[name].append(way())
        done += 1
    return taken


def measure(
    cases: Sequence[Case],
    names: Sequence[str],
    threads: int = 1,
    rounds: int = _ROUNDS,
    longest: float = LONGEST,
    say: Callable[[str], None] = lambda _: None,
    workers: Mapping[str, Worker] | None = None,
) -> Iterator[Row]:
    """A row for each case.

    Args:
        names: what to measure besides lowtri: names in :mod:`lowtri.benching.peers`, or in ``workers``.
        longest: seconds; an implementation that takes longer for one run is left out.
        say: takes a line about what comes next.
        workers: other processes by name; ``benchmarks/mkl_avx512.py`` has one.

    Raises:
        UndecidedError: if lowtri and another implementation give different outputs; nothing is timed then.
    """
    with torch_threads(threads):
        for number, case in enumerate(cases, 1):
            say(f"{number}/{len(cases)}  {case.name}")
            yield _row(case, [OURS, *names], threads, rounds, longest, workers or {})


def _row(
    case: Case, names: Sequence[str], threads: int, rounds: int, longest: float, workers: Mapping[str, Worker]
) -> Row:
    tensors = Tensors(case)
    ways: dict[str, Callable[[], float]] = {}
    missing: dict[str, str] = {}
    memory: dict[str, int | None] = {}
    reference: torch.Tensor | None = None  # lowtri's output, the first
    for name in names:
        if name in workers:
            why_not = workers[name].prepare(case)
            if why_not is None:
                ways[name] = workers[name].seconds
            else:
                missing[name] = why_not
            continue
        result = _first_run(case, name, tensors, longest)
        if isinstance(result, str):
            missing[name] = result
            continue
        attend, output = result
        if reference is None:
            reference = output
        _compare(case, name, output, reference)
        if case.who == "window" and case.work == "forward":
            memory[name] = peak_bytes(lambda attend=attend: run(attend, tensors))  # type: ignore[misc]
        ways[name] = lambda attend=attend: timed(attend, tensors)  # type: ignore[misc]
    ceiling, amount = _ceiling(case, tensors, threads)
    ceiling()
    taken = in_turns({**ways, CEILING: ceiling}, rounds)
    figures = {name: Figure(why_not=why) for name, why in missing.items()}
    for name in ways:
        median = statistics.median(taken[name])
        if not median > 0:  # NaN from a process that ended
            figures[name] = Figure(why_not="its process ended")
            continue
        figures[name] = Figure(median, len(taken[name]), case.amount / median, memory.get(name))
    return Row(case, amount / statistics.median(taken[CEILING]), {name: figures[name] for name in names})


def _first_run(case: Case, name: str, tensors: Tensors, longest: float) -> str | tuple[Any, torch.Tensor]:
    """The implementation, warmed up, and its output; or why it cannot run. lowtri's errors are raised."""
    try:
        attend = PEERS[name](case)
        if isinstance(attend, str):
            return attend
        start = time.perf_counter()
        output = run(attend, tensors)
        if name != OURS and time.perf_counter() - start > longest:
            seconds = timed(attend, tensors)  # what was compiled in the first run is ready in the second
            if seconds > longest:
                return f"one run takes {seconds:.1f} s"
        return attend, output
    except Exception as error:
        if name == OURS:
            raise
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:100]}"


def _compare(case: Case, name: str, output: torch.Tensor, reference: torch.Tensor) -> None:
    difference = float((output.float() - reference.float()).abs().max())
    if not difference <= ALLOWED[case.dtype]:
        raise UndecidedError(
            f"bench: {case.name}: {OURS} and {name} differ by {difference:.2g}, more than {ALLOWED[case.dtype]:.0e}.\n"
            "Nothing is timed: a wrong answer has no speed."
        )


def _ceiling(case: Case, tensors: Tensors, threads: int) -> tuple[Callable[[], float], float]:
    """A run that only multiplies, or only reads, and its amount of work in the unit of the case."""

    def timed_ceiling() -> float:
        start = time.perf_counter()
        if case.work == "decode":
            cache, _ = tensors.next()
            read(cache.data_ptr(), case.cache_bytes, threads)
        else:
            multiply(threads, in_pairs(case.dtype))
        return time.perf_counter() - start

    pairs = in_pairs(case.dtype)
    return timed_ceiling, case.amount if case.work == "decode" else multiply_flops(threads, pairs) / 1e9
