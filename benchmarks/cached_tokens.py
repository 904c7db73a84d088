"""A token of a small Llama against the tokens before it: EvictingCache under a window with sinks, and transformers' own cache.

    python benchmarks/cached_tokens.py --out docs/cached-tokens.svg
    python benchmarks/cached_tokens.py --quick

Both models have the same weights: 8 layers of 256, 8 heads. One has transformers' DynamicCache through torch's SDPA, which
keeps every key; the other an EvictingCache, through lowtri's attention. Tokens are computed by turns, in one thread. The masks
differ: the figures say what bounded memory saves, not that the outputs are equal.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from growth import by_length, check_plot
from lowtri.benching import facts, headline, torch_threads
from lowtri.compat.model_caches import cache_argument
from lowtri.files import write_atomically, writing
from lowtri.integrations.transformers import EvictingCache, switch, use
from lowtri.pictures.svg import INK, LINE, QUERY, VISIBLE

MASK = "causal & (window(1024) | first(4))"
OURS = "EvictingCache"
THEIRS = "transformers' DynamicCache"
LENGTHS = (256, 1024, 2048, 4096, 8192, 16_384, 32_768)
QUICK = (256, 1024)
TURNS = 30
WARM = 5
PART = 1024
WIDTH = 256
LAYERS = 8
HEADS = 8

Points = dict[str, dict[int, tuple[float, int | None]]]  # by name and length: seconds of a token, bytes of the cache


def models(mask: str = MASK) -> tuple[Any, Any]:
    """The two models, with the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = transformers.LlamaConfig(vocab_size=1000, max_position_embeddings=2**20, **sizes)
    theirs = transformers.LlamaForCausalLM(config).eval()
    return use(switch(copy.deepcopy(theirs)), mask=mask), theirs


def filled(n: int, ours: Any, theirs: Any) -> tuple[EvictingCache, Any]:
    """Both caches after ``n`` tokens. Keys of transformers' are drawn: computing them takes time that grows with the square."""
    name = cache_argument(_parameters(ours), ours)
    ids = torch.zeros((1, n), dtype=torch.long)
    cache = EvictingCache(ours)
    for start in range(0, n, PART):
        ours(ids[:, start : start + PART], **{str(name): cache}, logits_to_keep=1)
    other = transformers.DynamicCache(config=theirs.config)
    for layer in range(LAYERS):
        other.update(*torch.randn(2, 1, HEADS, n, WIDTH // HEADS), layer)
    return cache, other


def _parameters(model: Any) -> Sequence[str]:

    return list(inspect.signature(type(model).forward).parameters)


def grow(lengths: Sequence[int] = LENGTHS, mask: str = MASK, progress: Callable[[str], None] = print) -> Points:
    """The time of a token and the memory of the cache, of both."""
    points: Points = {OURS: {}, THEIRS: {}}
    for name, n, seconds, size in _measured(lengths, mask):
        points[name][n] = seconds, size
        progress(f"{n:,} tokens, {name}: {seconds * 1e3:.2f} ms, {size / 1e6:,.1f} MB")
    return points


@torch.inference_mode()
def _measured(lengths: Sequence[int], mask: str) -> Iterator[tuple[str, int, float, int]]:
    with torch_threads(1):
        ours, theirs = models(mask)
        name = str(cache_argument(_parameters(ours), ours))
        token = torch.zeros((1, 1), dtype=torch.long)
        for n in lengths:
            cache, other = filled(n, ours, theirs)
            taken: dict[str, list[float]] = {OURS: [], THEIRS: []}
            for _ in range(WARM + TURNS):
                for which, model, given in ((OURS, ours, cache), (THEIRS, theirs, other)):
                    start = time.process_time()
                    model(token, **{name: given})
                    taken[which].append(time.process_time() - start)
            sizes = {OURS: cache.bytes, THEIRS: sum(x.keys.nbytes + x.values.nbytes for x in other.layers)}
            for which, seconds in taken.items():
                yield which, n, statistics.median(seconds[WARM:]), sizes[which]


def draw(points: Points, machine: dict[str, Any], path: Path) -> None:
    """Write the picture, whole or not at all, in the format of the file's name."""
    check_plot()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = path.suffix.lstrip(".").lower()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowtri", "font.size": 8, "text.color": INK.light}):
        figure = Figure(figsize=(8, 3.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, place, factor, label in zip(
            figure.subplots(1, 2), (0, 1), (1e3, 1e-6), ("time of a token, ms", "memory of the cache, MB"), strict=True
        ):
            for (name, by_n), colour, marker in zip(points.items(), (VISIBLE.light, QUERY.light), "os", strict=True):
                values = [float(found[place] or 0) * factor for found in by_n.values()]
                axes.plot(list(by_n), values, label=name, color=colour, marker=marker, markersize=3.5, linewidth=1.3)
            lengths = list(points[OURS])
            axes.set(xscale="log", yscale="log", xlabel="tokens before", ylabel=label)
            axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
            axes.yaxis.set_major_formatter(lambda size, _: f"{size:,g}")
            axes.minorticks_off()
            axes.grid(color=LINE.light, linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", frameon=False)
        figure.suptitle(f"A token of a Llama of 8 layers of 256, under {MASK}\n{headline(machine)}", fontsize=8)
        with writing("cached_tokens", path):
            metadata = {"Date": None} if kind == "svg" else None
            write_atomically(path, lambda part: figure.savefig(part, format=kind, metadata=metadata))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also draw: svg, png or pdf")
    parser.add_argument("--mask", default=MASK)
    parser.add_argument("--quick", action="store_true", help="two lengths only")
    chosen = parser.parse_args(arguments)
    if chosen.out:
        check_plot()
    machine = facts(1)

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    points = grow(QUICK if chosen.quick else LENGTHS, chosen.mask, note)
    if chosen.out:
        draw(points, machine, chosen.out)
        note(f"wrote {chosen.out}")
    print("\n".join([headline(machine), *by_length("tokens before", points)]))


if __name__ == "__main__":
    main()
