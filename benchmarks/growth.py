"""Time and memory against length, from 512 to 131,072 tokens: lowtri and torch interleaved; as text, and as a picture.

    python benchmarks/growth.py --out docs/growth.svg
    python benchmarks/growth.py --quick --dtype bf16

The picture has a column for each mask, and both of its axes are logarithmic. All takes some five minutes. A line ends where one
run would take too long, or where torch's table of pairs would not fit into memory; the reason is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lowtri.benching import (
    OURS,
    ROUNDS,
    SDPA,
    Attend,
    Clock,
    Tensors,
    check_equal,
    facts,
    headline,
    interleaved,
    needs_table,
    ours,
    run,
    sdpa,
    timed,
    torch_threads,
)
from lowtri.errors import DataError
from lowtri.files import write_atomically, writing
from lowtri.pictures.labels import aligned
from lowtri.pictures.svg import INK, LINE, QUERY, VISIBLE
from peak_memory import available_bytes, peak_bytes
from presets import BYTES, DOCUMENT, WINDOW, growing

MASKS = ("causal", "window", "documents")
DTYPES = tuple(BYTES)
LENGTHS = tuple(2**power for power in range(9, 18))  # 512 .. 131,072
QUICK = (512, 1024)

_LONGEST = 30.0  # seconds; a run that would take longer ends its line
_SLOW = 1.0  # seconds: if a round takes longer,
_FEW_ROUNDS = 3  # there are fewer of them, with the first


@dataclass(frozen=True)
class Point:
    """One length."""

    n: int
    seconds: float  # the median of the turns
    bytes: int | None  # beyond the inputs, at the peak of a first call; None where the system does not say


@dataclass
class Line:
    """One implementation under one mask."""

    mask: str
    name: str
    points: list[Point] = field(default_factory=list)
    ended: str | None = None  # why there is no longer length

    def seconds_at(self, n: int) -> float:
        """What a run over ``n`` tokens would take if its time grew with the square of the length."""
        return self.points[-1].seconds * (n / self.points[-1].n) ** 2 if self.points else 0.0


def clock_of(threads: int) -> Clock:
    """CPU time for one thread, which other load on the machine does not lengthen; time on the wall for several, since threads of an
    OpenMP team spin while they wait.
    """
    return time.process_time if threads == 1 else time.perf_counter


def grow(
    dtype: str = "float32",
    threads: int = 1,
    lengths: Sequence[int] = LENGTHS,
    longest: float = _LONGEST,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Line]:
    """The lines of lowtri and of torch for each mask: batch 1, one head.

    Args:
        dtype: one of ``DTYPES``.
        lengths: multiples of 512, in growing order.
        longest: seconds; an implementation whose next run would take longer, by the square of the length, ends there.
        progress: takes a line about each length.

    Raises:
        UndecidedError: if the two give different outputs; nothing is timed then.
    """
    clock = clock_of(threads)
    with torch_threads(threads):
        for who in MASKS:
            lines = [Line(who, name) for name in (OURS, SDPA)]
            for n in lengths:
                _extend(lines, n, dtype, longest, clock)
                last = [line.points[-1] for line in lines if line.points and line.points[-1].n == n]
                progress(f"{who} {n:,} tokens: " + ", ".join(f"{point.seconds * 1e3:,.2f} ms" for point in last))
            yield from lines


def _extend(lines: Sequence[Line], n: int, dtype: str, longest: float, clock: Clock) -> None:
    """Add a point to every line that does not end before ``n``; outputs are compared before the first one."""
    case = growing(lines[0].mask, n, dtype)
    tensors = Tensors(case)
    attends: dict[str, Attend | str] = {}
    for line in lines:
        line.ended = line.ended or _reason_to_end(line, n, longest)
        if not line.ended:  # a line ends before its table is too large
            attends[line.name] = ours(case) if line.name == OURS else sdpa(case, n * n)
    runs: dict[str, Callable[[], float]] = {
        name: partial(timed, attend, tensors, clock) for name, attend in attends.items() if not isinstance(attend, str)
    }
    if len(runs) > 1 and not lines[0].points:
        output, torchs = (run(attend, tensors) for attend in attends.values() if not isinstance(attend, str))
        check_equal(f"{case.label}, {n:,} tokens", SDPA, torchs, output, dtype)
    peaks: dict[str, int | None] = {}
    first: dict[str, float] = {}
    for name, timed_run in runs.items():
        table_bytes = n * n if name == SDPA and needs_table(case) else 0
        start = clock()
        peak = peak_bytes(timed_run)
        first[name] = clock() - start
        peaks[name] = None if peak is None else peak + table_bytes
    slow = sum(first.values()) > _SLOW
    taken = interleaved(runs, _FEW_ROUNDS - 1 if slow else ROUNDS, 0)
    for line in lines:
        if line.name in taken:
            seconds = [*taken[line.name], *[first[line.name]] * slow]
            line.points.append(Point(n, statistics.median(seconds), peaks[line.name]))


def _reason_to_end(line: Line, n: int, longest: float) -> str | None:
    seconds = line.seconds_at(n)
    if seconds > longest:
        return f"{n:,} tokens would take about {seconds:,.0f} s"
    table_bytes = n * n * (1 + 4)  # bools, and the floats that torch makes of them
    if line.name == SDPA and line.mask != "causal" and table_bytes > available_bytes() / 2:
        return f"for {n:,} tokens its table takes {table_bytes / 1e9:,.3g} GB"
    return None


def as_text(lines: Sequence[Line]) -> str:
    """A table for each mask: milliseconds, and MB beyond the inputs; below it, why lines end."""
    text: list[str] = []
    for who in dict.fromkeys(line.mask for line in lines):
        chosen = [line for line in lines if line.mask == who]
        points = {line.name: {point.n: (point.seconds, point.bytes) for point in line.points} for line in chosen}
        text += [*by_length(who, points), *(f"{line.name} ends: {line.ended}" for line in chosen if line.ended), ""]
    return "\n".join(text)


def by_length(title: str, points: Mapping[str, Mapping[int, tuple[float, int | None]]]) -> list[str]:
    """Milliseconds, and MB of memory, of each implementation at each length."""
    table = [[title, *(heading for name in points for heading in (f"{name}: ms", "MB"))]]
    for n in sorted({n for by_n in points.values() for n in by_n}):
        table.append([f"{n:,}"])
        for seconds, size in (by_n.get(n, (None, None)) for by_n in points.values()):
            table[-1] += ["-" if seconds is None else f"{seconds * 1e3:,.2f}"]
            table[-1] += ["-" if size is None else f"{size / 1e6:,.1f}"]
    return aligned(table, "   ", right=True)


def as_json(lines: Sequence[Line], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, in seconds and bytes."""
    size = growing("causal", 1, "float32").d
    return {**facts, "heads": 1, "head_size": size, "lines": [asdict(line) for line in lines]}


_TITLES = {
    "causal": "causal",
    "window": f"window of {WINDOW} tokens",
    "documents": f"causal, documents of {DOCUMENT} tokens",
}
_COLOURS = (VISIBLE.light, QUERY.light)
_MARKERS = ("o", "s")
_SCALES = {"seconds": (1e3, "time of a call, ms"), "bytes": (1e-6, "memory beyond the inputs, MB")}
_LEAST_BYTES = 2**18  # Linux counts pages in batches: less is drawn as this


def check_plot() -> None:
    """Whether :func:`draw` can work, before minutes of measuring.

    Raises:
        DataError: if matplotlib is not installed.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError:
        raise DataError("growth: --out needs matplotlib. Fix: pip install matplotlib") from None


def draw(lines: Sequence[Line], facts: dict[str, Any], dtype: str, path: Path) -> None:
    """Write the picture, whole or not at all, in the format of the file's name."""
    check_plot()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = path.suffix.lstrip(".").lower()
    # Text stays text, and the same figures give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowtri", "font.size": 8, "text.color": INK.light}):
        figure = Figure(figsize=(9.5, 6.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        masks = list(dict.fromkeys(line.mask for line in lines))
        panels = figure.subplots(2, len(masks), sharex=True, sharey="row", squeeze=False)
        for column, who in enumerate(masks):
            chosen = [line for line in lines if line.mask == who]
            for row, quantity in zip(panels, _SCALES, strict=True):
                _panel(row[column], chosen, quantity)
            panels[0][column].set_title(_TITLES[who], fontsize=9)
            ends = [f"{line.name} ends:\n{line.ended}" for line in chosen if line.ended]
            panels[1][column].set_xlabel("\n".join(["tokens", *ends]))
        for row, (_, label) in zip(panels, _SCALES.values(), strict=True):
            row[0].set_ylabel(label)
        panels[0][0].legend(loc="lower right", frameon=False)
        clock = "CPU time" if facts["threads"] == 1 else "time"
        what = f"Attention of one head of 64 in {dtype}, forward; median {clock}, interleaved"
        figure.suptitle(f"{what}\n{headline(facts)}", fontsize=8)
        metadata = {"Date": None} if kind == "svg" else None
        with writing("growth", path):
            write_atomically(path, lambda part: figure.savefig(part, format=kind, metadata=metadata))


def _panel(axes: Any, lines: Sequence[Line], quantity: str) -> None:
    factor = _SCALES[quantity][0]
    least = _LEAST_BYTES if quantity == "bytes" else 0
    for line, colour, marker in zip(lines, _COLOURS, _MARKERS, strict=True):
        points = [(point.n, getattr(point, quantity)) for point in line.points]
        points = [(n, max(size, least) * factor) for n, size in points if size is not None]
        style = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.3}
        axes.plot([n for n, _ in points], [size for _, size in points], label=line.name, **style)
    axes.set(xscale="log", yscale="log")
    lengths = sorted({point.n for line in lines for point in line.points})
    axes.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])
    axes.yaxis.set_major_formatter(lambda size, _: f"{size:,g}")
    axes.minorticks_off()
    axes.grid(color=LINE.light, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also draw: svg, png or pdf")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.out:
        check_plot()  # before minutes of measuring
    machine = facts(chosen.threads)

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    note(headline(machine))
    lines = list(grow(chosen.dtype, chosen.threads, QUICK if chosen.quick else LENGTHS, progress=note))
    if chosen.out:
        draw(lines, machine, chosen.dtype, chosen.out)
        note(f"wrote {chosen.out}")
    found = as_json(lines, {**machine, "dtype": chosen.dtype})
    print(json.dumps(found, indent=2) if chosen.json else as_text(lines))


if __name__ == "__main__":
    main()
