"""Every step of attention, held to the figures that notebooks show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from demo.context import Context, Result
from lowtri import plain
from lowtri.explaining.example import worked
from lowtri.explaining.show import as_text

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Every step, with its numbers"
SENTENCE = "“Write a poem” under seed 42: what goes in, what comes out, and everything between."

# As notebooks print them, to four digits; hidden scores aside.
_FIGURES = {
    "W_q^T": [[0.5406, -0.1657], [0.5869, 0.6496]],
    "W_k^T": [[-0.1549, -0.3443], [0.1427, 0.4153]],
    "W_v^T": [[0.6233, 0.6146], [-0.5188, 0.1323]],
    "q": [[0.7621, -0.0428], [1.1063, 0.7890], [1.1164, -2.1336]],
    "k": [[-0.1469, -0.3038], [0.1057, 0.3685], [-0.9914, -2.4152]],
    "v": [[0.6038, 0.7434], [-0.3502, 0.5303], [3.8695, 2.4246]],
    "scores": [[-0.0990, 0.0648, -0.6523], [-0.4022, 0.4078, -3.0024], [0.4842, -0.6683, 4.0461]],
    "scaled": [[-0.0700, 0.0458, -0.4612], [-0.2844, 0.2883, -2.1230], [0.3424, -0.4725, 2.8610]],
    "weights": [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]],
    "output": [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]],
}
_SCORES = [
    [0.50390039, 0.5365974, 0.41871129, 0.81252469],
    [0.84036985, 0.86761153, 0.80269944, 0.87209218],
    [0.69733857, 0.93032391, 0.81018176, 0.74386275],
    [0.41280469, 0.59346427, 0.12186543, 0.97038267],
]
_WEIGHTS = [
    [1, 0, 0, 0],
    [0.49319, 0.50681, 0, 0],
    [0.29569882, 0.37327924, 0.33102193, 0],
    [0.21312847, 0.25532945, 0.15932655, 0.37221554],
]


def run(context: Context) -> Result:
    """Compute the worked example, and hold every step to its figures."""
    found = worked()
    shown = replace(found, steps=tuple(found[name] for name in ("q", "k", "v", "scaled", "weights", "output")))
    result = Result(as_text(shown))
    away = max(float(np.abs(found[name].value - np.array(rows)).max()) for name, rows in _FIGURES.items())
    result.check(
        f"all {len(_FIGURES)} steps have the notebooks' figures: at most {away:.0e} away, printed to 1e-4", away < 6e-5
    )
    hidden = np.triu_indices(3, 1)
    result.check("a hidden weight is exactly 0", not found["weights"].value[hidden].any())
    same = float(np.abs(found["weights"].value[2] - found["weights"].unmasked[2]).max())  # type: ignore[index]
    result.check(f"the last row, which sees everybody, is the same without a mask: {same:.0e} apart", same < 1e-12)
    weights = plain.softmax(np.array(_SCORES) + plain.make_causal_mask(4))
    away = float(np.abs(weights - np.array(_WEIGHTS)).max())
    result.check(f"the NumPy form has its eight digits: at most {away:.0e} away", away < 2e-8)
    result.files = [context.write("steps.html", found.to_html()), context.write("steps.txt", as_text(found) + "\n")]
    return result
