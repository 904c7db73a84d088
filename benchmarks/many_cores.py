"""How well calls would use 8, 32, 64 and 128 threads, from the time of each of their tasks on one.

    python benchmarks/many_cores.py

A call is prepared for so many threads; each of its tasks is then timed alone, and laid on the threads as the kernels hand them out: the
next task to the thread that is free first. A backward may run in rounds, each of which begins when the last task of the one before is
done. The efficiency is the time of one thread, prepared for one, over all threads' time until the last one is done. It knows nothing of
shared caches, memory bandwidth, the time to wake threads and the sums of copies.
"""

from __future__ import annotations

import heapq
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import lowtri
from lowtri.backends.cpu import launch
from lowtri.backends.cpu.launch import Launch
from lowtri.dispatch.prepared import PREPARED

THREADS = (1, 8, 32, 64, 128)
REPEATS = 3
MASKS = ("full", "causal", "causal & window(256)", "causal & documents(lengths={})")
SHAPES = ((8, 8, 4096), (32, 8, 2048), (1, 1, 8192))  # heads, key/value heads, tokens
CACHES = ((32, 8, 4096), (32, 8, 32768), (8, 1, 32768))


@contextmanager
def each_task_alone(found: list[list[float]]) -> Iterator[None]:
    """Launches run their tasks one after another, and store the seconds of each."""
    run_at = Launch.run_at

    def alone(self: Any, prepared: bytes, *addresses: int) -> None:
        memory = launch._Memory(self._bytes)
        (tasks,) = struct.unpack_from("q", prepared)  # the first of the prepared fields
        seconds = []
        for task in range(tasks):
            least = float("inf")
            for _ in range(REPEATS):
                one = struct.pack("q", task + 1) + prepared[8:]
                self._write(memory.bytes, 0, task, 0, memory.address + self._scratch, *addresses, one)
                started = time.thread_time()
                self._code.call(memory.address)
                least = min(least, time.thread_time() - started)
            seconds.append(least)
        found.append(seconds)

    Launch.run_at = alone  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.run_at = run_at  # type: ignore[method-assign]


def until_done(seconds: list[float], threads: int) -> float:
    """When the last of these tasks is done."""
    free = [0.0] * threads
    for task in seconds:
        heapq.heappush(free, heapq.heappop(free) + task)
    return max(free)


def kernels_of(call: Any, training: bool) -> dict[str, list[list[float]]]:
    """The seconds of each task of each round of each kernel of a call."""
    PREPARED.clear()
    found: list[list[float]] = []
    with each_task_alone(found):
        results = call()
        if training:
            results.sum().backward()
    if training:
        return {"forward": found[:1], "backward": found[1:]}
    return {name: [tasks] for name, tasks in zip(("no gradients", "weights"), found, strict=False)}


def rows_of(name: str, call: Any, training: bool) -> None:
    """Print the efficiency of each kernel of a call, for each number of threads."""
    alone: dict[str, float] = {}
    lines: dict[str, list[str]] = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        for kernel, rounds in kernels_of(call, training).items():
            alone.setdefault(kernel, sum(map(sum, rounds)))
            share = alone[kernel] / (threads * sum(until_done(seconds, threads) for seconds in rounds))
            tasks = f"{len(rounds)}x{len(rounds[0])}"
            lines.setdefault(kernel, []).append(f"{share:5.2f} ({tasks})" if threads > 1 else "")
    for kernel, cells in lines.items():
        print(f"{name:58} {kernel:12} {alone[kernel] * 1e3:8.1f} ms " + "".join(f"{cell:>13}" for cell in cells[1:]))


def main() -> None:
    quick = "--quick" in sys.argv
    print(
        f"float32, heads of 64; efficiency (rounds x tasks) on {', '.join(map(str, THREADS[1:]))} threads; torch {torch.__version__}"
    )
    for heads, kv_heads, n in SHAPES[: 1 if quick else None]:
        n = 512 if quick else n
        q, k, v = (torch.randn(1, h, n, 64, requires_grad=True) for h in (heads, kv_heads, kv_heads))
        for mask in MASKS[: 2 if quick else None]:
            mask = mask.format([n // 8, n // 8, n // 4, n // 2])
            name = f"{heads}/{kv_heads} heads, {n} tokens, {mask}"
            rows_of(name, lambda q=q, k=k, v=v, mask=mask: lowtri.attention(q, k, v, mask, engine="cpu"), True)
    for heads, kv_heads, n in CACHES[: 1 if quick else None]:
        n = 512 if quick else n
        q, k, v = (torch.randn(1, h, rows, 64) for h, rows in ((heads, 1), (kv_heads, n), (kv_heads, n)))
        name = f"{heads}/{kv_heads} heads, 1 token, cache of {n}"
        rows_of(name, lambda q=q, k=k, v=v: lowtri.attention(q, k, v, "causal", engine="cpu"), False)
    q, k, v = (torch.randn(1, 8, 512 if quick else 4096, 64) for _ in range(3))
    options: dict[str, Any] = {"return_received": True, "engine": "cpu"}
    rows_of(
        f"8/8 heads, {q.shape[2]} tokens, causal, received",
        lambda: lowtri.attention(q, k, v, "causal", **options)[0],
        False,
    )


if __name__ == "__main__":
    main()
