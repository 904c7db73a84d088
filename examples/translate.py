"""An encoder-decoder on lowtri's attention: dates written in English, translated to Indonesian, letter by letter.

    python examples/translate.py                      # about a minute on two cores
    python examples/translate.py --mask full --steps 300

The three attentions of the original Transformer, and the mask of each:

    encoder    self-attention, full: every letter of the source sees every other
    decoder    self-attention, causal: a letter of the translation sees itself and the letters before it
    cross      from the translation to the source, full: the source is complete before the first letter is written

Both sides come from the Unicode locale data in Babel. Prints how many held-out dates are translated exactly, draws the three
maps of the trained model (maps.png, and every head in heads.png), and writes the figures to translate.json. With `--mask full`
the decoder sees the letter that it must predict: the loss falls faster, and no translation is right.

Needs `pip install '.[translate]'` in the checkout. Source of the architecture: Vaswani et al. 2017; norms in front, Xiong et al. 2020.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lowtri
from lowtri.files import write_atomically, write_text
from lowtri.nn import MultiHeadAttention, sinusoidal

PAD, START, END = range(3)
FIRST_DAY, DAYS = date(1900, 1, 1), 73_049  # until 31 December 2099
FORMS = [(length, english) for length in ("full", "long", "medium") for english in ("en", "en_GB")]
Maps = dict[str, list[Tensor]]  # for each kind of attention, the weights of each layer


@dataclass(frozen=True)
class Setting:
    """How large the model is and how long it learns."""

    size: int = 64
    heads: int = 4
    layers: int = 2  # of the encoder, and of the decoder
    mask: str = "causal"  # of the decoder's self-attention
    steps: int = 800
    batch: int = 64
    lr: float = 4e-3
    held_out: int = 500  # dates that the training never sees, in no form
    seed: int = 0


# The mapping.


def written(day: date, length: str, english: str) -> tuple[str, str]:
    """A day in English and in Indonesian, in the same length.

    >>> written(date(2024, 3, 17), "full", "en")
    ('Sunday, March 17, 2024', 'Minggu, 17 Maret 2024')
    """
    from babel.dates import format_date

    return format_date(day, length, english), format_date(day, length, "id")


def split(setting: Setting) -> tuple[list[date], list[date]]:
    """The dates to learn from, and those held out."""
    days = [FIRST_DAY + timedelta(number) for number in range(DAYS)]
    random.Random(setting.seed).shuffle(days)
    return days[setting.held_out :], days[: setting.held_out]


class Letters:
    """Ids of letters. The alphabet is that of two years of dates, which have every weekday, month and digit."""

    def __init__(self) -> None:
        days = (FIRST_DAY + timedelta(number) for number in range(0, DAYS, 99))
        texts = ("".join(written(day, *form)) for day in days for form in FORMS)
        self.letters = sorted(set().union(*texts))
        self.ids = {letter: number for number, letter in enumerate(self.letters, END + 1)}

    def __len__(self) -> int:
        return END + 1 + len(self.letters)

    def rows(self, texts: Sequence[str], *, target: bool = False) -> Tensor:
        """Ids (B, N), padded on the right; a target begins with START and ends with END."""
        rows = [[self.ids[letter] for letter in text] for text in texts]
        rows = [[START, *row, END] for row in rows] if target else rows
        longest = max(map(len, rows))
        return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])

    def text(self, ids: Iterable[int | None]) -> str:
        return "".join(self.letters[i - END - 1] for i in ids if i is not None and i > END)


# The model.


class Layer(nn.Module):
    """Self-attention, attention to a context where there is one, and a small network, each added to what comes in."""

    def __init__(self, setting: Setting, mask: str, *, crosses: bool) -> None:
        super().__init__()
        size, heads = setting.size, setting.heads
        self.itself = MultiHeadAttention(size, heads, mask=mask)
        self.cross = MultiHeadAttention(size, heads, mask="full") if crosses else None
        self.network = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3 if crosses else 2))

    def forward(self, x: Tensor, here: Any, source: Any = None, maps: Maps | None = None, **cached: Any) -> Tensor:
        """``here`` says where the letters of ``x`` stand; ``source`` is the encoded source with its own places."""
        y = self.itself(self.norms[0](x), positions=here, return_weights=maps is not None, **cached)
        x = x + _kept(y, maps, "decoder" if self.cross else "encoder")  # (B, N, size)
        if self.cross:
            context, there = source
            places = {"positions": here, "context_positions": there}
            y = self.cross(self.norms[1](x), context, **places, return_weights=maps is not None)
            x = x + _kept(y, maps, "cross")
        return x + self.network(self.norms[-1](x))


def _kept(y: Any, maps: Maps | None, name: str) -> Tensor:
    """The output; the weights (B, H, Nq, Nk) go to the maps."""
    if maps is None:
        return y
    maps.setdefault(name, []).append(y[1])
    return y[0]


def places(ids: Tensor) -> np.ndarray:
    """Where letters stand, (B, N); a pad is -1, no letter at all: nobody sees it, under any mask."""
    return np.where(ids == PAD, -1, np.arange(ids.shape[1]))


class Translator(nn.Module):
    """Ids of the source and of the translation so far to logits of its next letters."""

    def __init__(self, setting: Setting, vocabulary: int) -> None:
        super().__init__()
        self.mask = setting.mask
        self.embedding = nn.Embedding(vocabulary, setting.size)
        self.register_buffer("sines", sinusoidal(64, setting.size), persistent=False)
        self.encoder = nn.ModuleList(Layer(setting, "full", crosses=False) for _ in range(setting.layers))
        self.decoder = nn.ModuleList(Layer(setting, setting.mask, crosses=True) for _ in range(setting.layers))
        self.norms = nn.ModuleList([nn.LayerNorm(setting.size), nn.LayerNorm(setting.size)])
        self.logits = nn.Linear(setting.size, vocabulary)

    def forward(self, source: Tensor, ids: Tensor, maps: Maps | None = None) -> Tensor:
        return self.write(ids, places(ids), self.read(source, maps), maps)

    def read(self, source: Tensor, maps: Maps | None = None) -> tuple[Tensor, np.ndarray]:
        """The encoded source (B, M, size), and where its letters stand."""
        here = places(source)
        x = self._encodings(source, here)
        for layer in self.encoder:
            x = layer(x, here, maps=maps)
        return self.norms[0](x), here

    def write(self, ids: Tensor, here: Any, source: Any, maps: Maps | None = None, cache: Any = None) -> Tensor:
        """Logits (B, N, V); with a cache, of the newest letters only."""
        x = self._encodings(ids, here)
        for number, layer in enumerate(self.decoder):
            x = layer(x, here, source, maps, cache=cache, layer=number)
        return self.logits(self.norms[1](x))

    def _encodings(self, ids: Tensor, here: Any) -> Tensor:
        return self.embedding(ids) + self.sines[torch.from_numpy(np.maximum(here, 0))]  # (B, N, size)


class Told(nn.Module):
    """The decoder, told a source: ids to logits, which is all that generating and auditing ask of a model."""

    def __init__(self, model: Translator, source: Tensor) -> None:
        super().__init__()
        self.model, self.source = model, model.read(source)

    def make_cache(self, rows: int, allow_missing: bool = False) -> lowtri.KVCache:
        return lowtri.KVCache(self.model.mask, allow_missing=allow_missing)

    def forward(self, ids: Tensor, cache: Any = None, positions: Any = None) -> Tensor:
        if positions is None:
            positions = np.arange(ids.shape[1]) if cache is None else cache.next_positions(ids.shape[1])
        return self.model.write(ids, positions, self.source, cache=cache)


# Learning and translating.


def train(setting: Setting, note: Any = None) -> tuple[Translator, Letters, list[float]]:
    """A trained model, its letters, and the loss of every step in nats a letter."""
    letters, (days, _) = Letters(), split(setting)
    torch.manual_seed(setting.seed)
    model = Translator(setting, len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setting.lr, total_steps=setting.steps, pct_start=0.1)
    draw, losses = random.Random(setting.seed + 1), []
    for step in range(1, setting.steps + 1):
        pairs = [written(draw.choice(days), *draw.choice(FORMS)) for _ in range(setting.batch)]
        source, target = letters.rows([s for s, _ in pairs]), letters.rows([t for _, t in pairs], target=True)
        logits = model(source, target[:, :-1])  # (B, N, V)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if note and (step % 100 == 0 or step == setting.steps):
            note(f"step {step:5}   loss {np.mean(losses[-100:]):.4f} nats a letter")
    return model.eval(), letters, losses


@torch.no_grad()
def translate(model: Translator, letters: Letters, texts: Sequence[str], *, cached: bool = True) -> list[str]:
    """The most probable translation, letter by letter; each letter written is the next step's input."""
    told = Told(model, letters.rows(texts))
    steps = lowtri.generate(told, [[START]] * len(texts), max_new_tokens=40, stop=END, cached=cached)
    return [letters.text(row) for row in zip(*steps, strict=True)]


def exact(model: Translator, letters: Letters, days: Sequence[date]) -> tuple[float, list[tuple[str, str, str]]]:
    """The share of days, in every form, that come out letter for letter; and what was wrong: source, wanted, got."""
    pairs = [written(day, *form) for day in days for form in FORMS]
    wrong = []
    for at in range(0, len(pairs), 300):
        some = pairs[at : at + 300]
        got = translate(model, letters, [source for source, _ in some])
        wrong += [(*pair, text) for pair, text in zip(some, got, strict=True) if text != pair[1]]
    return 1 - len(wrong) / len(pairs), wrong


# Looking.


@torch.no_grad()
def maps_of(model: Translator, letters: Letters, source: str, target: str) -> Maps:
    """Who looks at whom, (H, Nq, Nk) for each layer, in the encoder, the decoder and across, as ``target`` is written."""
    maps: Maps = {}
    model(letters.rows([source]), letters.rows([target], target=True)[:, :-1], maps)
    return {name: [weights[0] for weights in layers] for name, layers in maps.items()}


def draw(maps: Maps, mask: str, source: str, target: str, folder: Path) -> None:
    """maps.png: the three maps of the last layer, mean of its heads. heads.png: every head of every layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    read, given = list(source.replace(" ", "␣")), ["▸", *target.replace(" ", "␣")]
    kinds = {"encoder": ("full", read, read), "decoder": (mask, given, given), "cross": ("full", given, read)}
    count = sum(map(len, maps["encoder"]))
    three, every = Figure((16, 6), dpi=100, layout="constrained"), Figure((2.2 * count, 7), layout="constrained")
    panels, grid = three.subplots(1, 3), every.subplots(3, count)
    for row, (name, (who, queries, keys)) in enumerate(kinds.items()):
        visible = lowtri.mask(who).dense(len(queries), len(keys))
        panels[row].set(title=f"{name}: {who}", xlabel="sees", ylabel="reading" if name == "encoder" else "has written")
        panels[row].set_xticks(range(len(keys)), keys, family="monospace")
        panels[row].set_yticks(range(len(queries)), queries, family="monospace")
        _shade(panels[row], maps[name][-1].mean(0), visible)
        for axes, weights in zip(grid[row], torch.cat(maps[name]), strict=True):
            axes.set(xticks=[], yticks=[], title=name)
            _shade(axes, weights, visible)
    three.suptitle(f"{source}   →   {target}     (shade: root of the weight; hatched: hidden)")
    every.suptitle("every head, from the first layer's to the last's")
    for figure, name in ((three, "maps.png"), (every, "heads.png")):
        FigureCanvasAgg(figure)
        write_atomically(folder / name, partial(figure.savefig, format="png"))


def _shade(axes: Any, weights: Tensor, visible: Any) -> None:
    axes.patch.set(facecolor="#eef0f3", edgecolor="#b8bfca", hatch="//////", linewidth=0)
    axes.imshow(np.where(visible, weights.sqrt(), np.nan), cmap="Blues", vmin=0, vmax=1)  # faint weights show, too


# All of it.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/translate"), help="a folder for pictures and figures")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="of training")
    parser.add_argument("--mask", default=Setting.mask, help="of the decoder's self-attention")
    parser.add_argument("--seed", type=int, default=Setting.seed)
    options = parser.parse_args()
    if find_spec("babel") is None:
        parser.error("Babel, which knows the dates, is not installed. Fix: pip install babel")
    setting = Setting(steps=options.steps, mask=options.mask, seed=options.seed)
    options.out.mkdir(parents=True, exist_ok=True)

    started, held_out = time.perf_counter(), split(setting)[1]
    model, letters, losses = train(setting, note=lambda line: print(line, flush=True))
    seconds, (share, wrong) = time.perf_counter() - started, exact(model, letters, held_out)
    size, loss = sum(weight.numel() for weight in model.parameters()), float(np.mean(losses[-50:]))
    print(f"{size:,} parameters, {seconds:.0f} s of training, {loss:.4f} nats a letter at its end")
    print(f"translated exactly: {share:.1%} of {len(held_out)} held-out dates, each in {len(FORMS)} forms")
    for source, wanted, got in wrong[:3]:
        print(f"  wrong: {source!r} became {got!r}, not {wanted!r}")
    found = asdict(setting) | {"parameters": size, "seconds": round(seconds, 1), "loss": loss, "exact": share}
    text = json.dumps(found | {"wrong": wrong[:20]}, indent=1) + "\n"
    write_text(options.out / "translate.json", text)
    source, target = written(held_out[0], "full", "en")
    try:
        draw(maps_of(model, letters, source, target), setting.mask, source, target, options.out)
    except ImportError:
        print("no pictures: matplotlib is not installed. Fix: pip install matplotlib")


if __name__ == "__main__":
    main()
