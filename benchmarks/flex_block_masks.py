"""The time to make a BlockMask: from a lowtri mask, from a mask_mod by lowtri, and by torch's create_block_mask; and the attention.

    python benchmarks/flex_block_masks.py            # 16,384 and 65,536 tokens; torch's function takes 3 GB at 16,384
    python benchmarks/flex_block_masks.py compiled   # forward against compiled FlexAttention; needs a C++ compiler

CPU time in milliseconds, the median of repetitions by turns. torch's function asks for 34 GB at 65,536 tokens and is not run there.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask as torchs_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs_attention

from lowtri.integrations.flex import block_mask, create_block_mask, flex_attention
from lowtri.masks import causal, documents, first, window
from lowtri.masks.mask import Mask

warnings.simplefilter("ignore")


def cases(n: int) -> dict[str, tuple[Mask, Callable[..., Any]]]:
    """The same masks for lowtri and for FlexAttention."""
    lengths = [n // 2, n // 8, n // 4, n - n // 2 - n // 8 - n // 4]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    return {
        "causal": (causal(), lambda b, h, q, k: q >= k),
        "window 4096": (causal() & window(4096), lambda b, h, q, k: (q >= k) & (q - k < 4096)),
        "prefix n/4": (causal() | first(n // 4), lambda b, h, q, k: (q >= k) | (k < n // 4)),
        "4 documents": (causal() & documents(lengths=lengths), lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])),
    }


def median(turns: int, *functions: Callable[[], Any]) -> list[float]:
    """Milliseconds of CPU time of each function, by turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(turns + 1):
        for spent, function in zip(times, functions, strict=True):
            begun = time.process_time()
            function()
            spent.append(1e3 * (time.process_time() - begun))
    return [statistics.median(spent[1:]) for spent in times]  # the first turn warms up


def block_masks() -> None:
    print(f"{'tokens':>8} {'mask':14} {'block_mask':>12} {'our create':>12} {'torchs':>12}")
    for n in (16_384, 65_536):
        for name, (mask, mod) in cases(n).items():
            ours = median(
                5, lambda m=mask, n=n: block_mask(m, n), lambda f=mod, n=n: create_block_mask(f, 1, 1, n, n, "cpu")
            )
            theirs = (
                median(1, lambda f=mod, n=n: torchs_block_mask(f, 1, 1, n, n, "cpu")) if n < 20_000 else [float("nan")]
            )
            print(f"{n:8} {name:14} " + " ".join(f"{x:12.1f}" for x in (*ours, *theirs)), flush=True)


def compiled() -> None:
    n = 4096
    q, k, v = (torch.randn(1, 8, n, 64) for _ in "qkv")
    run = torch.compile(torchs_attention, dynamic=False)
    for name, (_, mod) in cases(n).items():
        blocks = create_block_mask(mod, None, None, n, n, "cpu")
        with torch.no_grad():
            a, b = (f(q, k, v, block_mask=blocks) for f in (flex_attention, run))
            assert (a - b).abs().max() < 1e-4
            ours, theirs = median(
                5, lambda m=blocks: flex_attention(q, k, v, block_mask=m), lambda m=blocks: run(q, k, v, block_mask=m)
            )
        print(
            f"{n:8} {name:14} lowtri {ours:8.1f}   compiled FlexAttention {theirs:8.1f}   {theirs / ours:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    compiled() if sys.argv[1:] == ["compiled"] else block_masks()
