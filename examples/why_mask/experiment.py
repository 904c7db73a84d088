"""Why the mask: the same small model trained with it and without it, on real text, and what becomes of each.

A model that may see the future is trained on predicting tokens that it can see. Its losses look wonderful, on text it never
read as well, and are those of copying. What it can do without seeing the future shows only step by step, where there is none.
Everything here is measured; nothing is assumed about how it comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from corpus import BYTES, IGNORED, Packed, Recipe, encode_document, learn, split
from lowtri.errors import DataError
from lowtri.generation.generate import generate
from lowtri.nn import Decoder, DecoderConfig
from python_text import python_text
from train import Run
from why_mask.modes import Differences, all_at_once, differences, first_layers, prefix_anew, with_a_cache
from why_mask.words import Known, Shares

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["SHORT", "Experiment", "Measured", "Point", "Setting", "why_mask"]


@dataclass(frozen=True)
class Setting:
    """What is trained, and how much of it is measured. A byte is a token."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    recipe: Recipe = field(default_factory=lambda: Recipe(steps=360, context=128, lr=3e-3, every=60))
    rows: int = 24  # held-out rows to measure on, each within one document, and as many of those trained on
    prompt: int = 32  # tokens of each held-out row that the models continue to its end
    temperature: float = 0.7  # at which they write


# Half a minute instead of two: a model of two layers, rows of 64 bytes. What is said about the full experiment is true of it too.
SHORT = Setting(
    layers=2,
    hidden=64,
    rows=24,
    prompt=16,
    recipe=Recipe(steps=250, batch=8, context=64, lr=5e-3, held_out=0.1, every=50),
)


class Point(NamedTuple):
    """Losses on the way, in nats a token."""

    step: int
    training: float  # of this step's batch
    validation: float  # teacher-forced, some of the held-out rows
    stepwise: float  # step by step, the same


@dataclass(frozen=True)
class Measured:
    """One model after training; losses in nats a token."""

    mask: str
    training: float  # teacher-forced, on rows it was trained on
    validation: float  # teacher-forced, on held-out rows
    stepwise: float  # the same positions step by step, each token reading a cache
    anew: float  # the same positions step by step, the whole prefix computed anew for each token
    greatest: float  # difference of one position's loss, teacher-forced against step by step
    curve: tuple[Point, ...]
    words: Shares  # of what it wrote
    written: tuple[str, ...]  # continuations of the prompts


@dataclass(frozen=True)
class Experiment:
    """Both models, what was measured of them, and what to hold it against."""

    setting: Setting
    masked: Measured
    unmasked: Measured
    unigram: float  # the loss of letter frequencies on the same positions
    uniform: float  # the loss of a model that knows nothing
    real: Shares  # of what really follows the prompts
    letters: Shares  # of letters drawn by their frequency
    prompts: tuple[str, ...]
    modes: dict[int, Differences]  # of the masked model's first so many layers: training against inference
    models: dict[str, Decoder]  # "causal" and "full"
    tokenizer: Tokenizer

    def as_dict(self) -> dict[str, Any]:
        """What was measured, as plain numbers and texts."""
        models = {name: _plain(it) for name, it in (("masked", self.masked), ("unmasked", self.unmasked))}
        against = {"unigram": self.unigram, "uniform": self.uniform}
        shares = {"real text": self.real._asdict(), "letters by frequency": self.letters._asdict()}
        modes = {str(layers): mode._asdict() for layers, mode in self.modes.items()}
        return {**models, **against, "words": shares, "modes by layers": modes, "prompts": list(self.prompts)}


def why_mask(
    setting: Setting | None = None,
    *,
    texts: Sequence[str] | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> Experiment:
    """Train both models and measure them.

    Args:
        setting: the full experiment if not given: about two minutes on two cores.
        texts: each a document; those that every Python brings along if not given.
        note: is told in a line what begins, and how training goes.

    Raises:
        DataError: if the text is too short to hold rows back.
    """
    setting = setting or Setting()
    if texts is None:
        texts = [document.text for document in python_text(note)]
    tokenizer = learn([])
    corpus = Packed.of(encode_document(tokenizer, text) for text in texts)
    recipe = setting.recipe
    corpus.require(recipe.context)
    trained_on, held_out = split(corpus.count(recipe.context), recipe.held_out)
    spread = trained_on[:: max(1, len(trained_on) // (4 * setting.rows))]
    seen = _whole_rows(corpus, spread, setting)  # (R, N + 1)
    unseen = _whole_rows(corpus, held_out, setting)  # (R, N + 1)
    known = Known.of(tokenizer.decode(piece.tolist()) for piece in _all_but(held_out, corpus, recipe.context))

    models = {mask: _fresh(mask, setting) for mask in ("causal", "full")}

    def train_and_measure(model: Decoder) -> Measured:
        curve = _train(model, corpus, unseen, setting, note)
        return _measured(model, seen, unseen, curve, known, tokenizer, setting)

    # Side by side, with half the threads each: a model of this size cannot keep two cores busy alone.
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // len(models)))
    try:
        with ThreadPoolExecutor(len(models)) as pool:
            measured = dict(zip(models, pool.map(train_and_measure, models.values()), strict=True))
    finally:
        torch.set_num_threads(threads)
    frequency = np.bincount(corpus.ids, minlength=BYTES) + 1.0  # one more of each: none is impossible
    frequency /= frequency.sum()  # (V,)
    letters = np.random.default_rng(recipe.seed).choice(BYTES, unseen.shape, p=frequency)  # (R, N + 1)
    return Experiment(
        setting=setting,
        masked=measured["causal"],
        unmasked=measured["full"],
        unigram=float(-np.log(frequency)[unseen[:, 1:]].mean()),
        uniform=math.log(BYTES),
        real=known.shares(_texts(tokenizer, unseen[:, setting.prompt :])),
        letters=known.shares(_texts(tokenizer, letters[:, setting.prompt :])),
        prompts=_texts(tokenizer, unseen[:, : setting.prompt]),
        modes=_modes(models["causal"], unseen[:2, :-1]),
        models=models,
        tokenizer=tokenizer,
    )


def _fresh(mask: str, setting: Setting) -> Decoder:
    """A model under this mask. Both begin with the same weights, and read the same rows in the same order."""
    torch.manual_seed(setting.recipe.seed)
    config = DecoderConfig(
        vocab_size=BYTES,
        hidden_size=setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        max_position_embeddings=setting.recipe.context,
        mask=mask,
    )
    return Decoder(config)


def _train(
    model: Decoder, corpus: Packed, unseen: Tensor, setting: Setting, note: Callable[[str], object]
) -> tuple[Point, ...]:
    """Train it in place; losses on the way, on some of the held-out rows."""
    some, recipe = unseen[:16], setting.recipe
    curve: list[Point] = []
    training = Run(model, corpus, recipe, model.config.mask)
    for loss in training.train():
        if training.done % recipe.every == 0 or training.done == recipe.steps:
            model.eval()
            forced = float(_losses(all_at_once(model, some[:, :-1]), some).mean())
            stepwise = float(_losses(with_a_cache(model, some[:, :-1]), some).mean())
            curve.append(Point(training.done, loss, forced, stepwise))
            note(
                f"mask {model.config.mask:<6}  step {training.done:>4}: training {loss:.3f}, validation {forced:.3f}, "
                f"step by step {stepwise:.3f} nats"
            )
    model.eval()
    return tuple(curve)


def _measured(
    model: Decoder,
    seen: Tensor,
    unseen: Tensor,
    curve: tuple[Point, ...],
    known: Known,
    tokenizer: Tokenizer,
    setting: Setting,
) -> Measured:
    forced = _losses(all_at_once(model, unseen[:, :-1]), unseen)  # (R, N)
    stepwise = _losses(with_a_cache(model, unseen[:, :-1]), unseen)  # (R, N)
    prompts = unseen[:, : setting.prompt].tolist()
    new = setting.recipe.context - setting.prompt
    steps = generate(model, prompts, new, temperature=setting.temperature, seed=setting.recipe.seed, stop=())
    written = _texts(tokenizer, np.array(list(steps)).T)  # (R, new)
    return Measured(
        mask=model.config.mask,
        training=float(_losses(all_at_once(model, seen[:, :-1]), seen).mean()),
        validation=float(forced.mean()),
        stepwise=float(stepwise.mean()),
        anew=float(_losses(prefix_anew(model, unseen[:, :-1]), unseen).mean()),
        greatest=float((stepwise - forced).abs().max()),
        curve=curve,
        words=known.shares(written),
        written=written,
    )


def _losses(logits: Tensor, rows: Tensor) -> Tensor:
    """Losses (R, N) of logits (R, N, V) for rows (R, N + 1), each token but the first predicted."""
    return F.cross_entropy(logits.flatten(0, 1).double(), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)


def _modes(model: Decoder, ids: Tensor) -> dict[int, Differences]:
    """Of the whole model, and of its first layer alone."""
    return {layers: differences(first_layers(model, layers), ids) for layers in (1, model.config.num_hidden_layers)}


def _whole_rows(corpus: Packed, numbers: NDArray[np.int64], setting: Setting) -> Tensor:
    """Rows (R, N + 1) that lie within one document, ``setting.rows`` of them at most."""
    rows = corpus.rows(numbers, setting.recipe.context)
    whole = np.flatnonzero((rows.targets != IGNORED).all(axis=1))[: setting.rows]
    if not len(whole):
        raise DataError(
            f"no row of {setting.recipe.context} tokens was held out within one document.\n"
            "Fix: more text, or a smaller context"
        )
    return torch.from_numpy(np.concatenate([rows.inputs[whole, :1], rows.targets[whole]], axis=1))


def _all_but(numbers: NDArray[np.int64], corpus: Packed, context: int) -> list[NDArray[np.int32]]:
    """The corpus without some of its rows: the stretches between them."""
    edges = np.stack([numbers, numbers + 1], axis=1).ravel() * context
    return np.split(corpus.ids, edges)[::2]


def _texts(tokenizer: Tokenizer, rows: Any) -> tuple[str, ...]:
    return tuple(tokenizer.decode(row) for row in rows.tolist())


def _plain(measured: Measured) -> dict[str, Any]:
    plain = {
        name: getattr(measured, name) for name in ("mask", "training", "validation", "stepwise", "anew", "greatest")
    }
    curve = [point._asdict() for point in measured.curve]
    return {**plain, "curve": curve, "words": measured.words._asdict(), "written": list(measured.written)}
