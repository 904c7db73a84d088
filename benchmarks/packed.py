"""Packed rows: lowtri beside what torch offers for a row of several documents.

    python benchmarks/packed.py            # the table of docs/packed.md
    python benchmarks/packed.py bfloat16   # one dtype

One thread; CPU time in milliseconds, the median of interleaved repetitions in one process. Outputs are compared first: SDPA with a
table of all pairs, which transformers gives it, and SDPA once for each document. The last column is a causal mask over the whole
row, which shows documents to one another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import lowtri
from lowtri.benching import facts, headline, medians

HEADS = 8
SIZE = 64
DOCUMENTS = 8
LENGTH = 512
N = DOCUMENTS * LENGTH
MASK = lowtri.causal() & lowtri.documents(lengths=[LENGTH] * DOCUMENTS)
DTYPES = [name for name in ("float32", "bfloat16") if name in sys.argv] or ["float32", "bfloat16"]


def each_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = (x.split(LENGTH, dim=2) for x in (q, k, v))
    return torch.cat([sdpa(*part, is_causal=True) for part in zip(*parts, strict=True)], 2)


def gradients(attend: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(*leaves).sum(), leaves)


def main() -> None:
    table = torch.from_numpy(MASK.dense(N))
    ways = {
        "lowtri": lambda *qkv: lowtri.attention(*qkv, MASK),
        "a table": lambda *qkv: sdpa(*qkv, attn_mask=table),
        "each document": each_document,
        "causal (leaks)": lambda *qkv: sdpa(*qkv, is_causal=True),
    }
    print(headline(facts(1)))
    print(f"{DOCUMENTS} documents of {LENGTH}, {HEADS} heads of {SIZE}, ms: " + ", ".join(ways))
    for name in DTYPES:
        q, k, v = torch.randn(3, 1, HEADS, N, SIZE, dtype=getattr(torch, name))
        ours = ways["lowtri"](q, k, v)
        for other in ("a table", "each document"):
            torch.testing.assert_close(ways[other](q, k, v), ours, rtol=0, atol=40 * torch.finfo(q.dtype).eps)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        forward = {way: partial(attend, q, k, v) for way, attend in ways.items()}
        both = {way: partial(gradients, attend, leaves) for way, attend in ways.items()}
        for work, tasks in {"forward": forward, "forward + backward": both}.items():
            seconds = medians(tasks, 7, time.process_time)
            base = seconds["lowtri"]
            cells = [f"{1e3 * taken:.0f} ({taken / base:.1f}x)" for taken in seconds.values()]
            print(f"{name}, {work}: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    main()
