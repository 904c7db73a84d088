"""Decoding against a loop that only reads: the share of the read loop's throughput that a call of attention reaches.

    python benchmarks/decode.py                     # the grid: dtypes, lengths, groups, batches, threads; some ten minutes
    python benchmarks/decode.py --lengths 4096 --groups 1 4 --batches 1 --threads 1

Both run interleaved over caches that together hold four times the CPU's last cache, so that each is read from memory. One thread is
timed in CPU time, several by the clock. *call*: the share that a whole call reaches. *kernel*: the same without what is around the
kernel, Python and the launch. *around*: what these take, at a moment when the CPU's caches hold nothing of the interpreter's.
A ring is the cache of a window with four sinks, whose newest keys overwrite the oldest.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import lowtri
from lowtri.backends.cpu import launch
from lowtri.benching import facts, headline, read
from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels import library
from lowtri.kernels import threads as teams
from lowtri.system import last_cache_bytes

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}
KV_HEADS = 8
D = 128
SINKS = 4


class KernelTime:
    """The time that the last kernel took, apart from the call around it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.clock = clock
        self._code = library.code
        self._run_team = teams.run_team

    def __enter__(self) -> KernelTime:
        PREPARED.clear()  # calls prepared before have code that is not timed
        launch.code = library.code = self._timed_code  # type: ignore[attr-defined, assignment]
        launch.run_team = teams.run_team = self._timed(self._run_team)  # type: ignore[attr-defined]
        return self

    def __exit__(self, *error: object) -> None:
        PREPARED.clear()
        launch.code = library.code = self._code  # type: ignore[attr-defined]
        launch.run_team = teams.run_team = self._run_team  # type: ignore[attr-defined]

    def _timed_code(self, name: str) -> Any:
        """The machine code of a function, whose calls from Python are timed."""
        timed = copy.copy(self._code(name))
        timed.call = self._timed(timed.call)
        return timed

    def _timed(self, run: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = self.clock()
            run(*args)
            self.seconds = self.clock() - start

        return timed


def caches(batch: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values (2, B, Hkv, N, D), four times what the last cache of the CPU holds."""
    one = torch.randn(1, 1, 1, n, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    size = 2 * batch * KV_HEADS * n * D * one.element_size()
    return [one.repeat(2, batch, KV_HEADS, 1, 1) for _ in range(max(1, -(-4 * last_cache_bytes() // size)))]


def measure(name: str, n: int, group: int, batch: int, threads: int, rounds: int, ring: bool) -> str:
    clock = time.process_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    turning = itertools.cycle(caches(batch, n, DTYPES[name]))
    q = torch.randn(batch, KV_HEADS * group, 1, D).to(DTYPES[name])
    options: dict[str, Any] = {}
    mask = lowtri.causal()
    if ring:
        newest = 3 * n  # the ring has turned, and its oldest key stands in its middle
        slots = np.roll(np.arange(newest - (n - SINKS) + 1, newest + 1), n // 2)
        mask = lowtri.causal() & (lowtri.window(n - SINKS) | lowtri.first(SINKS))
        options = {"q_positions": [newest], "k_positions": np.concatenate([np.arange(SINKS), slots])}
    calls = []
    kernels = []
    reads = []
    with KernelTime(clock) as kernel:
        for turn in range(rounds + 1):
            k, v = cache = next(turning)
            start = clock()
            lowtri.attention(q, k, v, mask, engine="cpu", **options)
            calls.append(clock() - start)
            kernels.append(kernel.seconds)
            cache = next(turning)
            read(cache.data_ptr(), cache.nbytes, threads)
            reads.append(kernel.seconds)
            if not turn:  # compiled now
                calls = []
                kernels = []
                reads = []
    call, alone, loop = (statistics.median(seconds) for seconds in (calls, kernels, reads))
    around = statistics.median(one - other for one, other in zip(calls, kernels, strict=True))
    team = "1 thread " if threads == 1 else f"{threads} threads"
    what = f"{name:8} {n:6,} keys  group {group}  batch {batch}  {team}"
    speed = f"around {around * 1e6:5.0f} us  read loop {cache.nbytes / loop / 1e9:5.1f} GB/s"
    return f"{what}  {'ring' if ring else '    '}  call {loop / call:.2f}  kernel {loop / alone:.2f}  {speed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 32_768])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--ring", action="store_true", help="only rings with sinks")
    chosen = parser.parse_args()
    print(headline(facts(max(chosen.threads))), f"{KV_HEADS} key/value heads of {D}", sep="\n", flush=True)
    grid = itertools.product(chosen.threads, chosen.batches, chosen.lengths, chosen.groups, chosen.dtypes)
    for threads, batch, n, group, name in grid:
        print(measure(name, n, group, batch, threads, chosen.rounds, chosen.ring), flush=True)


if __name__ == "__main__":
    main()
