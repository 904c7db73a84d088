"""Times a grid of calls against torch's attention and lists those in which ``engine="auto"`` is slower.

    python benchmarks/never_slower.py               # 720 calls: every dtype, size and kind of mask, one thread and two
    python benchmarks/never_slower.py --quick       # 39 small ones, in some seconds

Each call and torch's run interleaved, and a turn repeats a call until it takes some milliseconds. Calls that take over 20 us
and over a twentieth more than torch's are measured again when the whole grid is done, with more turns, and are reported if
they are slower again: other load on the machine, or on a cache that it shares, can last longer than all turns of a call.
Exit code 1: a call is slower both times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from growth import clock_of
from lowtri.benching import ROUNDS, Attend, Tensors, facts, headline, medians, ours, sdpa, torch_threads
from lowtri.dispatch.attend import which_engine
from lowtri.masks import mask as read_mask
from lowtri.pictures.labels import aligned
from lowtri.system import cpus
from presets import PresetCall, grid

Call = Callable[[], object]
LEAST = 0.95  # torch's time divided by ours
MARGIN = 20e-6  # seconds that a call may take longer, whatever the ratio
TURN = 1e-2  # seconds that the repetitions of one turn take together; the first ones find the code of the other in the caches
_MORE_TURNS = 31  # in the second pass


@dataclass(frozen=True)
class Comparison:
    """One call of the grid: the engine that ``auto`` chose, and the medians in seconds."""

    call: PresetCall
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
    cases: Sequence[PresetCall],
    progress: Callable[[str], None] = lambda _: None,
    turns: int = ROUNDS,
    measure: Callable[[PresetCall, int], Comparison] | None = None,
) -> list[Comparison]:
    """A comparison for each case, from the second pass for those that looked slower in the first.

    Args:
        progress: takes a line about each call that is slower in both.
        turns: how often each of the two runs at least.
        measure: measures a case in so many turns, :func:`in_turns_with_torch` if not given.
    """
    measure = measure or in_turns_with_torch
    found = [measure(case, turns) for case in cases]
    slower = [i for i, one in enumerate(found) if one.is_slower]
    if slower:
        progress(f"{len(slower)} of {len(found)} calls look slower and are measured again.")
    for i in slower:
        found[i] = measure(cases[i], max(turns, _MORE_TURNS))
        if found[i].is_slower:
            progress(_line(found[i]))
    return found


def in_turns_with_torch(case: PresetCall, turns: int) -> Comparison:
    """The comparison of one case."""
    own, theirs, engine = calls(case)
    with torch_threads(case.threads):
        seconds = medians({"ours": own, "torch": theirs}, turns, clock_of(case.threads), TURN)
    return Comparison(case, engine, **seconds)


def calls(case: PresetCall) -> tuple[Call, Call, str]:
    """lowtri's call, torch's call, and the engine that runs the first."""
    tensors = Tensors(case)
    q = tensors.q
    k, v = tensors.kv

    def call(attend: Attend | str) -> Call:
        assert not isinstance(attend, str)
        if case.work == "training":
            return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), tensors.d_output)
        return lambda: attend(q, k, v)

    return call(ours(case, "auto")), call(sdpa(case)), which_engine(q, k, v, read_mask(case.mask)).engine


def as_text(found: Sequence[Comparison], words: str) -> str:
    """The calls that are slower, and how the others stand; ``words`` is the headline."""
    slower = [one for one in found if one.is_slower]
    lines = [words, "", *map(_line, sorted(slower, key=lambda one: one.times))]
    by_kind: dict[str, list[float]] = {}
    for one in found:
        by_kind.setdefault(f"{one.call.work} {one.call.label}", []).append(one.times)
    table: list[tuple[str, ...]] = [("", "calls", "least", "median", "most", "times faster than torch")]
    for kind, times in by_kind.items():
        figures = (min(times), statistics.median(times), max(times))
        table.append((kind, str(len(times)), *(f"{x:.2f}" for x in figures), ""))
    lines += aligned(table, "   ", right=True)
    return "\n".join([*lines, "", f"{len(slower)} of {len(found)} calls are slower than torch."])


def _name(case: PresetCall) -> str:
    threads = "1 thread" if case.threads == 1 else f"{case.threads} threads"
    return f"{case.work} {case.label} {case.n} {case.dtype} {threads}"


def _line(one: Comparison) -> str:
    ours = one.ours * 1e6
    theirs = one.torch * 1e6
    return f"slower  {_name(one.call):<44} {one.engine:<8} {ours:>9,.0f} us, torch {theirs:>9,.0f} us: {one.times:.2f}x"


def as_json(found: Sequence[Comparison], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, in seconds."""
    fields = ("work", "n", "dtype", "threads", "heads", "d")
    rows = [
        {"call": _name(one.call), **{name: getattr(one.call, name) for name in fields}}
        | {"mask": one.call.mask, "engine": one.engine}
        | {"lowtri": one.ours, "torch": one.torch, "times": one.times, "slower": one.is_slower}
        for one in found
    ]
    return {**facts, "slower": sum(one.is_slower for one in found), "calls": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small calls")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    machine = facts(1)

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    note(headline(machine))
    found = compare(grid(chosen.quick, (1, 2) if cpus() > 1 else (1,)), progress=note)
    print(json.dumps(as_json(found, machine), indent=2) if chosen.json else as_text(found, headline(machine)))
    return int(any(one.is_slower for one in found))


if __name__ == "__main__":
    sys.exit(main())
