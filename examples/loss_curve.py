"""The losses of a run of `lowtri train`, drawn: training and held-out rows, by step.

    python examples/loss_curve.py out/book            # writes out/book/loss.png

Needs matplotlib: `pip install "lowtri[plot]"`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lowtri.files import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what lowtri train wrote")
    folder = parser.parse_args().folder
    try:
        content = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        draw(content["history"], folder / "loss.png")
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"{folder}: {error}") from None
    except KeyError:
        raise SystemExit(f"{folder}: training is not finished. Fix: lowtri train --out {folder} --resume") from None
    print(folder / "loss.png")


def draw(history: dict[str, Any], path: Path) -> None:
    """Draw ``losses``, one for each step, and ``validations``, pairs of a step and a loss, as a PNG."""
    # The figure itself, without pyplot: no window, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        range(1, len(history["losses"]) + 1),
        history["losses"],
        color="#9bb7d4",
        linewidth=0.8,
        label="training, each batch",
    )
    if history["validations"]:
        axes.plot(
            *zip(*history["validations"], strict=True), color="#b03a2e", marker="o", markersize=3, label="held-out rows"
        )
    axes.set(xlabel="steps", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))


if __name__ == "__main__":
    main()
