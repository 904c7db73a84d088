"""The table of ``lowtri bench``: medians of implementations in turns, and the ceiling in the same turns; as text and as JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch

from lowtri.benching.cases import Case
from lowtri.benching.ceilings import in_pairs, multiply, multiply_flops, read
from lowtri.benching.machine import headline
from lowtri.benching.peers import OURS, PEERS
from lowtri.benching.timing import ROUNDS, Tensors, check_equal, in_turns, peak_bytes, run, timed, torch_threads
from lowtri.pictures.labels import ruled

CEILING = "ceiling"
LONGEST = 1.5


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


def measure(
    cases: Sequence[Case],
    names: Sequence[str],
    threads: int = 1,
    rounds: int = ROUNDS,
    longest: float = LONGEST,
    progress: Callable[[str], None] = lambda _: None,
    workers: Mapping[str, Worker] | None = None,
) -> Iterator[Row]:
    """A row for each case.

    Args:
        names: what to measure besides lowtri: names in :mod:`lowtri.benching.peers`, or in ``workers``.
        longest: seconds; an implementation that takes longer for one run is left out.
        progress: takes a line about what comes next.
        workers: other processes by name; ``benchmarks/mkl_avx512.py`` has one.

    Raises:
        UndecidedError: if lowtri and another implementation give different outputs; nothing is timed then.
    """
    with torch_threads(threads):
        for number, case in enumerate(cases, 1):
            progress(f"{number}/{len(cases)}  {case.name}")
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
        check_equal(case.name, name, output, reference, case.dtype)
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


def as_text(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The table, with what could not be measured below it, and how cost grows where several lengths were measured."""
    names = [name for name in (rows[0].figures if rows else {}) if name != OURS]
    table = [("case", "", OURS, "share", *(heading for name in names for heading in (name, "x")))]
    missing: dict[str, list[str]] = {}
    for row in rows:
        cells = [row.case.name, row.case.unit, _short(row.figures[OURS].rate), f"{row.share:.0%}"]
        for name in names:
            figure, times = row.figures[name], row.times(name)
            if times is None:
                missing.setdefault(f"{name}: not measured: {figure.why_not}", []).append(row.case.name)
                cells += ["-", ""]
            else:
                cells += [_short(figure.rate), f"{times:.1f}"]
        table.append((*cells,))
    head, rule, *body = ruled(table)
    works = groupby(zip(rows, body, strict=True), lambda pair: pair[0].case.work)
    sections = ["\n".join(line for _, line in section) for _, section in works]
    lines = [headline(facts), "", head, rule, "\n\n".join(sections), ""]
    lines += [
        f"{OURS}: GFLOP/s on visible pairs, or GB/s of keys and values read; medians. share: of what the CPU multiplies",
        "(the register tile alone) or reads in the same run. x: how many times faster lowtri is. training: forward + backward.",
    ]
    lines += [f"{words} ({', '.join(cases)})" for words, cases in missing.items()]
    return "\n".join([*lines, *_growth(rows)])


def _growth(rows: Sequence[Row]) -> list[str]:
    """Time and memory by length, for windows of which several lengths were measured."""
    lines: list[str] = []
    for dtype in dict.fromkeys(row.case.dtype for row in rows):
        family = [row for row in rows if (row.case.work, row.case.who, row.case.dtype) == ("forward", "window", dtype)]
        family.sort(key=lambda row: row.case.n)
        if len(family) < 2:
            continue
        names = list(family[0].figures)
        lines += [
            "",
            f"As a window of 256 moves over more keys, {dtype}: milliseconds, and MB beyond the inputs at the peak",
        ]
        lines += [f"{'N':>8}" + "".join(f"{name:>24}" for name in names)]
        for row in family:
            cells = [_time_and_memory(row.figures[name]) for name in names]
            lines += [f"{row.case.n:>8,}" + "".join(f"{cell:>24}" for cell in cells)]
    return lines


def _time_and_memory(figure: Figure) -> str:
    if figure.why_not is not None:
        return "-"
    memory = "" if figure.memory is None else f"{figure.memory / 1e6:10,.0f}"
    return f"{figure.seconds * 1000:,.1f}{memory}"


def _short(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def as_json(rows: Sequence[Row], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured: ``rate`` and ``ceiling`` in the row's unit, seconds, bytes; None where nothing was."""
    return {**facts, "rows": [_row_json(row) for row in rows]}


def _row_json(row: Row) -> dict[str, Any]:
    fields = ("work", "who", "n", "d", "dtype", "heads", "kv_heads")
    case = {name: getattr(row.case, name) for name in fields}
    facts = {"case": row.case.name, **case, "mask": row.case.mask, "pairs": row.case.pairs, "unit": row.case.unit}
    figures = {
        name: asdict(figure) if figure.why_not is None else {"why_not": figure.why_not}
        for name, figure in row.figures.items()
    }
    return {**facts, "ceiling": row.ceiling, "share": row.share, "figures": figures}
