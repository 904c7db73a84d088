"""The results as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from typing import Any

from lowtri.benching.measure import Figure, Row
from lowtri.benching.peers import OURS

__all__ = ["as_json", "as_text", "headline"]


def headline(facts: dict[str, Any]) -> str:
    """Machine, threads, load, versions and date, in two lines."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    load = "" if facts["load"] is None else f", load {facts['load']}"
    crowded = facts["load"] is not None and facts["load"] > facts["cpus"] - facts["threads"] + 0.5
    note = " (others compute, too: figures are too low, look at the ratios)" if crowded else ""
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return f"{facts['date']}, {facts['cpu']}, {threads} of {facts['cpus']} CPUs{load}{note}\n{versions}"


def as_text(rows: Sequence[Row], facts: dict[str, Any], width: int = 140) -> str:
    """The table, with what could not be measured below it, and how cost grows where several lengths were measured."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    names = [name for name in (rows[0].figures if rows else {}) if name != OURS]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("case", "", OURS, "share"):
        table.add_column(heading, justify="left" if heading in ("case", "") else "right")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("x", justify="right")
    missing: dict[str, list[str]] = {}
    for number, row in enumerate(rows):
        cells = [row.case.name, row.case.unit, _short(row.figures[OURS].rate), f"{row.share:.0%}"]
        for name in names:
            figure, times = row.figures[name], row.times(name)
            if times is None:
                missing.setdefault(f"{name}: not measured: {figure.why_not}", []).append(row.case.name)
                cells += ["-", ""]
            else:
                cells += [_short(figure.rate), f"{times:.1f}"]
        table.add_row(*cells, end_section=number + 1 < len(rows) and rows[number + 1].case.work != row.case.work)
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(table)
    lines = [headline(facts), "", "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n"), ""]
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
    return {**facts, "rows": [_row(row) for row in rows]}


def _row(row: Row) -> dict[str, Any]:
    case = asdict(row.case)
    case.pop("short")
    facts = {"case": row.case.name, **case, "mask": row.case.mask, "pairs": row.case.pairs, "unit": row.case.unit}
    figures = {
        name: asdict(figure) if figure.why_not is None else {"why_not": figure.why_not}
        for name, figure in row.figures.items()
    }
    return {**facts, "ceiling": row.ceiling, "share": row.share, "figures": figures}
