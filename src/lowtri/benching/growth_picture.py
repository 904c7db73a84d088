"""Time and memory against length as a picture: a column for each mask, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtri.benching.growth import DOCUMENT, HEAD_SIZE, WINDOW, Line
from lowtri.benching.show import headline
from lowtri.errors import DataError
from lowtri.files import write_atomically
from lowtri.pictures.svg import INK, LINE, QUERY, VISIBLE

__all__ = ["check_plot", "draw"]

_TITLES = {
    "causal": "causal",
    "window": f"window of {WINDOW} tokens",
    "documents": f"causal, documents of {DOCUMENT} tokens",
}
_COLOURS, _MARKERS = (VISIBLE.light, QUERY.light), ("o", "s")
_SCALES = {"seconds": (1e3, "time of a call, ms"), "bytes": (1e-6, "memory beyond the inputs, MB")}
_LEAST_BYTES = 2**18  # Linux counts pages in batches: less is drawn as this


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


def draw(lines: Sequence[Line], facts: dict[str, Any], dtype: str, path: Path) -> None:
    """Write the picture, whole or not at all, in the format of the file's name."""
    check_plot(path)
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
        what = f"Attention of one head of {HEAD_SIZE} in {dtype}, forward; median {clock} in turns"
        figure.suptitle(f"{what}\n{headline(facts)}", fontsize=8)
        metadata = {"Date": None} if kind == "svg" else None
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
