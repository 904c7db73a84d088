"""The four consequences of a model that peeks, as text and as a picture. Every figure is measured (see experiment.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowtri.files import write_atomically
from why_mask.experiment import Experiment, Measured
from why_mask.words import Shares

__all__ = ["as_text", "draw"]

_MASKED, _UNMASKED, _OTHER = "#2b6cb0", "#c05621", "#718096"


def as_text(experiment: Experiment, samples: int = 3) -> str:
    """The four consequences with their figures, the modes of training and inference, and what both models write."""
    rows = (("with the mask", experiment.masked), ("without it", experiment.unmasked))
    positions = len(experiment.prompts) * experiment.setting.recipe.context
    lines = [
        f"Losses in nats a byte, on the same {positions:,} held-out positions unless it says training.",
        "",
        "1. Cheating: what a model scores with the future before it, and without",
        _line("", "teacher-forced", "step by step", "difference", "greatest of one position"),
        *(
            _line(name, _f(it.validation), _f(it.stepwise), f"{it.stepwise - it.validation:.1e}", f"{it.greatest:.1e}")
            for name, it in rows
        ),
        "",
        "2. Overfitting: is it a gap between training and validation?",
        _line("", "training", "validation", "step by step", "validation - training"),
        *(
            _line(name, _f(it.training), _f(it.validation), _f(it.stepwise), f"{it.validation - it.training:+.3f}")
            for name, it in rows
        ),
        "",
        "3. Wrong order: how much of what is written the training text has",
        _line("", "words", "word pairs", "words counted"),
        *(_line(name, *_shares(it)) for name, it in _texts(experiment)),
        "",
        "4. No generation: predicting one byte after the other, as writing does",
        _line("", "with a cache", "prefix anew"),
        *(_line(name, _f(it.stepwise), _f(it.anew)) for name, it in rows),
        _line("letter frequencies", _f(experiment.unigram)),
        _line("knows nothing", _f(experiment.uniform)),
        "",
        "Training = inference? The greatest difference of a logit from training's, masked model",
        _line("", "cache, no mask", "prefix, mask", "prefix, no mask"),
        *(
            _line(f"{layers} layer{'s' * (layers > 1)}", *(f"{figure:.1e}" for figure in mode))
            for layers, mode in experiment.modes.items()
        ),
        "",
        f"What they write (temperature {experiment.setting.temperature})",
    ]
    for prompt, *texts in list(
        zip(experiment.prompts, experiment.masked.written, experiment.unmasked.written, strict=True)
    )[:samples]:
        lines.append(f"  prompt         {prompt!r}")
        lines += [f"  {name:<14} {text!r}" for (name, _), text in zip(rows, texts, strict=True)]
    return "\n".join(lines)


def draw(experiment: Experiment, path: Path) -> bool:
    """The four consequences as one PNG; False, and no file, when matplotlib is not installed."""
    try:
        # The figure itself, without pyplot: no window, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    cheating, fitting, order, generation = figure.subplots(2, 2).flat
    _cheating(cheating, experiment)
    _fitting(fitting, experiment)
    _order(order, experiment)
    _generation(generation, experiment)
    for axes in (cheating, order, generation):
        axes.margins(y=0.12)  # room for the figures above the bars
    figure.suptitle("The same model, trained with and without the mask")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return True


def _cheating(axes: Any, experiment: Experiment) -> None:
    for at, (it, colour) in enumerate(((experiment.masked, _MASKED), (experiment.unmasked, _UNMASKED))):
        bars = axes.bar([at * 3, at * 3 + 1], [it.validation, it.stepwise], color=colour, alpha=0.9)
        axes.bar_label(bars, fmt="%.3f")
    ways = ["teacher-\nforced", "step\nby step"]
    axes.set_xticks([0, 1, 3, 4], ways * 2)
    axes.set(title="1. Cheating: the same positions, two ways", ylabel="loss, nats a byte")
    _name(axes)


def _fitting(axes: Any, experiment: Experiment) -> None:
    for it, colour in ((experiment.masked, _MASKED), (experiment.unmasked, _UNMASKED)):
        steps = [point.step for point in it.curve]
        for name, style in (("training", ":"), ("validation", "-"), ("stepwise", "--")):
            axes.plot(steps, [getattr(point, name) for point in it.curve], style, color=colour)
    for style, name in ((":", "training"), ("-", "validation"), ("--", "step by step")):
        axes.plot([], [], style, color=_OTHER, label=name)
    axes.legend(fontsize=8)
    axes.set(title="2. Overfitting: on the way", xlabel="steps", ylabel="loss, nats a byte", ylim=(0, None))
    axes.grid(alpha=0.3)


def _order(axes: Any, experiment: Experiment) -> None:
    texts = _texts(experiment)
    colours = [_MASKED, _UNMASKED, _OTHER, _OTHER]
    for shift, which, alpha in ((0.0, "words", 0.95), (0.4, "pairs", 0.55)):
        shares = [100 * getattr(share, which) for _, share in texts]
        bars = axes.bar([at + shift for at in range(len(texts))], shares, 0.38, color=colours, alpha=alpha)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks([at + 0.2 for at in range(len(texts))], [name for name, _ in texts], fontsize=8)
    axes.set(title="3. Wrong order: words (dark) and word pairs (light)\nthat the training text has", ylabel="percent")


def _generation(axes: Any, experiment: Experiment) -> None:
    bars = axes.bar(
        ["with the mask", "without it", "letter\nfrequencies", "knows nothing"],
        [experiment.masked.stepwise, experiment.unmasked.stepwise, experiment.unigram, experiment.uniform],
        color=[_MASKED, _UNMASKED, _OTHER, _OTHER],
    )
    axes.bar_label(bars, fmt="%.2f")
    axes.set(title="4. No generation: step by step", ylabel="loss, nats a byte")


def _name(axes: Any) -> None:
    for name, colour in (("with the mask", _MASKED), ("without it", _UNMASKED)):
        axes.bar([0], [0], color=colour, label=name)
    axes.legend(fontsize=8)


def _texts(experiment: Experiment) -> list[tuple[str, Shares]]:
    models: list[tuple[str, Measured]] = [("with the mask", experiment.masked), ("without it", experiment.unmasked)]
    return [
        *((name, it.words) for name, it in models),
        ("real text", experiment.real),
        ("random letters", experiment.letters),
    ]


def _shares(shares: Shares) -> tuple[str, ...]:
    return f"{shares.words:.0%}", f"{shares.pairs:.0%}", f"{shares.counted:,}"


def _line(name: str, *cells: str) -> str:
    return f"   {name:<20}" + "".join(f"{cell:>16}" for cell in cells[:3]) + "".join(f"   {cell}" for cell in cells[3:])


def _f(loss: float) -> str:
    return f"{loss:.3f}"
