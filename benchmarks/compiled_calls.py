"""What torch.compile adds to a small call: to lowtri.attention, and to torch's own function.

    python benchmarks/compiled_calls.py

All run interleaved in one process, on one thread, in CPU time; medians, in microseconds. *Over torch*: how much more the compiler adds
to lowtri's call than to torch's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import lowtri
from lowtri.benching import facts, headline, torch_threads
from lowtri.pictures.labels import aligned

CALLS = 60  # between two readings of the clock
SHAPES = {"16 tokens": (16, 16), "1 query, 257 keys": (1, 257)}
COLUMNS = "lowtri", "lowtri, compiled", "torch", "torch, compiled"


def times(nq: int, nk: int, turns: int, gradients: bool) -> list[float]:
    """The medians in the order of COLUMNS."""
    q = torch.randn(1, 2, nq, 64, requires_grad=gradients)
    k, v = torch.randn(2, 1, 2, nk, 64)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return lowtri.attention(q, k, v, "causal")

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=nq > 1)

    functions: list[Callable[..., Any]] = []
    for function in (ours, theirs):
        functions += [function, torch.compile(function, fullgraph=True, dynamic=False)]
    seconds: list[list[float]] = [[] for _ in functions]
    with torch.set_grad_enabled(gradients):
        for _ in range(turns + 1):  # the first turn compiles
            for function, found in zip(functions, seconds, strict=True):
                function(q, k, v)
                start = time.process_time()
                for _ in range(CALLS):
                    function(q, k, v)
                found.append((time.process_time() - start) / CALLS)
    return [1e6 * statistics.median(found[1:]) for found in seconds]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=100)
    given = options.parse_args()
    rows = [["", *COLUMNS, "over torch"]]
    with torch_threads(1):
        print(headline(facts(threads=1)))
        for gradients in (False, True):
            for name, (nq, nk) in SHAPES.items():
                found = times(nq, nk, given.turns, gradients)
                over = found[1] - found[0] - (found[3] - found[2])
                label = f"{name}, with gradients" if gradients else name
                rows.append([label, *(f"{x:.1f}" for x in (*found, over))])
    print("\n".join(aligned(rows, "  ", right=True)))


if __name__ == "__main__":
    main()
