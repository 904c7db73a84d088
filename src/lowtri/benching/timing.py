"""The timer of all measurements: implementations run in turns in one process, so that other load on the machine affects all of them
equally; and the tensors of a case, the check that outputs agree, and the peak of memory.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowtri.benching.cases import Case
from lowtri.benching.machine import last_cache_bytes
from lowtri.benching.peers import OURS, Attend
from lowtri.errors import UndecidedError
from lowtri.system import available_memory, memory_use

Clock = Callable[[], float]  # seconds
ROUNDS = 7  # at least
SECONDS = 0.5  # cheap cases are repeated for so long, at most
_MOST_ROUNDS, _MOST_REPEATS = 51, 200
_ALLOWED = {"float32": 1e-4, "bf16": 6e-2, "float16": 1e-2}  # the difference of two correct outputs of order 1
_MOST_CACHES = 2**31  # bytes of rotating caches, at most
_RESET = Path("/proc/self/clear_refs")
_ELSEWHERE = 8 * 2**30  # bytes assumed to be available where the system does not say


def clock_of(threads: int) -> Clock:
    """CPU time for one thread, which other load on the machine does not lengthen; time on the wall for several, since threads of an
    OpenMP team spin while they wait.
    """
    return time.process_time if threads == 1 else time.perf_counter


def seconds_of(task: Callable[[], object], clock: Clock = time.perf_counter, repeats: int = 1) -> float:
    """Seconds of one call, or the mean of several in a row."""
    start = clock()
    for _ in range(repeats):
        task()
    return (clock() - start) / repeats


def in_turns(
    ways: Mapping[str, Callable[[], float]],
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Call every way once a round, in their order, for at least so many rounds and so many seconds.

    >>> in_turns({"one": lambda: 1.0, "two": lambda: 2.0}, rounds=2, seconds=0)
    {'one': [1.0, 1.0], 'two': [2.0, 2.0]}

    Args:
        ways: each gives the seconds that it took.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    start, done = clock(), 0
    while done < rounds or (clock() - start < seconds and done < _MOST_ROUNDS):
        for name, way in ways.items():
            taken[name].append(way())
        done += 1
    return taken


def medians(
    tasks: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
    turn: float = 0.0,
) -> dict[str, float]:
    """Median seconds of each task :func:`in_turns`, after two calls of each; a turn repeats a task for about ``turn`` seconds."""
    ways: dict[str, Callable[[], float]] = {}
    for name, task in tasks.items():
        seconds_of(task, repeats=2)
        repeats = max(1, min(_MOST_REPEATS, int(turn / max(seconds_of(task, clock), 1e-9)))) if turn else 1
        ways[name] = partial(seconds_of, task, clock, repeats)
    return {name: statistics.median(taken) for name, taken in in_turns(ways, rounds, 0).items()}


class Tensors:
    """q, k, v and the gradient of the output. Decoding rotates KV caches of together four times the CPU's last-level cache,
    so that each is read from memory, unless ``rotating`` is False.
    """

    def __init__(self, case: Case, seed: int = 0, rotating: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        kind = torch.bfloat16 if case.dtype == "bf16" else getattr(torch, case.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(kind)

        count = 1
        if rotating and case.work == "decode":
            count = max(1, min(math.ceil(4 * last_cache_bytes() / case.cache_bytes), _MOST_CACHES // case.cache_bytes))
        training = case.work == "training"
        self.q = normal(1, case.heads, case.queries, case.d).requires_grad_(training)  # (1, Hq, Nq, D)
        caches = normal(2, 1, case.kv_heads, case.n, case.d)
        self.caches = [caches] + [caches.clone() for _ in range(count - 1)]  # (2, 1, Hkv, Nk, D) each
        self.kv = [tuple(x.requires_grad_(training) for x in cache) for cache in self.caches]
        self.d_output = normal(1, case.heads, case.queries, case.d) if training else None
        self._turn = 0

    def next(self) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """The next cache, (2, 1, Hkv, Nk, D), and its keys and values."""
        turn = self._turn % len(self.caches)
        self._turn += 1
        return self.caches[turn], self.kv[turn]


def run(attend: Attend, tensors: Tensors) -> torch.Tensor:
    """The output (1, Hq, Nq, D); in training the gradients are computed, too."""
    _, (k, v) = tensors.next()
    if tensors.d_output is None:
        with torch.no_grad():
            return attend(tensors.q, k, v)
    output = attend(tensors.q, k, v)
    torch.autograd.grad(output, (tensors.q, k, v), tensors.d_output)
    return output.detach()


def timed(attend: Attend, tensors: Tensors, clock: Clock = time.perf_counter) -> float:
    """Seconds of one :func:`run`."""
    return seconds_of(lambda: run(attend, tensors), clock)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Inside, torch and lowtri compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_equal(where: str, name: str, output: torch.Tensor, reference: torch.Tensor, dtype: str) -> None:
    """Raise if an implementation's output differs from lowtri's: a wrong answer has no speed.

    Raises:
        UndecidedError: if it does.
    """
    difference = float((output.float() - reference.float()).abs().max())
    if not difference <= _ALLOWED[dtype]:
        raise UndecidedError(
            f"bench: {where}: {OURS} and {name} differ by {difference:.2g}, more than {_ALLOWED[dtype]:.0e}.\n"
            "Nothing is timed: a wrong answer has no speed."
        )


def peak_bytes(function: Callable[[], object]) -> int | None:
    """How far the memory in use rose during the call, in bytes.

    None where the system does not say (the function is then not called), or where an earlier peak hides that of the call: Linux alone
    can reset it.
    """
    with suppress(OSError, AttributeError, TypeError):  # another system, or another C library
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system, where its reuse would not be counted
        _RESET.write_text("5", encoding="ascii")
    before = memory_use()
    if before is None:
        return None
    function()
    after = memory_use()
    if after is None or (after[1] <= before[1] and before[1] - before[0] > 2**20):  # Linux counts pages in batches
        return None
    return max(0, after[1] - before[0])


def available_bytes() -> int:
    """What new allocations may take without swapping; 8 GB where the system does not say."""
    return available_memory() or _ELSEWHERE
