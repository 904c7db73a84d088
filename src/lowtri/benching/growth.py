"""Time and memory against length, from 512 to 131,072 tokens: lowtri and torch in turns, for ``lowtri bench --plot``; the picture has
a column for each mask, and both of its axes are logarithmic.

A line ends where one run would take too long, or where torch's table of pairs would not fit into memory; the reason is kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lowtri.benching.cases import BYTES, DOCUMENT, WINDOW, Case, growing
from lowtri.benching.machine import headline
from lowtri.benching.peers import OURS, PEERS, SDPA, Attend, needs_table, sdpa
from lowtri.benching.timing import (
    ROUNDS,
    Clock,
    Tensors,
    available_bytes,
    check_equal,
    clock_of,
    in_turns,
    peak_bytes,
    run,
    timed,
    torch_threads,
)
from lowtri.errors import DataError
from lowtri.files import write_atomically, writing
from lowtri.pictures.svg import INK, LINE, QUERY, VISIBLE

MASKS = ("causal", "window", "documents")
DTYPES = tuple(BYTES)
LENGTHS = tuple(2**power for power in range(9, 18))  # 512 .. 131,072
QUICK = (512, 1024)

_LONGEST = 30.0  # seconds; a run that would take longer ends its line
_FEW_ROUNDS, _SLOW = 3, 1.0  # fewer turns, with the first, where a turn takes more than a second


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
            _check(who, lengths[0], dtype)  # compiles as well, and starts the threads
            for n in lengths:
                _extend(lines, n, dtype, longest, clock)
                last = [line.points[-1] for line in lines if line.points and line.points[-1].n == n]
                progress(f"{who} {n:,} tokens: " + ", ".join(f"{point.seconds * 1e3:,.2f} ms" for point in last))
            yield from lines


def _check(who: str, n: int, dtype: str) -> None:
    """Raise if lowtri and torch give different outputs."""
    case = growing(who, n, dtype)
    tensors = Tensors(case)
    output, torchs = (run(_attend(name, case), tensors) for name in (OURS, SDPA))
    check_equal(f"{who}, {n:,} tokens", SDPA, torchs, output, dtype)


def _attend(name: str, case: Case) -> Attend:
    attend = PEERS[name](case) if name == OURS else sdpa(case, case.n**2)  # a line ends before its table is too large
    assert not isinstance(attend, str)
    return attend


def _extend(lines: Sequence[Line], n: int, dtype: str, longest: float, clock: Clock) -> None:
    """Add a point to every line that does not end before ``n``."""
    case = growing(lines[0].mask, n, dtype)
    tensors = Tensors(case)
    runs: dict[str, Callable[[], float]] = {}
    peaks: dict[str, int | None] = {}
    first: dict[str, float] = {}
    for line in lines:
        line.ended = line.ended or _reason_to_end(line, n, longest)
        if line.ended:
            continue
        table_bytes = n * n if line.name == SDPA and needs_table(case) else 0
        runs[line.name] = partial(timed, _attend(line.name, case), tensors, clock)
        start = clock()
        peak = peak_bytes(runs[line.name])
        first[line.name] = clock() - start
        peaks[line.name] = None if peak is None else peak + table_bytes
    slow = sum(first.values()) > _SLOW
    taken = in_turns(runs, _FEW_ROUNDS - 1 if slow else ROUNDS, 0)
    for name in taken if slow else ():
        taken[name].append(first[name])
    for line in lines:
        if line.name in taken:
            line.points.append(Point(n, statistics.median(taken[line.name]), peaks[line.name]))


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
        text += [f"{who:<12}" + "".join(f"{f'{line.name}: ms':>20}{'MB':>10}" for line in chosen)]
        for point in max((line.points for line in chosen), key=len):
            cells = [next((one for one in line.points if one.n == point.n), None) for line in chosen]
            text += [f"{point.n:>12,}" + "".join(map(_cell, cells))]
        text += [*(f"{line.name} ends: {line.ended}" for line in chosen if line.ended), ""]
    return "\n".join(text)


def _cell(point: Point | None) -> str:
    if point is None:
        return f"{'-':>20}{'-':>10}"
    return f"{point.seconds * 1e3:>20,.2f}" + f"{'-' if point.bytes is None else f'{point.bytes / 1e6:,.1f}':>10}"


def as_json(lines: Sequence[Line], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, in seconds and bytes."""
    return {
        **facts,
        "heads": 1,
        "head_size": growing("causal", 1, "float32").d,
        "lines": [asdict(line) for line in lines],
    }


_TITLES = {
    "causal": "causal",
    "window": f"window of {WINDOW} tokens",
    "documents": f"causal, documents of {DOCUMENT} tokens",
}
_COLOURS, _MARKERS = (VISIBLE.light, QUERY.light), ("o", "s")
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
        raise DataError("bench: --plot needs matplotlib. Fix: pip install 'lowtri[plot]'.") from None


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
        what = f"Attention of one head of 64 in {dtype}, forward; median {clock} in turns"
        figure.suptitle(f"{what}\n{headline(facts)}", fontsize=8)
        metadata = {"Date": None} if kind == "svg" else None
        with writing("bench", path):
            write_atomically(path, lambda part: figure.savefig(part, format=kind, metadata=metadata))


def _panel(axes: Any, lines: Sequence[Line], quantity: str) -> None:
    factor, _ = _SCALES[quantity]
    for line, colour, marker in zip(lines, _COLOURS, _MARKERS, strict=True):
        points = [(point.n, getattr(point, quantity)) for point in line.points]
        points = [
            (n, max(size, _LEAST_BYTES) if quantity == "bytes" else size) for n, size in points if size is not None
        ]
        style = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.3}
        axes.plot([n for n, _ in points], [size * factor for _, size in points], label=line.name, **style)
    axes.set(xscale="log", yscale="log")
    lengths = sorted({point.n for line in lines for point in line.points})
    axes.set_xticks(lengths[::2], [f"{n:,}" for n in lengths[::2]])
    axes.yaxis.set_major_formatter(lambda size, _: f"{size:,g}")
    axes.minorticks_off()
    axes.grid(color=LINE.light, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
