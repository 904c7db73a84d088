"""A training step over one long row: its peak memory and time, plain, with gradient checkpointing, and shard by shard.

    python benchmarks/long_rows.py                                   # 131,072 tokens, a window of 512
    python benchmarks/long_rows.py --n 16384 --ways plain checkpoint "16 shards"

plain        forward and backward of the whole row
checkpoint   torch.utils.checkpoint around each layer
+ loss       the same, and around the output projection and loss of each 4,096 tokens
k shards     lowtri.parallel.SequentialShards

Each way runs in a process of its own, with the same weights and tokens. Memory is how far the resident memory rose during
the step, after a short step that allocated the gradients. Gradients are compared with those of the first way: the largest
difference of any parameter over its largest gradient.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lowtri.nn import Decoder, DecoderConfig
from lowtri.parallel import SequentialShards, plan_shards
from peak_memory import peak_bytes

CHUNK = 4096  # tokens, of "+ loss"


def model_of(args: argparse.Namespace) -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=max(1, args.hidden // 128),
            max_position_embeddings=args.n,
            mask=args.mask,
        )
    )


def whole_row(model: Decoder, ids: torch.Tensor, targets: torch.Tensor, way: str) -> None:
    """Forward and backward of the whole row at once."""
    if "checkpoint" in way:
        for layer in model.model.layers:
            layer.forward = _checkpointed(type(layer).forward.__get__(layer))
    if "loss" not in way:
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
        return
    hidden = model.model(ids, model.mask, None, None, None)[0]
    losses = [
        checkpoint(_loss, model.lm_head, hidden[i : i + CHUNK], targets[0, i : i + CHUNK], use_reentrant=False)
        for i in range(0, len(hidden), CHUNK)
    ]
    (torch.stack(losses).sum() / targets.numel()).backward()


def _checkpointed(forward: Any) -> Any:
    return lambda x, **options: checkpoint(forward, x, use_reentrant=False, **options)


def _loss(head: torch.nn.Module, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x), targets, reduction="sum")


def by_shards(model: Decoder, ids: torch.Tensor, targets: torch.Tensor, count: int) -> None:
    """Forward and backward of one shard after the other."""
    shards = SequentialShards(plan_shards(model.mask, ids.shape[1], count, way="contiguous"))

    def loss() -> torch.Tensor:
        keep = 0 if torch.is_grad_enabled() else 1  # the first pass needs no logits
        logits = model(shards.shard(ids), positions=shards.positions, attend=shards.attend, logits_to_keep=keep)
        if not torch.is_grad_enabled():
            return logits
        mine = shards.shard(targets).flatten()
        return F.cross_entropy(logits.flatten(0, 1), mine, reduction="sum") / targets.numel()

    shards.backward(loss)


def run_one(args: argparse.Namespace) -> None:
    """One way, in this process: prints memory and seconds, and saves the gradients."""
    way, model = args.one, model_of(args)
    tokens = torch.randint(args.vocabulary, (1, args.n + 1), generator=torch.Generator().manual_seed(1))

    def step(n: int) -> None:
        row, targets = tokens[:, :n], tokens[:, 1 : n + 1]
        if "shards" in way:
            by_shards(model, row, targets, max(2, int(way.split()[0]) * n // args.n))
        else:
            whole_row(model, row, targets, way)

    step(min(args.n, 4096))
    for parameter in model.parameters():
        parameter.grad.zero_()
    times = [time.perf_counter(), time.process_time()]
    peak = peak_bytes(lambda: step(args.n))
    seconds, cpu = time.perf_counter() - times[0], time.process_time() - times[1]
    torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, args.gradients)
    print(json.dumps({"peak": peak, "seconds": seconds, "cpu": cpu}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=131_072)
    parser.add_argument("--mask", default="causal & window(512)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    ways = ["128 shards", "32 shards", "8 shards", "checkpoint + loss", "checkpoint", "plain"]
    parser.add_argument("--ways", nargs="+", default=ways)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--gradients", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args)
        return
    print(f"{args.n:,} tokens, {args.mask}, hidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary}")
    print(f"{torch.get_num_threads()} thread(s); way, peak memory, time, CPU time, difference of gradients")
    with tempfile.TemporaryDirectory() as folder:
        first: dict[str, torch.Tensor] = {}
        for number, way in enumerate(args.ways):
            file = Path(folder) / f"{number}.pt"
            command = [sys.executable, __file__, *sys.argv[1:], "--one", way, "--gradients", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{way:18} failed: {done.stderr.strip().splitlines()[-1:]}")
                continue
            figures, grads = json.loads(done.stdout), torch.load(file)
            first = first or grads
            worst = max(float((grads[name] - g).abs().max() / g.abs().max()) for name, g in first.items())
            print(
                f"{way:18} {figures['peak'] / 2**20:8,.0f} MiB {figures['seconds']:8.1f} s {figures['cpu']:8.1f} s  {worst:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
