"""Trains one model, with the causal mask or without it, and measures it all at once and one character at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lesson_model.storage import model_of, packed, round_weights
from lesson_model.stories import Stories
from lowtri._version import __version__
from lowtri.nn import Decoder
from lowtri.system import cpu_name

READ, UNREAD = 600_000, 60_000  # characters of training text and of validation text
HELD = 48  # rows that the losses are measured on


@dataclass(frozen=True)
class Recipe:
    """What one training does; two models of one recipe begin with the same weights and read the same rows."""

    language: str
    mask: str
    steps: int
    batch: int = 24
    lr: float = 3e-3
    layers: int = 2
    width: int = 48
    heads: int = 4
    inner: int = 96
    seed: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        context = 64 if self.language == "zh" else 128  # a Chinese character says as much as three letters
        return {
            "layers": self.layers,
            "heads": self.heads,
            "width": self.width,
            "inner": self.inner,
            "context": context,
        }


class Rows:
    """Rows of a text, of which a share begins where a story begins."""

    def __init__(self, text: str, characters: str, context: int) -> None:
        number = {character: i for i, character in enumerate(characters)}
        self.ids = torch.tensor([number[character] for character in text])
        starts = [0, *(i + 1 for i, character in enumerate(text) if character == "\n")]
        self.starts = torch.tensor([start for start in starts if start + context <= len(text)])
        self.context = context

    def draw(self, count: int, dice: torch.Generator, stories: float = 0.5) -> Tensor:
        """(count, context)"""
        story = self.starts[torch.randint(len(self.starts), (count,), generator=dice)]
        anywhere = torch.randint(len(self.ids) - self.context + 1, (count,), generator=dice)
        start = torch.where(torch.rand(count, generator=dice) < stories, story, anywhere)
        return self.ids[start[:, None] + torch.arange(self.context)]


def loss(model: Decoder, rows: Tensor) -> Tensor:
    """The mean loss of rows (R, N) in nats a character, all at once.

    The model reads whole rows, and the last place of each has no target in it, so it is left out. Else it would be the one place
    where a model without a mask has to predict, since the answer is not in the row.
    """
    return F.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def stepwise_loss(model: Decoder, rows: Tensor) -> Tensor:
    """The same loss, where the model reads at each place nothing but the characters up to it."""
    logits = [model(rows[:, :n], logits_to_keep=1)[:, 0] for n in range(1, rows.shape[1])]
    return F.cross_entropy(torch.stack(logits, 2), rows[:, 1:])


def optimizer_of(model: Decoder, lr: float) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)


def lr_at(step: int, recipe: Recipe) -> float:
    """A warm-up of 200 steps, then half a cosine down to a twentieth."""
    cosine = (1 + math.cos(math.pi * step / recipe.steps)) / 2
    return recipe.lr * min(1.0, (step + 1) / 200) * (0.05 + 0.95 * cosine)


def trained(recipe: Recipe, note: Callable[[str], None] = print) -> dict[str, Any]:
    """Train a model. Returns what the page reads; every loss in it is that of the rounded weights."""
    stories = Stories(recipe.language)
    text, _ = stories.text(READ, seed=1)
    unread_text, entropy = stories.text(UNREAD, seed=2)
    characters = "".join(sorted(set(text) | set(unread_text)))
    read = Rows(text, characters, recipe.sizes["context"])
    unread = Rows(unread_text, characters, recipe.sizes["context"])
    torch.manual_seed(recipe.seed)
    model = model_of(recipe.mask, len(characters), recipe.sizes)
    optimizer = optimizer_of(model, recipe.lr)
    dice = torch.Generator().manual_seed(recipe.seed)
    began = time.perf_counter()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, recipe)
        value = loss(model, read.draw(recipe.batch, dice))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 500 == 0:
            seconds = time.perf_counter() - began
            note(f"{recipe.language} {recipe.mask} {step + 1:>6} loss {value.item():.3f} {seconds:.0f} s")
    seconds = time.perf_counter() - began
    model.eval()
    round_weights(model)
    held = unread.draw(HELD, torch.Generator().manual_seed(1), stories=1.0)
    some = read.draw(HELD, torch.Generator().manual_seed(1), stories=1.0)
    with torch.no_grad():
        losses = {
            "training": float(loss(model, some)),
            "validation": float(loss(model, held)),
            "stepwise": float(stepwise_loss(model, held)),
            "entropy": entropy,
            "uniform": math.log(len(characters)),
        }
    measured = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "lowtri": __version__,
        "steps": recipe.steps,
        "seconds": round(seconds),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "losses": {name: round(value, 4) for name, value in losses.items()},
    }
    return packed(model, characters, measured)
