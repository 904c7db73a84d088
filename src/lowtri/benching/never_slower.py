"""Times a grid of calls against torch's attention and lists those in which ``engine="auto"`` is slower.

Each call and torch's run in turns, and a turn repeats a call until it takes some milliseconds. One thread is timed in CPU time, which
other load on the machine does not lengthen. Several threads are timed by the clock on the wall: threads of an OpenMP team spin while
they wait, and their CPU time says nothing about how long a caller waits.

Calls that look slower are measured again when the whole grid is done, with more turns, and are reported if they are slower again: other
load on the machine, or on a cache that it shares, can last longer than all turns of a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lowtri.benching.grid import PLAIN, GridCall
from lowtri.benching.runs import torch_threads
from lowtri.dispatch.attend import attention, which_engine
from lowtri.masks import mask as read_mask

__all__ = ["LEAST", "MARGIN", "Comparison", "as_json", "as_text", "compare"]

LEAST = 0.95  # torch's time divided by ours
MARGIN = 20e-6  # seconds that a call may take longer, whatever the ratio
_TURN = 1e-2  # seconds that the repetitions of one turn take together; the first ones find the code of the other in the caches
_TURNS = 7
_MORE_TURNS = 31  # in the second pass
_MOST_REPEATS = 200


@dataclass(frozen=True)
class Comparison:
    """One call of the grid: the engine that ``auto`` chose, and the medians in seconds."""

    call: GridCall
    engine: str
    ours: float
    torch: float

    @property
    def times(self) -> float:
        """How many times faster lowtri is."""
        return self.torch / self.ours

    @property
    def is_slower(self) -> bool:
        """Whether it is slower by more than what a measurement cannot tell apart."""
        return self.times < LEAST and self.ours - self.torch > MARGIN


def compare(
    calls: Sequence[GridCall], say: Callable[[str], None] = lambda _: None, turns: int = _TURNS
) -> list[Comparison]:
    """A comparison for each call, from the second pass for those that looked slower in the first.

    Args:
        say: takes a line about each call that is slower in both.
        turns: how often each of the two runs at least.
    """
    found = [_compare(call, turns) for call in calls]
    slower = [i for i, one in enumerate(found) if one.is_slower]
    if slower:
        say(f"{len(slower)} of {len(found)} calls look slower and are measured again.")
    for i in slower:
        found[i] = _compare(calls[i], max(turns, _MORE_TURNS))
        if found[i].is_slower:
            say(_line(found[i]))
    return found


def _compare(call: GridCall, turns: int) -> Comparison:
    with torch_threads(call.threads):
        return _timed(call, turns)


def _timed(call: GridCall, turns: int) -> Comparison:
    ours, theirs, engine = _ways(call)
    clock = time.process_time if call.threads == 1 else time.perf_counter
    for way in (ours, theirs):
        way()
        way()
    repeats = [_repeats(way, clock) for way in (ours, theirs)]
    taken: list[list[float]] = [[], []]
    for _ in range(turns):
        for way, count, seconds in zip((ours, theirs), repeats, taken, strict=True):
            start = clock()
            for _ in range(count):
                way()
            seconds.append((clock() - start) / count)
    return Comparison(call, engine, *map(statistics.median, taken))


def _repeats(way: Callable[[], object], clock: Callable[[], float]) -> int:
    """How often a turn repeats the call."""
    start = clock()
    way()
    return max(1, min(_MOST_REPEATS, int(_TURN / max(clock() - start, 1e-9))))


def _ways(call: GridCall) -> tuple[Callable[[], object], Callable[[], object], str]:
    """The call, torch's call, and the engine that runs the first."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if call.dtype == "bf16" else getattr(torch, call.dtype)
    training = call.work == "training"

    def normal(n: int) -> torch.Tensor:
        return torch.randn(1, call.heads, n, call.d, generator=generator).to(dtype)

    q, d_output = normal(call.queries).requires_grad_(training), normal(call.queries)
    k, v = normal(call.n).requires_grad_(training), normal(call.n).requires_grad_(training)
    mask = read_mask(call.mask)
    options: dict[str, Any] = {}
    if call.who not in PLAIN:
        options["attn_mask"] = torch.from_numpy(mask.dense(call.queries, call.n).copy())
    elif call.who == "causal" and call.work != "decode":
        options["is_causal"] = True

    def ours() -> torch.Tensor:
        return attention(q, k, v, mask)

    def theirs() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    def trained(way: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(way(), (q, k, v), d_output)

    engine = which_engine(q, k, v, mask).engine
    return (trained(ours), trained(theirs), engine) if training else (ours, theirs, engine)


def as_text(found: Sequence[Comparison], words: str) -> str:
    """The calls that are slower, and how the others stand; ``words`` is the headline."""
    slower = [one for one in found if one.is_slower]
    lines = [words, "", *map(_line, sorted(slower, key=lambda one: one.times))]
    by_kind: dict[str, list[float]] = {}
    for one in found:
        by_kind.setdefault(f"{one.call.work} {one.call.who}", []).append(one.times)
    lines += [f"{'':<22}{'calls':>6}{'least':>8}{'median':>8}{'most':>8}   times faster than torch"]
    lines += [
        f"{kind:<22}{len(times):>6}{min(times):>8.2f}{statistics.median(times):>8.2f}{max(times):>8.2f}"
        for kind, times in by_kind.items()
    ]
    return "\n".join([*lines, "", f"{len(slower)} of {len(found)} calls are slower than torch."])


def _line(one: Comparison) -> str:
    ours, theirs = one.ours * 1e6, one.torch * 1e6
    return f"slower  {one.call.name:<44} {one.engine:<8} {ours:>9,.0f} us, torch {theirs:>9,.0f} us: {one.times:.2f}x"


def as_json(found: Sequence[Comparison], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, in seconds."""
    rows = [
        {"call": one.call.name, **asdict(one.call), "mask": one.call.mask, "engine": one.engine}
        | {"lowtri": one.ours, "torch": one.torch, "times": one.times, "slower": one.is_slower}
        for one in found
    ]
    return {**facts, "slower": sum(one.is_slower for one in found), "calls": rows}
