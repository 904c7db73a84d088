"""What lowtri computes and measures when a page is made, and the measurements that are stored because they take minutes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lowtri._version import __version__
from lowtri.lesson.languages import DECIMALS, assets

if TYPE_CHECKING:
    from torch import Tensor

PAIR = "The black cat <end>"
PAIR_ENCODINGS = [[0.9, 0.4], [-1.1, 1.6], [1.8, -0.7], [0.2, 1.1]]
# Of the calls that are timed.
HEADS = 8
TOKENS = 512
SIZE = 64


def stored(name: str) -> dict[str, Any]:
    """A stored measurement: experiment, generators, gallery, smollm2 or whisper. ``measured`` holds its date and machine."""
    content: dict[str, Any] = json.loads((assets() / "measured" / f"{name}.json").read_text(encoding="utf-8"))
    return content


def models(language: str) -> dict[str, dict[str, Any]]:
    """The two models that run in the page of a language: trained with the mask ("causal"), and without it ("full")."""
    folder = assets() / "models"
    return {mask: json.loads((folder / f"{language}-{mask}.json").read_text("utf-8")) for mask in ("causal", "full")}


@cache
def computed() -> dict[str, Any]:
    """The data of the page's figures, the same for every language of one process."""
    return {
        **example(),
        "forms": _forms(),
        "experiment": stored("experiment"),
        "generators": stored("generators"),
        "gallery": stored("gallery"),
        "maps": [
            stored("smollm2") | {"program": "smollm2", "opens": [13, 8], "points": [8, 2]},
            stored("whisper") | {"program": "whisper", "opens": [0, 2], "points": [9, 8]},
        ],
    }


def example() -> dict[str, Any]:
    """The worked example, and one sentence under the full and the causal mask."""
    import numpy as np

    from lowtri.explaining.example import ENCODINGS, SENTENCE, untrained

    steps = untrained(SENTENCE, encodings=np.array(ENCODINGS))
    pair = untrained(PAIR, encodings=np.array(PAIR_ENCODINGS))["weights"]
    assert pair.unmasked is not None
    names = ("q", "k", "v", "scores", "scaled", "weights", "output")
    return {
        "example": {
            "sentence": SENTENCE,
            "tokens": SENTENCE.split(),
            "encodings": ENCODINGS,
            "maps": {name: steps[f"W_{name}^T"].value.tolist() for name in "qkv"},
            "steps": {name: steps[name].value.tolist() for name in names},
        },
        "pair": {"tokens": PAIR.split(), "full": pair.unmasked.tolist(), "causal": pair.value.tolist()},
    }


def _forms() -> dict[str, Any]:
    import torch

    from lowtri.system import cpu_name

    measured, difference = times()
    return {
        "times": measured,
        "difference": difference,
        "shape": f"(1, {HEADS}, {TOKENS}, {SIZE}) float32",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def times(tokens: int = TOKENS, rounds: int = 9) -> tuple[dict[str, float], float]:
    """Median milliseconds of each form, forward, float32, and the greatest difference between their outputs.

    The forms are interleaved, so that other programs disturb all of them alike.

    >>> sorted(times(tokens=16, rounds=1)[0])
    ['additive', 'boolean', 'fused', 'lowtri']
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from lowtri.benching import interleaved, seconds_of
    from lowtri.dispatch.attend import attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, tokens, SIZE, generator=generator)  # (1, H, N, D) each
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    added = torch.zeros(tokens, tokens).masked_fill(~visible, -math.inf)
    scale = SIZE**-0.5
    forms: dict[str, Callable[[], Tensor]] = {
        "additive": lambda: torch.softmax(q @ k.mT * scale + added, -1) @ v,
        "boolean": lambda: torch.softmax((q @ k.mT * scale).masked_fill(~visible, -math.inf), -1) @ v,
        "fused": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "lowtri": lambda: attention(q, k, v, "causal"),
    }
    with torch.no_grad():
        outputs = [form() for form in forms.values()]  # the first call of lowtri may compile
        seconds = interleaved({name: partial(seconds_of, form) for name, form in forms.items()}, rounds, 0)
    difference = max(float((output - outputs[0]).abs().max()) for output in outputs[1:])
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}, difference


def in_texts(language: str = "en") -> dict[str, str]:
    """Every number that the texts name, written out, with the decimal sign of the language."""
    decimal = DECIMALS.get(language, ".")
    trained = models(language)["causal"]["measured"]
    values = _written_numbers() | {
        "live_entropy": f"{trained['losses']['entropy']:.3f}",
        "live_parameters": str(trained["parameters"]),
        "live_steps": str(trained["steps"]),
        "live_date": trained["date"],
        "live_cpu": trained["cpu"],
    }
    plain = ("version", "cpu", "date", "torch", "shape")  # names, and not numbers
    return {name: text if name.endswith(plain) else text.replace(".", decimal) for name, text in values.items()}


def _written_numbers() -> dict[str, str]:
    data, today = computed(), datetime.now(timezone.utc).strftime("%Y-%m-%d")
    experiment, forms = data["experiment"], data["forms"]
    values = {"unigram": f"{experiment['unigram']:.3f}", "half_ten": "0.00005", "version": __version__}
    for model in ("masked", "unmasked"):
        own = experiment[model]
        values |= {f"{model}_{name}": f"{own[name]:.3f}" for name in ("training", "validation", "stepwise")}
        values |= {f"{model}_{name}": _percent(own["words"][name]) for name in ("words", "pairs")}
    for name in ("experiment", "generators", "gallery"):
        values |= {f"{name}_{what}": data[name]["measured"].get(what, "") for what in ("date", "cpu")}
    values |= {f"forms_{what}": str(forms[what]) for what in ("shape", "cpu", "threads", "torch")}
    values |= {
        "masked_greatest": _tiny(experiment["masked"]["greatest"]),
        "forms_difference": _tiny(forms["difference"]),
    }
    return values | {"forms_date": today, "made_date": today}


def _tiny(x: float) -> str:
    return f"{x:.0e}".replace("e-0", "e−")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share == 0 or share >= 0.01 else f"{share:.1%}"
