"""What plans and pictures of long masks cost: time, memory, size. Run: python benchmarks/plans.py

To expect on a 2-core machine: each of the first two plans under 0.2 s and far below 100 MB, whatever the length.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from lowtri import Mask, causal, documents, first, strided, window
from lowtri.masks.plan import plan

CASES: list[tuple[Mask, int]] = [
    (causal() & window(1024), 262_144),
    (causal(), 1_000_000),
    (causal() & (window(4096) | first(4)), 1_000_000),
    (causal() & documents(lengths=[1000] * 262), 262_000),
    (causal() & (window(512) | strided(512)), 65_536),
]


def best_of(times: int, act: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    print(f"{'mask':<42} {'tokens':>9} {'plan s':>8} {'peak MB':>8} {'kept kB':>8} {'patterns':>8} {'picture s':>9}")
    for mask, n in CASES:
        positions = np.arange(n)
        tracemalloc.start()
        made = plan(mask, positions, positions)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        seconds = best_of(5, lambda mask=mask, at=positions: plan(mask, at, at))
        picture = best_of(3, lambda mask=mask, n=n: mask.draw(n))
        name = repr(mask) if len(repr(mask)) <= 42 else repr(mask)[:41] + "…"
        print(
            f"{name:<42} {n:>9,} {seconds:>8.3f} {peak / 1e6:>8.1f} {made.nbytes / 1e3:>8.0f} "
            f"{len(made.bits):>8} {picture:>9.3f}"
        )


if __name__ == "__main__":
    main()
