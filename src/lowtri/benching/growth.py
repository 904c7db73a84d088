"""Time and memory against length, from 512 to 131,072 tokens: lowtri and torch in turns, for ``lowtri bench --plot``.

A line ends where one run would take too long, or where torch's table of pairs would not fit into memory; the reason is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lowtri.benching.measure import ALLOWED, in_turns
from lowtri.benching.memory import available_bytes, peak_bytes
from lowtri.benching.peers import OURS, SDPA, Attend
from lowtri.benching.runs import torch_threads
from lowtri.dispatch.attend import attention
from lowtri.errors import UndecidedError
from lowtri.masks import Mask
from lowtri.masks import mask as read_mask

__all__ = [
    "DTYPES",
    "HEAD_SIZE",
    "LENGTHS",
    "MASKS",
    "QUICK",
    "Line",
    "Point",
    "as_json",
    "as_text",
    "grow",
    "mask_text",
]

MASKS = ("causal", "window", "documents")
DTYPES = ("float32", "bf16", "float16")
LENGTHS = tuple(2**power for power in range(9, 18))  # 512 .. 131,072
QUICK = (512, 1024)
HEAD_SIZE = 64  # of one head: every head costs the same
WINDOW, DOCUMENT = 256, 512  # tokens

_LONGEST = 30.0  # seconds; a run that would take longer ends its line
_ROUNDS, _FEW_ROUNDS, _SLOW = 7, 3, 1.0  # fewer turns, with the first, where a turn takes more than a second


@dataclass(frozen=True)
class Point:
    """One length."""

    n: int
    seconds: float  # the median of the turns
    bytes: int | None  # beyond the inputs, at the peak of a first call; None where the system does not say


@dataclass
class Line:
    """One implementation under one mask."""

    mask: str
    name: str
    points: list[Point] = field(default_factory=list)
    ended: str | None = None  # why there is no longer length

    def seconds_at(self, n: int) -> float:
        """What a run over ``n`` tokens would take if its time grew with the square of the length."""
        return self.points[-1].seconds * (n / self.points[-1].n) ** 2 if self.points else 0.0


def mask_text(who: str, n: int) -> str:
    """The mask over ``n`` tokens, as text.

    >>> mask_text("documents", 1024)
    'causal & documents(lengths=[512, 512])'
    """
    documents = f"causal & documents(lengths={[DOCUMENT] * (n // DOCUMENT)})"
    return {"window": f"window({WINDOW})", "documents": documents}.get(who, who)


def grow(
    dtype: str = "float32",
    threads: int = 1,
    lengths: Sequence[int] = LENGTHS,
    longest: float = _LONGEST,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Line]:
    """The lines of lowtri and of torch for each mask: batch 1, one head.

    One thread is timed in CPU time, several by the clock, since the threads of an OpenMP team spin while they wait.

    Args:
        dtype: one of ``DTYPES``.
        lengths: multiples of 512, in growing order.
        longest: seconds; an implementation whose next run would take longer, by the square of the length, ends there.
        say: takes a line about each length.

    Raises:
        UndecidedError: if the two give different outputs; nothing is timed then.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    with torch_threads(threads):
        for who in MASKS:
            lines = [Line(who, name) for name in (OURS, SDPA)]
            _check(who, lengths[0], dtype)  # compiles as well, and starts the threads
            for n in lengths:
                _extend(lines, n, dtype, longest, clock)
                last = [line.points[-1] for line in lines if line.points and line.points[-1].n == n]
                say(f"{who} {n:,} tokens: " + ", ".join(f"{point.seconds * 1e3:,.2f} ms" for point in last))
            yield from lines


def _check(who: str, n: int, dtype: str) -> None:
    """Raise if lowtri and torch give different outputs: a wrong answer has no speed."""
    mask, inputs = read_mask(mask_text(who, n)), _inputs(n, dtype)
    difference = float((_ours(mask)(*inputs).float() - _torch(mask, n, who != "causal")(*inputs).float()).abs().max())
    if not difference <= ALLOWED[dtype]:
        raise UndecidedError(
            f"bench: {who}, {n:,} tokens: {OURS} and {SDPA} differ by {difference:.2g}, more than {ALLOWED[dtype]:.0e}.\n"
            "Nothing is timed: a wrong answer has no speed."
        )


def _inputs(n: int, dtype: str) -> torch.Tensor:
    kind = torch.bfloat16 if dtype == "bf16" else getattr(torch, dtype)
    return torch.randn(3, 1, 1, n, HEAD_SIZE, generator=torch.Generator().manual_seed(n)).to(kind)  # q, k and v


def _extend(lines: Sequence[Line], n: int, dtype: str, longest: float, clock: Callable[[], float]) -> None:
    """Add a point to every line that does not end before ``n``."""
    mask, inputs = read_mask(mask_text(lines[0].mask, n)), _inputs(n, dtype)
    runs: dict[str, Callable[[], float]] = {}
    peaks: dict[str, int | None] = {}
    first: dict[str, float] = {}
    for line in lines:
        line.ended = line.ended or _reason_to_end(line, n, longest)
        if line.ended:
            continue
        table_bytes = 0 if line.name == OURS or line.mask == "causal" else n * n
        attend = _ours(mask) if line.name == OURS else _torch(mask, n, bool(table_bytes))
        runs[line.name] = partial(_timed, attend, inputs, clock)
        start = clock()
        peak = peak_bytes(runs[line.name])
        first[line.name] = clock() - start
        peaks[line.name] = None if peak is None else peak + table_bytes
    slow = sum(first.values()) > _SLOW
    taken = in_turns(runs, _FEW_ROUNDS - 1 if slow else _ROUNDS, 0)
    for name in taken if slow else ():
        taken[name].append(first[name])
    for line in lines:
        if line.name in taken:
            line.points.append(Point(n, statistics.median(taken[line.name]), peaks[line.name]))


def _reason_to_end(line: Line, n: int, longest: float) -> str | None:
    seconds = line.seconds_at(n)
    if seconds > longest:
        return f"{n:,} tokens would take about {seconds:,.0f} s"
    table_bytes = n * n * (1 + 4)  # bools, and the floats that torch makes of them
    if line.name == SDPA and line.mask != "causal" and table_bytes > available_bytes() / 2:
        return f"for {n:,} tokens its table takes {table_bytes / 1e9:,.3g} GB"
    return None


def _ours(mask: Mask) -> Attend:
    return lambda q, k, v: attention(q, k, v, mask, engine="cpu")


def _torch(mask: Mask, n: int, table: bool) -> Attend:
    """``is_causal=True``, or a boolean table that is made before anything is timed."""
    options: dict[str, Any] = {"attn_mask": torch.from_numpy(mask.dense(n).copy())} if table else {"is_causal": True}
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)


def _timed(attend: Attend, inputs: torch.Tensor, clock: Callable[[], float]) -> float:
    with torch.no_grad():
        start = clock()
        attend(*inputs)
        return clock() - start


def as_text(lines: Sequence[Line]) -> str:
    """A table for each mask: milliseconds, and MB beyond the inputs; below it, why lines end."""
    text: list[str] = []
    for who in dict.fromkeys(line.mask for line in lines):
        chosen = [line for line in lines if line.mask == who]
        text += [f"{who:<12}" + "".join(f"{f'{line.name}: ms':>20}{'MB':>10}" for line in chosen)]
        for point in max((line.points for line in chosen), key=len):
            cells = [next((one for one in line.points if one.n == point.n), None) for line in chosen]
            text += [f"{point.n:>12,}" + "".join(map(_cell, cells))]
        text += [*(f"{line.name} ends: {line.ended}" for line in chosen if line.ended), ""]
    return "\n".join(text)


def _cell(point: Point | None) -> str:
    if point is None:
        return f"{'-':>20}{'-':>10}"
    return f"{point.seconds * 1e3:>20,.2f}" + f"{'-' if point.bytes is None else f'{point.bytes / 1e6:,.1f}':>10}"


def as_json(lines: Sequence[Line], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, in seconds and bytes."""
    return {**facts, "heads": 1, "head_size": HEAD_SIZE, "lines": [asdict(line) for line in lines]}
