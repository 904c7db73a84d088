"""Training speed of lowtri's Decoder beside the same decoder in plain torch: same shapes, same process, interleaved.

    python benchmarks/training_speed.py                     # 10 million parameters, 8 rows of 1,024 tokens
    python benchmarks/training_speed.py --small             # 4 layers of 128 numbers, 8 rows of 128 tokens
    python benchmarks/training_speed.py --mask "causal & window(64)" --batch 4

The plain decoder is written with torch.nn and F.scaled_dot_product_attention(is_causal=True), as anybody would. It holds
the same weights; the two losses must agree before anything is timed. A step is forward, backward, clipping and AdamW.
Their steps are interleaved, so that whatever else the machine does falls on both; the medians are compared. With one thread a
step is timed in CPU time, which other load does not lengthen. ``--profile`` lists the operations of each model that take the
most time.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import lowtri
from lowtri.nn import Decoder, DecoderConfig


class PlainLayer(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads = c.num_attention_heads
        self.kv_heads = c.num_key_value_heads
        size = c.hidden_size // c.num_attention_heads
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(c.hidden_size, self.heads * size, bias=False),
                "k_proj": nn.Linear(c.hidden_size, self.kv_heads * size, bias=False),
                "v_proj": nn.Linear(c.hidden_size, self.kv_heads * size, bias=False),
                "o_proj": nn.Linear(self.heads * size, c.hidden_size, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
                "up_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
                "down_proj": nn.Linear(c.intermediate_size, c.hidden_size, bias=False),
            }
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, n, _ = x.shape
        y = self.input_layernorm(x)
        a = self.self_attn
        f = self.mlp
        q = rotate(a["q_proj"](y).view(b, n, self.heads, -1).transpose(1, 2), cos, sin)  # (B, Hq, N, D)
        k = rotate(a["k_proj"](y).view(b, n, self.kv_heads, -1).transpose(1, 2), cos, sin)  # (B, Hkv, N, D)
        v = a["v_proj"](y).view(b, n, self.kv_heads, -1).transpose(1, 2)  # (B, Hkv, N, D)
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        x = x + a["o_proj"](y.transpose(1, 2).reshape(b, n, -1))
        y = self.post_attention_layernorm(x)
        return x + f["down_proj"](F.silu(f["gate_proj"](y)) * f["up_proj"](y))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class PlainDecoder(nn.Module):
    def __init__(self, c: DecoderConfig, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
                "layers": nn.ModuleList(PlainLayer(c) for _ in range(c.num_hidden_layers)),
                "norm": nn.RMSNorm(c.hidden_size, c.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        size = c.hidden_size // c.num_attention_heads
        turns = c.rope_theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(c.max_position_embeddings), turns).repeat(1, 2)  # (N, D)
        self.cos = angles.cos()
        self.sin = angles.sin()
        self.mask = mask

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        x = self.model["embed_tokens"](ids)
        for layer in self.model["layers"]:
            x = layer(x, self.cos[:n], self.sin[:n], self.mask)
        return self.lm_head(self.model["norm"](x))


SMALL = dict(context=128, hidden=128, layers=4, heads=4, vocabulary=512, steps=60)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[float, float]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), clock() - started


def profile(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(5):
            step(model, optimizer, ids)
    print(
        f"{name}:\n{found.key_averages().table(sort_by='self_cpu_time_total', row_limit=25, max_name_column_width=60)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(batch=8, context=1024, hidden=320, layers=6, heads=5, vocabulary=4096, steps=9)
    if "--small" in sys.argv:
        sizes |= SMALL
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--mask", default="causal")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=o.vocabulary,
        hidden_size=o.hidden,
        intermediate_size=-(-8 * o.hidden // 3 // 64) * 64,
        num_hidden_layers=o.layers,
        num_attention_heads=o.heads,
        num_key_value_heads=o.heads,
        max_position_embeddings=o.context,
        mask=o.mask,
    )
    table = torch.from_numpy(lowtri.mask(o.mask).dense(o.context).copy())
    models: dict[str, nn.Module] = {
        "lowtri": Decoder(config),
        "plain torch": PlainDecoder(config, None if o.mask == "causal" else table),
    }
    models["plain torch"].load_state_dict(models["lowtri"].state_dict())
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True) for name, model in models.items()}
    parameters = sum(parameter.numel() for parameter in models["lowtri"].parameters())
    print(
        f"torch {torch.__version__}, lowtri {lowtri.__version__}, Python {platform.python_version()}, {o.threads} threads of"
    )
    print(
        f"{os.cpu_count()} CPUs ({platform.machine()}); {parameters:,} parameters, batch {o.batch} x {o.context}, mask {o.mask}"
    )
    print(f"{config}\n")

    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(o.steps + 2):  # two to warm up
        ids = torch.randint(o.vocabulary, (o.batch, o.context + 1))
        losses = {}
        # The second finds warm caches: the order alternates.
        for name in sorted(models, reverse=number % 2 == 1):
            losses[name], taken = step(models[name], optimizers[name], ids)
            seconds[name].append(taken)
        if number == 0 and abs(losses["lowtri"] - losses["plain torch"]) > 1e-3:
            raise SystemExit(f"the two models differ, nothing is timed: {losses}")
    if o.profile:
        for name, model in models.items():
            profile(name, model, optimizers[name], ids)
    medians = {name: statistics.median(taken[2:]) for name, taken in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<12} {median * 1000:8.1f} ms a step   {o.batch * o.context / median:10,.0f} tokens/s")
    print(f"lowtri / plain torch, tokens/s: {medians['plain torch'] / medians['lowtri']:.3f}")


if __name__ == "__main__":
    main()
