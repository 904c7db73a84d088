"""Two claims about time, measured: is_causal against an explicit mask, and training in parallel against writing in sequence.

    python benchmarks/claims.py [--threads 2]

What is compared runs interleaved, so that whatever else the machine does falls on both; medians are printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from lowtri.benching import medians
from lowtri.nn import Decoder, DecoderConfig


def causal_by_flag_or_table() -> None:
    print("torch's SDPA, 8 heads of 64, float32: is_causal=True, and the same mask as a table")
    print(f"{'':<34}{'is_causal':>12}{'bool table':>12}{'-inf table':>12}{'lowtri':>12}")
    for n in (128, 512, 2048):
        q, k, v = torch.randn(3, 1, 8, n, 64)
        attend = torch.from_numpy(lowtri.causal().dense(n).copy())
        added = torch.where(attend, 0.0, -torch.inf)

        def both(attention: Callable[..., torch.Tensor], q=q, k=k, v=v) -> None:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            attention(*leaves).sum().backward()

        ways: dict[str, Callable[..., torch.Tensor]] = {
            "is_causal": lambda q, k, v: sdpa(q, k, v, is_causal=True),
            "bool table": lambda q, k, v, m=attend: sdpa(q, k, v, attn_mask=m),
            "-inf table": lambda q, k, v, m=added: sdpa(q, k, v, attn_mask=m),
            "lowtri": lambda q, k, v: lowtri.attention(q, k, v, "causal"),
        }
        for what, run in (("forward", lambda way, q=q, k=k, v=v: way(q, k, v)), ("forward and backward", both)):
            seconds = medians({name: lambda way=way, run=run: run(way) for name, way in ways.items()}, rounds=11)
            cells = "".join(f"{seconds[name] * 1000:>9.2f} ms" for name in ways)
            faster = seconds["bool table"] / seconds["is_causal"]
            print(f"{f'{n} tokens, {what}':<34}{cells}   is_causal over the bool table: {faster:.2f}x")


@torch.inference_mode()
def all_at_once_or_one_by_one(n: int = 256) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=258, hidden_size=128)).eval()
    ids = torch.randint(258, (1, n))

    def one_by_one() -> None:
        cache = model.make_cache()
        for t in range(n):
            model(ids[:, t : t + 1], cache=cache)

    def prefix_anew() -> None:
        for t in range(n):
            model(ids[:, : t + 1], logits_to_keep=1)

    taken = medians({"all at once": lambda: model(ids), "cache": one_by_one, "prefix anew": prefix_anew}, rounds=5)
    print(f"\n{n} positions of a decoder with 4 layers of 128")
    for name, seconds in taken.items():
        print(f"  {name:<14}{seconds * 1000:>9.1f} ms   {seconds / taken['all at once']:>6.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    print(
        f"lowtri {lowtri.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}\n"
    )
    causal_by_flag_or_table()
    all_at_once_or_one_by_one()


if __name__ == "__main__":
    main()
