"""The loss curve of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

from lowtri.files import write_atomically
from lowtri.training.state import History

__all__ = ["plot"]


def plot(history: History, path: Path) -> bool:
    """Draw training and validation loss; False, and no file, when matplotlib is not installed (``lowtri[plot]``)."""
    try:
        # The figure itself, without pyplot: no window, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        range(1, len(history.losses) + 1), history.losses, color="#9bb7d4", linewidth=0.8, label="training, each batch"
    )
    if history.validations:
        axes.plot(
            *zip(*history.validations, strict=True), color="#b03a2e", marker="o", markersize=3, label="held-out rows"
        )
    axes.set(xlabel="steps", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True
