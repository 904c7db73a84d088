"""Generating under a window: tokens a second and bytes of the cache, by position, beside a cache that drops nothing.

    python benchmarks/window_generation.py                                 # window of 256, 4,096 tokens
    python benchmarks/window_generation.py --sinks 4 --tokens 16384 --dtype bfloat16

One model in Mistral's shape with random weights; both caches are asked by the same mask and fed the same tokens, so that they
differ in what they hold and in nothing else. They take blocks of tokens interleaved, each beginning every other block, so that
whatever else the machine does falls on both. Expect: the bytes of the ring stand still once it is full, its speed does too,
and the speed of the other falls with the length wherever reading keys takes a share of the time that is worth speaking of.
"""

from __future__ import annotations

import argparse
import platform
import time
from datetime import date

import torch

import lowtri
from lowtri import KVCache
from lowtri.nn import Decoder, DecoderConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=0, help="how many first tokens stay visible")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8, help="lines of the table")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()

    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    sinks = f" | first({given.sinks})" if given.sinks else ""
    mask = f"causal & (window({given.window}){sinks})"
    config = DecoderConfig(
        vocab_size=1024,
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
        max_position_embeddings=given.tokens,
        mask=mask,
    )
    model = Decoder(config).eval().to(getattr(torch, given.dtype))
    ring = model.make_cache(given.batch)
    everything = KVCache("causal")
    everything.mask = model.mask  # attention asks this mask; what is dropped was settled by the other
    tokens = torch.randint(config.vocab_size, (given.batch, given.tokens))

    print(
        f"{mask}, batch {given.batch}, {given.layers} layers of {given.hidden}, heads {given.heads}/{given.kv_heads},"
    )
    print(f"{given.dtype}, {given.threads} thread(s), lowtri {lowtri.__version__}, torch {torch.__version__},")
    print(f"Python {platform.python_version()}, {platform.machine()}, {date.today().isoformat()}\n")
    print("| tokens so far | ring: tokens/s | all keys: tokens/s | ratio | ring: KiB | all keys: KiB | dropped |")
    print("|--:|--:|--:|--:|--:|--:|--:|")

    block = 64
    off = 0.0
    largest = 0.0
    seconds = {"ring": 0.0, "all": 0.0}
    line = max(given.tokens // given.rows // block, 1) * block
    with torch.inference_mode():
        for number, start in enumerate(range(0, given.tokens, block)):
            ids = tokens[:, start : start + block]
            last = {}
            for name in ("ring", "all") if number % 2 else ("all", "ring"):
                cache = ring if name == "ring" else everything
                begun = time.perf_counter()
                for t in range(ids.shape[1]):
                    last[name] = model(ids[:, t : t + 1], cache=cache)
                seconds[name] += time.perf_counter() - begun
            off = max(off, float((last["ring"] - last["all"]).abs().max()))
            largest = max(largest, float(last["all"].abs().max()))
            so_far = start + ids.shape[1]
            if so_far % line == 0 or so_far == given.tokens:
                done = given.batch * ((so_far - 1) % line + 1)
                speed = {name: done / spent for name, spent in seconds.items()}
                print(
                    f"| {so_far:,} | {speed['ring']:.0f} | {speed['all']:.0f} | {speed['ring'] / speed['all']:.2f} "
                    f"| {ring.bytes / 1024:,.0f} | {everything.bytes / 1024:,.0f} | {ring.evicted:,} |",
                    flush=True,
                )
                seconds = dict.fromkeys(seconds, 0.0)
    print(f"\nLogits of the two differ by at most {off:.1e}; the largest is {largest:.1f}.")


if __name__ == "__main__":
    main()
