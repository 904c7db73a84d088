"""The table of ``lowtri bench``: medians of implementations in turns, and the ceiling in the same turns; as text and as JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import torch

from lowtri.benching.cases import Case
from lowtri.benching.ceilings import in_pairs, multiply, multiply_flops, read
from lowtri.benching.machine import headline
from lowtri.benching.peers import OURS, PEERS
from lowtri.benching.timing import (
    ROUNDS,
    Tensors,
    check_equal,
    in_turns,
    peak_bytes,
    run,
    seconds_of,
    timed,
    torch_threads,
)
from lowtri.pictures.labels import aligned, ruled

CEILING = "ceiling"
LONGEST = 1.5

Way: TypeAlias = Callable[[], float]  # runs a case once and gives the seconds that it took; NaN if it cannot any more


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


def measure(
    cases: Sequence[Case],
    names: Sequence[str],
    threads: int = 1,
    rounds: int = ROUNDS,
    longest: float = LONGEST,
    progress: Callable[[str], None] = lambda _: None,
    others: Mapping[str, Callable[[Case], Way | str]] | None = None,
) -> Iterator[Row]:
    """A row for each case.

    Args:
        names: what to measure besides lowtri: names in :mod:`lowtri.benching.peers`, or in ``others``.
        longest: seconds; an implementation that takes longer for one run is left out.
        progress: takes a line about what comes next.
        others: other processes: for each name what makes the way to run a case there, or gives the reason why it cannot run.

    Raises:
        UndecidedError: if lowtri and another implementation give different outputs; nothing is timed then.
    """
    with torch_threads(threads):
        for number, case in enumerate(cases, 1):
            progress(f"{number}/{len(cases)}  {case.name}")
            yield _row(case, [OURS, *names], threads, rounds, longest, others or {})


def _row(
    case: Case,
    names: Sequence[str],
    threads: int,
    rounds: int,
    longest: float,
    others: Mapping[str, Callable[[Case], Way | str]],
) -> Row:
    tensors, pairs, decode = Tensors(case), in_pairs(case.dtype), case.work == "decode"
    ways: dict[str, Way] = {}
    figures = dict.fromkeys(names, Figure())
    outputs: dict[str, torch.Tensor] = {}
    for name in names:
        way = others[name](case) if name in others else _first_run(case, name, tensors, longest, outputs)
        if isinstance(way, str):
            figures[name] = Figure(why_not=way)
            continue
        if name in outputs and case.mask_name == "window" and case.work == "forward":
            figures[name] = Figure(memory=peak_bytes(way))
        ways[name] = way

    def ceiling() -> None:
        """Only multiplies, or only reads."""
        if decode:
            read(tensors.next()[0].data_ptr(), case.cache_bytes, threads)
        else:
            multiply(threads, pairs)

    ceiling()
    taken = in_turns({**ways, CEILING: partial(seconds_of, ceiling)}, rounds)
    for name in ways:
        median = statistics.median(taken[name])
        if median > 0:
            figures[name] = replace(figures[name], seconds=median, runs=len(taken[name]), rate=case.amount / median)
        else:  # NaN from a process that ended
            figures[name] = Figure(why_not="its process ended")
    amount = case.amount if decode else multiply_flops(threads, pairs) / 1e9
    return Row(case, amount / statistics.median(taken[CEILING]), figures)


def _first_run(case: Case, name: str, tensors: Tensors, longest: float, outputs: dict[str, torch.Tensor]) -> Way | str:
    """The way to run an implementation, warmed up, with its output checked; or why it cannot run. lowtri's errors are raised."""
    try:
        attend = PEERS[name](case)
        if isinstance(attend, str):
            return attend
        way, start = partial(timed, attend, tensors), time.perf_counter()
        output = run(attend, tensors)
        if name != OURS and time.perf_counter() - start > longest:
            seconds = way()  # what was compiled in the first run is ready in the second
            if seconds > longest:
                return f"one run takes {seconds:.1f} s"
    except Exception as error:
        if name == OURS:
            raise
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:100]}"
    outputs[name] = output
    check_equal(case.name, name, output, outputs[OURS], case.dtype)
    return way


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
    for dtype in dict.fromkeys(row.case.dtype for row in rows):  # windows of which several lengths were measured
        family = ("forward", "window", dtype)
        chosen = [row for row in rows if (row.case.work, row.case.mask_name, row.case.dtype) == family]
        if len(chosen) > 1:
            points: dict[str, dict[int, tuple[float, int | None]]] = {name: {} for name in chosen[0].figures}
            for row in chosen:
                for name, figure in row.figures.items():
                    if figure.why_not is None:
                        points[name][row.case.n] = (figure.seconds, figure.memory)
            lines += ["", f"As a window of 256 moves over more keys, {dtype}: MB beyond the inputs, at the peak"]
            lines += by_length("tokens", points)
    return "\n".join(lines)


def by_length(title: str, points: Mapping[str, Mapping[int, tuple[float, int | None]]]) -> list[str]:
    """Milliseconds, and MB of memory, of each implementation at each length."""
    table = [[title, *(heading for name in points for heading in (f"{name}: ms", "MB"))]]
    for n in sorted({n for by_n in points.values() for n in by_n}):
        table.append([f"{n:,}"])
        for seconds, size in (by_n.get(n, (None, None)) for by_n in points.values()):
            table[-1] += ["-" if seconds is None else f"{seconds * 1e3:,.2f}"]
            table[-1] += ["-" if size is None else f"{size / 1e6:,.1f}"]
    return aligned(table, "   ", right=True)


def _short(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def as_json(rows: Sequence[Row], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured: ``rate`` and ``ceiling`` in the row's unit, seconds, bytes; None where nothing was."""
    return {**facts, "rows": [_row_json(row) for row in rows]}


def _row_json(row: Row) -> dict[str, Any]:
    case = {name: getattr(row.case, name) for name in ("work", "n", "d", "dtype", "heads", "kv_heads")}
    facts = {"case": row.case.name, "who": row.case.mask_name, **case}
    facts |= {"mask": row.case.mask, "pairs": row.case.pairs, "unit": row.case.unit}
    figures = {
        name: asdict(figure) if figure.why_not is None else {"why_not": figure.why_not}
        for name, figure in row.figures.items()
    }
    return {**facts, "ceiling": row.ceiling, "share": row.share, "figures": figures}
