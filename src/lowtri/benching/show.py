"""The results as a table, as JSON, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from lowtri.benching.measure import Figure, Row
from lowtri.benching.peers import OURS
from lowtri.errors import DataError
from lowtri.files import write_atomically

__all__ = ["as_json", "as_text", "check_plot", "draw", "headline"]


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


def check_plot(path: Path) -> None:
    """Whether :func:`draw` can write there, before minutes of measuring.

    Raises:
        DataError: if matplotlib is not installed, or does not write that kind of file, or the folder is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise DataError("bench: --plot needs matplotlib. Fix: pip install 'lowtri[plot]'.") from None
    kinds = sorted(FigureCanvasAgg.filetypes)
    if path.suffix.lstrip(".").lower() not in kinds:
        raise DataError(f"bench: --plot {path}: matplotlib writes .{', .'.join(kinds)}. Fix: --plot bench.png.")
    if not path.absolute().parent.is_dir():
        raise DataError(f"bench: --plot {path}: there is no folder {path.parent}.")


def draw(rows: Sequence[Row], facts: dict[str, Any], path: Path) -> None:
    """A picture of the rates, a group of bars for each case, the ceiling as a mark; written whole or not at all."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    names = list(rows[0].figures)
    units = list(dict.fromkeys(row.case.unit for row in rows))
    counts = [sum(row.case.unit == unit for row in rows) for unit in units]
    picture = Picture(figsize=(9, 1.6 + 0.2 * len(rows) * (len(names) + 1)), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(len(units), 1, squeeze=False, gridspec_kw={"height_ratios": counts})[:, 0]
    for unit, axis in zip(units, axes, strict=True):
        chosen = [row for row in rows if row.case.unit == unit]
        for i, name in enumerate(names):
            ys = [y + (i - (len(names) - 1) / 2) * 0.8 / len(names) for y in range(len(chosen))]
            axis.barh(ys, [row.figures[name].rate for row in chosen], height=0.8 / len(names), label=name)
        for y, row in enumerate(chosen):
            axis.plot([row.ceiling] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1)
        axis.set_yticks(range(len(chosen)), [row.case.name for row in chosen])
        axis.invert_yaxis()
        axis.set_xlabel(f"{unit}; the black line is what the CPU does with nothing else to do")
    picture.suptitle(headline(facts), fontsize=8)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    kind = path.suffix.lstrip(".").lower()
    write_atomically(path, lambda temporary: picture.savefig(temporary, format=kind))
