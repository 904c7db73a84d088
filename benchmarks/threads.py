"""Two threads against one, each right after a torch operation, whose workers then still spin on the other core.

    python benchmarks/threads.py

By turns in one process; medians. The machine should be quiet: with the second core in use there is nothing to gain.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

import lowtri

TURNS = 15


def run(threads: int, q: torch.Tensor, training: bool) -> float:
    """Seconds of one call on so many threads, right after a product of matrices on as many."""
    torch.set_num_threads(threads)
    x = torch.randn(512, 512)
    torch.mm(x, x)
    started = time.perf_counter()
    if training:
        lowtri.attention(q, q, q, "causal", engine="cpu").sum().backward()
    else:
        lowtri.attention(q, q, q, "causal", engine="cpu")
    return time.perf_counter() - started


def main() -> None:
    most = min(2, os.cpu_count() or 1)
    print(f"causal, 8 heads of 64; torch {torch.__version__}, 1 and {most} threads")
    for dtype in (torch.float32, torch.bfloat16):
        for n, training in ((1024, False), (2048, False), (2048, True)):
            q = torch.randn(1, 8, n, 64).to(dtype).requires_grad_(training)
            for threads in (1, most):
                run(threads, q, training)
            times = [(run(1, q, training), run(most, q, training)) for _ in range(TURNS)]
            one, two = (statistics.median(column) for column in zip(*times, strict=True))
            work = "forward + backward" if training else "forward"
            print(f"{n:5} tokens  {dtype!s:15} {work:18}  {one * 1e3:6.1f} ms  {two * 1e3:6.1f} ms  {one / two:.2f}x")


if __name__ == "__main__":
    main()
