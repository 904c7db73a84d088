"""Fits the cost functions of the backends ``cpu`` and ``sdpa``: python benchmarks/costs.py

Each backend runs the plain calls of ``lowtri bench --never-slower`` by itself, in turns, one thread, CPU time, medians. For each
dtype and kind of work a time is fitted as microseconds for the call and microseconds for a million multiplications (decode: for a
million numbers of K and V); relative errors are minimised. The inputs' inspection under ``engine="auto"`` is part of sdpa's time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lowtri import mask
from lowtri.benching.grid import GridCall, grid
from lowtri.dispatch.choose import load
from lowtri.dispatch.prepared import PreparedCall
from lowtri.dispatch.prepared import prepare as prepare_call
from lowtri.ops.describe import describe

TURNS, TURN = 9, 2e-3
BACKENDS = ("cpu", "sdpa")


def runner(call: GridCall, backend: str) -> tuple[Callable[[], object], Any]:
    """A run of the call on this backend as ``auto`` runs it, and the call's description."""
    dtype = torch.bfloat16 if call.dtype == "bf16" else getattr(torch, call.dtype)
    training = call.work == "training"
    q, d_output = (torch.randn(1, call.heads, call.queries, call.d).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, call.heads, call.n, call.d).to(dtype) for _ in range(2))
    described, inputs = describe(*(x.requires_grad_(training) for x in (q, k, v)), mask(call.mask))
    named = prepare_call(described, backend)
    selective = hasattr(named.prepared, "accepts")
    ready = PreparedCall(
        described, backend, load(backend).prepare(described), False, selective, named.differentiates, True
    )

    def run() -> object:
        output = ready.run(inputs).output
        return torch.autograd.grad(output, (q, k, v), d_output) if training else output

    return run, described


def measure(call: GridCall) -> dict[str, float]:
    """Microseconds on each backend."""
    ways = {backend: runner(call, backend)[0] for backend in BACKENDS}
    repeats, taken = {}, {name: [] for name in ways}
    for name, way in ways.items():
        way(), way()
        start = time.process_time()
        way()
        repeats[name] = max(1, min(100, int(TURN / max(time.process_time() - start, 1e-9))))
    for _ in range(TURNS):
        for name, way in ways.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                way()
            taken[name].append((time.process_time() - start) / repeats[name] * 1e6)
    return {name: statistics.median(times) for name, times in taken.items()}


def amount(call: GridCall, backend: str) -> float:
    """Millions of multiplications, as the backend's cost function counts them; for decode millions of numbers of K and V."""
    numbers = 2 * call.heads * call.n * call.d / 1e6
    if call.work == "decode":
        return numbers
    queries = -(-call.n // 16) * 16 if backend == "cpu" else call.n
    return numbers * queries / (2 if call.who == "causal" else 1)


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for call in grid(threads=(1,)):
        if call.who in ("causal", "full") and call.n <= (8192 if call.work == "decode" else 1024):
            found.append((call, measure(call)))
            print(f"{call.name:<44}" + "".join(f"{x:>12,.0f}" for x in found[-1][1].values()), file=sys.stderr)
    print(f"{'us for a call, and for a million':<34}" + "".join(f"{name:>20}" for name in BACKENDS))
    for work in ("forward", "training", "decode"):
        for dtype in ("float32", "bf16", "float16"):
            cells = []
            for backend in BACKENDS:
                rows = [
                    (amount(call, backend), times[backend])
                    for call, times in found
                    if (call.work, call.dtype) == (work, dtype)
                ]
                x, y = np.array(rows).T
                (fixed, rate), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None)
                cells.append(f"{fixed:>12.0f}{rate:>8.1f}")
            print(f"{work + ' ' + dtype:<34}" + "".join(cells))


if __name__ == "__main__":
    main()
