"""A stream past the trained length: the loss by position, for four ways to say where tokens stand.

    python benchmarks/streaming.py                          # about two minutes on one core
    python benchmarks/streaming.py --steps 2000 --tokens 8192

A small decoder learns Python's help pages, byte by byte, in rows of 128 under a window of 32 and four sinks. Then it reads
held-out pages many times as long, token by token through its cache:

    shift         before a token would stand at 128, `KVCache.shift` closes the gap between the sinks and the window
    every token   the same as soon as it can, so that a query always stands at 35: StreamingLLM's positions within the cache
    true places   rotary embedding sees the place in the sequence: sinks grow more distant than any that was trained on
    no sinks      a window of 36 at true places

Expect: the first two alike, and as good as within the trained length; true places worse by 0.2 to 0.3 nats from the trained
length on. Without sinks the loss is as low as with a shift: a model this small puts little weight on its sinks, which harms it
only where they stand at distances that it never saw.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pydoc_data.topics
import time
from datetime import date

import torch
from torch.nn.functional import cross_entropy

import lowtri
from lowtri.nn import Decoder, DecoderConfig
from lowtri.nn.positions import apply_rotary, rotary_tables

CONTEXT = 128
WINDOW = 32
SINKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="of training")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stream")
    parser.add_argument("--rows", type=int, default=8, help="streams beside one another")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)

    pages = pydoc_data.topics.topics
    text = torch.tensor(list("\n".join(pages[name] for name in sorted(pages)).encode()))
    held = given.rows * (given.tokens + 1)
    if len(text) < 2 * held:
        parser.error(f"the pages have {len(text):,} bytes, and {held:,} are to be held out: fewer --rows or --tokens")
    streams = text[-held:].view(given.rows, -1)  # (B, N + 1)
    config = DecoderConfig(
        vocab_size=256,
        hidden_size=96,
        num_hidden_layers=3,
        max_position_embeddings=CONTEXT,
        mask=f"causal & (window({WINDOW}) | first({SINKS}))",
    )
    model = train(config, text[:-held], given.steps)
    sinkless = f"causal & window({WINDOW + SINKS})"

    print(f"{config.mask}, trained on rows of {CONTEXT}, lowtri {lowtri.__version__}, torch {torch.__version__},")
    print(f"{date.today().isoformat()}; nats a byte, {given.rows} streams\n")
    edges = [WINDOW + SINKS, CONTEXT]
    while edges[-1] * 4 < given.tokens:
        edges.append(edges[-1] * 4)
    edges.append(given.tokens)
    spans = list(itertools.pairwise(edges))
    print("| places | " + " | ".join(f"{a:,} to {b:,}" for a, b in spans) + " | held | dropped |")
    print("|---" * (len(spans) + 3) + "|")
    for name, mask, limit in (
        ("shift", config.mask, CONTEXT),
        ("every token", config.mask, WINDOW + SINKS),
        ("true places", config.mask, None),
        ("no sinks", sinkless, None),
    ):
        reader = model if limit else elsewhere(model, mask, given.tokens)
        losses, cache = read(reader, streams, limit)
        print(f"| {name} | " + " | ".join(f"{float(losses[a:b].mean()):.3f}" for a, b in spans), end="")
        print(f" | {cache.held} | {cache.evicted:,} |", flush=True)


def train(config: DecoderConfig, text: torch.Tensor, steps: int) -> Decoder:
    model = Decoder(config)
    begun = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        starts = torch.randint(len(text) - CONTEXT - 1, (16,))
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"trained for {steps} steps in {time.perf_counter() - begun:.0f} s, to {loss.item():.3f} nats a byte\n")
    return model.eval()


def elsewhere(model: Decoder, mask: str, places: int) -> Decoder:
    """The same weights under another mask, with as many places as the stream has tokens."""
    other = Decoder(dataclasses.replace(model.config, mask=mask, max_position_embeddings=places))
    other.load_state_dict(model.state_dict())
    return other.eval()


@torch.inference_mode()
def read(model: Decoder, streams: torch.Tensor, limit: int | None) -> tuple[torch.Tensor, lowtri.KVCache]:
    """The loss of each next token (N, B), and the cache at the end."""
    config = model.config
    cache = model.make_cache(len(streams))
    losses = []
    for t in range(streams.shape[1] - 1):
        if limit is not None and cache.length >= limit:
            cache.shift(
                SINKS, lambda k, moved, _: apply_rotary(k, *rotary_tables(moved, config.head_dim, config.rope_theta))
            )
        logits = model(streams[:, t : t + 1], cache=cache)[:, -1]
        losses.append(cross_entropy(logits, streams[:, t + 1], reduction="none"))
    return torch.stack(losses), cache


if __name__ == "__main__":
    main()
