"""How fast attention is on this machine: `lowtri bench`, and what the doctor and the lesson measure with.

Implementations run interleaved in one process, so that other load on the machine affects all of them equally; medians count.
Outputs are compared before anything is timed. The limit of the machine is measured in the same rounds: how fast the CPU
multiplies, which is only the kernels' register block, on operands that stay in the L1 cache.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtri import system
from lowtri._version import __version__
from lowtri.errors import UndecidedError
from lowtri.masks import mask as read_mask
from lowtri.pictures.labels import ruled

if TYPE_CHECKING:
    import torch

Clock = Callable[[], float]  # seconds
Attend = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]  # q, k, v (B, H, N, D) -> output

# The machine, and the versions on which figures depend.


def facts(threads: int) -> dict[str, Any]:
    """What is printed with figures: date, machine, threads, load, versions."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": system.cpu_name(),
        "cpus": system.cpus(),
        "threads": threads,
        "load": system.load(),
        "versions": versions(),
    }


def headline(facts: dict[str, Any]) -> str:
    """The :func:`facts` in two lines."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    load = "" if facts["load"] is None else f", load {facts['load']}"
    crowded = facts["load"] is not None and facts["load"] > facts["cpus"] - facts["threads"] + 0.5
    note = " (others compute, too: figures are too low, look at the ratios)" if crowded else ""
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return f"{facts['date']}, {facts['cpu']}, {threads} of {facts['cpus']} CPUs{load}{note}\n{versions}"


def versions() -> dict[str, str | None]:
    """Versions of Python, lowtri and its numerical packages; None for what is not installed, or has no metadata."""
    numbers: dict[str, str | None] = {"lowtri": __version__, "python": platform.python_version()}
    for name in ("numpy", "torch"):
        numbers[name] = None
        with suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers


# The timer.

ROUNDS = 7  # at least
SECONDS = 0.5  # cheap calls are repeated for so long, at most
_MOST_ROUNDS, _MOST_REPEATS = 51, 200


def seconds_of(task: Callable[[], object], clock: Clock = time.perf_counter, repeats: int = 1) -> float:
    """Seconds of one call, or the mean of several in a row."""
    start = clock()
    for _ in range(repeats):
        task()
    return (clock() - start) / repeats


def interleaved(
    timed_calls: Mapping[str, Callable[[], float]],
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Call each once a round, in their order, for at least so many rounds and so many seconds.

    >>> interleaved({"one": lambda: 1.0, "two": lambda: 2.0}, rounds=2, seconds=0)
    {'one': [1.0, 1.0], 'two': [2.0, 2.0]}

    Args:
        timed_calls: each returns the seconds that it took.
    """
    taken: dict[str, list[float]] = {name: [] for name in timed_calls}
    start, done = clock(), 0
    while done < rounds or (clock() - start < seconds and done < _MOST_ROUNDS):
        for name, call in timed_calls.items():
            taken[name].append(call())
        done += 1
    return taken


def medians(
    tasks: Mapping[str, Callable[[], object]],
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
    turn: float = 0.0,
) -> dict[str, float]:
    """Median seconds of each task :func:`interleaved`, after two calls of each; a turn repeats a task for about ``turn`` seconds."""
    timed_calls: dict[str, Callable[[], float]] = {}
    for name, task in tasks.items():
        seconds_of(task, repeats=2)
        repeats = 1
        if turn:
            repeats = max(1, min(_MOST_REPEATS, int(turn / max(seconds_of(task, clock), 1e-9))))
        timed_calls[name] = partial(seconds_of, task, clock, repeats)
    return {name: statistics.median(taken) for name, taken in interleaved(timed_calls, rounds, seconds=0).items()}


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Inside, torch and lowtri compute with so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The limits of the machine: the rates at which its CPU multiplies and reads, on the kernels' own threads. The kernels are imported
# where they are called: without them, or where LOWTRI_ISA names none of them, the doctor still has its say.

_REPEATS = 10_000  # about 20 ms on one core
_BLOCK = 2**16  # bytes, of the loop that reads


def packs_bf16(dtype: str) -> bool:
    """Whether this CPU multiplies the dtype in pairs; what it does not is multiplied as float32."""
    from lowtri.kernels.target import ISA

    return dtype == "bf16" and ISA.has_bf16_dot


def multiply_flops(threads: int, pairs: bool) -> int:
    """How many multiplications and additions one run of :func:`multiply` is."""
    from lowtri.kernels.abi import MULTIPLY_DEPTH, MULTIPLY_ROWS
    from lowtri.kernels.spec import QUERIES

    return 2 * MULTIPLY_ROWS * QUERIES * MULTIPLY_DEPTH * _REPEATS * threads * (2 if pairs else 1)


def multiply(threads: int, pairs: bool, repeats: int = _REPEATS) -> np.ndarray[Any, Any]:
    """Run the register block on every thread; returns the products (threads, rows, 64), so that they can be checked."""
    from lowtri.kernels import library, target
    from lowtri.kernels import threads as teams
    from lowtri.kernels.abi import MULTIPLY, MULTIPLY_DEPTH, MULTIPLY_ROWS
    from lowtri.kernels.spec import QUERIES, KernelSpec, symbol

    floats = (MULTIPLY_ROWS + QUERIES) * MULTIPLY_DEPTH + MULTIPLY_ROWS * QUERIES  # of a thread
    memory = np.empty(threads * floats + 16, np.float32)
    skip = -memory.ctypes.data // 4 % 16  # rows of 64 floats start where lines of memory do
    scratch = memory[skip : skip + threads * floats].reshape(threads, floats)
    scratch.view(np.uint32)[:] = 0x3F803F80 if pairs else 0x3F800000  # ones, in pairs or alone
    record = np.zeros(1, MULTIPLY.dtype)
    record["scratch"] = scratch.ctypes.data
    record["repeats"] = repeats
    spec = KernelSpec("bfloat16", "bf16x2", target.ISA) if pairs else KernelSpec("float32", "direct", target.ISA)
    teams.run_team(library.code(symbol("multiply", spec)), record.ctypes.data, threads)
    return scratch[:, -MULTIPLY_ROWS * QUERIES :].reshape(threads, MULTIPLY_ROWS, QUERIES)


def read(address: int, size: int, threads: int) -> float:
    """Read ``size`` bytes once, whole blocks of 64 KB only; returns their sum in float32, so that it can be checked."""
    from lowtri.kernels import library, target
    from lowtri.kernels import threads as teams
    from lowtri.kernels.abi import READ
    from lowtri.kernels.spec import KernelSpec, symbol

    tasks = size // _BLOCK
    sums = np.zeros((tasks, 16), np.float32)
    record = np.zeros(1, READ.dtype)
    record["source"] = address
    record["tasks"] = tasks
    record["block"] = _BLOCK
    record["sums"] = sums.ctypes.data
    spec = KernelSpec("float32", "direct", target.ISA)
    teams.run_team(library.code(symbol("read", spec)), record.ctypes.data, threads)
    return float(sums.sum())


# One call of attention.

OURS = "lowtri"
SDPA = "torch SDPA"
CEILING = "ceiling"


@dataclass(frozen=True)
class BenchCall:
    """One call of attention, batch 1.

    >>> BenchCall("forward", "causal", 4, 64, "float32").pairs
    10
    """

    work: str  # "forward"; or "training", forward and backward
    mask: str
    n: int  # tokens
    d: int  # head size
    dtype: str  # float32, bf16 or float16
    heads: int = 8
    kv_heads: int = 8

    unit = "GFLOP/s"

    @property
    def name(self) -> str:
        return f"{self.work} {self.mask} {self.n} D{self.d} {self.dtype}"

    @property
    def queries(self) -> int:
        return self.n

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of one head."""
        return int(np.asarray(read_mask(self.mask).pairs(self.queries, self.n)).sum())

    @property
    def amount(self) -> float:
        """The GFLOP of one run: two products of D multiplications and additions for each visible pair; five more for gradients."""
        products = 7 if self.work == "training" else 2
        return products * 2 * self.d * self.pairs * self.heads / 1e9

    def tensors(self) -> Tensors:
        """The inputs of the runs."""
        return Tensors(self)

    def limit(self, tensors: Tensors, threads: int) -> tuple[Callable[[], object], float]:
        """What shows the limit of this CPU, and the amount of its work, in GFLOP: it only multiplies."""
        pairs = packs_bf16(self.dtype)
        return partial(multiply, threads, pairs), multiply_flops(threads, pairs) / 1e9


class Tensors:
    """q, k, v, and the gradient of the output where one is needed; ``call`` gives shapes and dtype."""

    def __init__(self, call: BenchCall) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if call.dtype == "bf16" else getattr(torch, call.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        training = call.work == "training"
        self.q = normal(1, call.heads, call.queries, call.d).requires_grad_(training)  # (1, Hq, Nq, D)
        self.cache = normal(2, 1, call.kv_heads, call.n, call.d)  # keys and values
        self.kv: tuple[Any, ...] = tuple(x.requires_grad_(training) for x in self.cache)  # (1, Hkv, Nk, D) each
        self.d_output = normal(1, call.heads, call.queries, call.d) if training else None

    def next_kv(self) -> tuple[Any, ...]:
        """The keys and values of the next run."""
        return self.kv


def ours(call: BenchCall, engine: str = "cpu") -> Attend:
    """lowtri's kernels, by name, so that no other engine is measured where they cannot run; or another engine."""
    from lowtri.dispatch.attend import attention

    mask = read_mask(call.mask)
    return lambda q, k, v: attention(q, k, v, mask, engine=engine)


def run(attend: Attend, tensors: Tensors) -> torch.Tensor:
    """The output (1, Hq, Nq, D); in training the gradients are computed, too."""
    import torch

    k, v = tensors.next_kv()
    if tensors.d_output is None:
        with torch.no_grad():
            return attend(tensors.q, k, v)
    output = attend(tensors.q, k, v)
    torch.autograd.grad(output, (tensors.q, k, v), tensors.d_output)
    return output.detach()


def timed(attend: Attend, tensors: Tensors, clock: Clock = time.perf_counter) -> float:
    """Seconds of one :func:`run`."""
    return seconds_of(lambda: run(attend, tensors), clock)


# The table of `lowtri bench`.

_SHAPES = [("forward", "causal", 4096), ("forward", "window(256)", 4096), ("training", "causal", 2048)]
CALLS = [BenchCall(work, mask, n, 64, dtype) for work, mask, n in _SHAPES for dtype in ("float32", "bf16")]
_ALLOWED = {"float32": 1e-4, "bf16": 6e-2, "float16": 1e-2}  # the difference of two correct outputs of order 1
_MOST_PAIRS = 2**26  # of a boolean mask, which torch converts to floats
_LONGEST = 5.0  # seconds; an implementation that takes longer for one run is left out


def sdpa(call: BenchCall, most_pairs: int = _MOST_PAIRS) -> Attend | str:
    """torch's function: ``is_causal=True`` where the mask is causal, a boolean table, made here, for every other mask."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    options: dict[str, Any] = {"enable_gqa": True} if call.heads != call.kv_heads else {}
    if needs_table(call):
        pairs = call.queries * call.n
        if pairs > most_pairs:
            return f"its table of bools would hold {pairs / 1e6:,.0f} million pairs"
        options["attn_mask"] = torch.from_numpy(read_mask(call.mask).dense(call.queries, call.n).copy())  # (Nq, Nk)
    elif call.mask == "causal" and call.queries == call.n:  # the newest query sees the whole cache
        options["is_causal"] = True
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def needs_table(call: BenchCall) -> bool:
    """Whether torch's function has no argument for the mask."""
    return call.mask not in ("causal", "full")


class TimedElsewhere:
    """An implementation that runs in another process, which times it; its seconds are NaN when that process has ended."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self.seconds = seconds


Peer = Callable[[BenchCall], Attend | TimedElsewhere | str]  # made once for a call; or the reason why it cannot run


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


@dataclass(frozen=True)
class Figure:
    """One implementation's figures for one call; ``why_not`` where it could not run."""

    seconds: float = 0.0  # the median
    runs: int = 0
    rate: float = 0.0  # in the call's unit
    why_not: str | None = None


@dataclass(frozen=True)
class Row:
    """One call with all its figures."""

    call: BenchCall
    ceiling: float  # in the call's unit
    figures: dict[str, Figure]

    @property
    def share(self) -> float:
        """The share of the ceiling that lowtri reaches."""
        return self.figures[OURS].rate / self.ceiling

    def times(self, name: str) -> float | None:
        """How many times faster lowtri is."""
        other = self.figures.get(name)
        return other.seconds / self.figures[OURS].seconds if other and other.why_not is None else None


def measure(
    calls: Sequence[BenchCall],
    peers: Mapping[str, Peer] = MappingProxyType({SDPA: sdpa}),
    threads: int = 1,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """A row for each call.

    Args:
        peers: what to measure besides lowtri.
        progress: takes a line about what comes next.

    Raises:
        UndecidedError: if lowtri and another implementation give different outputs; nothing is timed then.
    """
    with torch_threads(threads):
        for number, call in enumerate(calls, 1):
            progress(f"{number}/{len(calls)}  {call.name}")
            yield _row(call, {OURS: ours, **peers}, threads, rounds)


def _row(call: BenchCall, peers: Mapping[str, Peer], threads: int, rounds: int) -> Row:
    tensors = call.tensors()
    limit, amount = call.limit(tensors, threads)
    limit()
    timed_calls: dict[str, Callable[[], float]] = {}
    figures = dict.fromkeys(peers, Figure())
    outputs: dict[str, torch.Tensor] = {}
    for name, peer in peers.items():
        ready = _first_run(call, name, peer, tensors, outputs)
        if isinstance(ready, str):
            figures[name] = Figure(why_not=ready)
        else:
            timed_calls[name] = ready
    taken = interleaved({**timed_calls, CEILING: partial(seconds_of, limit)}, rounds)
    for name in timed_calls:
        median = statistics.median(taken[name])
        if median > 0:
            figures[name] = Figure(median, len(taken[name]), call.amount / median)
        else:  # NaN from another process
            figures[name] = Figure(why_not="its process ended")
    return Row(call, amount / statistics.median(taken[CEILING]), figures)


def _first_run(
    call: BenchCall, name: str, peer: Peer, tensors: Tensors, outputs: dict[str, torch.Tensor]
) -> Callable[[], float] | str:
    """The timed call of an implementation, warmed up, with its output checked; or why it cannot run. lowtri's errors are raised."""
    try:
        attend = peer(call)
        if isinstance(attend, str):
            return attend
        if isinstance(attend, TimedElsewhere):
            return attend.seconds
        timed_call, start = partial(timed, attend, tensors), time.perf_counter()
        output = run(attend, tensors)
        if name != OURS and time.perf_counter() - start > _LONGEST:
            seconds = timed_call()  # what was compiled in the first run is ready in the second
            if seconds > _LONGEST:
                return f"one run takes {seconds:.1f} s"
    except Exception as error:
        if name == OURS:
            raise
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:100]}"
    outputs[name] = output
    check_equal(call.name, name, output, outputs[OURS], call.dtype)
    return timed_call


def as_text(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The table, with what could not be measured below it."""
    names = [name for name in (rows[0].figures if rows else {}) if name != OURS]
    table = [("case", "", OURS, "share", *(heading for name in names for heading in (name, "x")))]
    missing: dict[str, list[str]] = {}
    for row in rows:
        cells = [row.call.name, row.call.unit, _short(row.figures[OURS].rate), f"{row.share:.0%}"]
        for name in names:
            figure, times = row.figures[name], row.times(name)
            if times is None:
                missing.setdefault(f"{name}: not measured: {figure.why_not}", []).append(row.call.name)
                cells += ["-", ""]
            else:
                cells += [_short(figure.rate), f"{times:.1f}"]
        table.append((*cells,))
    head, rule, *body = ruled(table)
    works = groupby(zip(rows, body, strict=True), lambda pair: pair[0].call.work)
    sections = ["\n".join(line for _, line in section) for _, section in works]
    return "\n".join(
        [
            *(headline(facts), "", head, rule, "\n\n".join(sections), ""),
            f"{OURS}: the median rate, on visible pairs alone. share: of the limit of this CPU, measured in the same rounds.",
            "x: how many times faster lowtri is. training: forward + backward.",
            *(f"{words} ({', '.join(calls)})" for words, calls in missing.items()),
        ]
    )


def _short(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def as_json(rows: Sequence[Row], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured: ``rate`` and ``ceiling`` in the row's unit, seconds; only ``why_not`` where nothing was."""
    return {**facts, "rows": [_row_json(row) for row in rows]}


def _row_json(row: Row) -> dict[str, Any]:
    names = ("mask", "work", "n", "d", "dtype", "heads", "kv_heads", "pairs", "unit")
    figures = {
        name: asdict(figure) if figure.why_not is None else {"why_not": figure.why_not}
        for name, figure in row.figures.items()
    }
    call = {"case": row.call.name, **{name: getattr(row.call, name) for name in names}}
    return {**call, "ceiling": row.ceiling, "share": row.share, "figures": figures}
