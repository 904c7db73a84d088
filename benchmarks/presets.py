"""Presets of calls of attention, beyond those of `lowtri bench`.

``TABLE``   the rows of `python benchmarks/attention.py`; ``SHORT`` are the main ones
``growing`` a call of `python benchmarks/growth.py`, of any length
``grid``    the calls of `python benchmarks/never_slower.py`: every dtype, size, kind of mask and number of threads
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lowtri.benching import BenchCall, Tensors, read
from lowtri.errors import DataError
from lowtri.system import last_cache_bytes

BYTES = {"float32": 4, "bf16": 2, "float16": 2}
WINDOW = 256  # tokens
DOCUMENT = 512
PLAIN = ("causal", "full")  # torch's function has an argument for them, or needs none
TABLED = ("window", "documents", "prefix", "sinks")  # torch's function gets a table of bools
_MOST_CACHES = 2**31  # bytes of rotating caches, at most


class RotatingCaches(Tensors):
    """Several copies of the keys and values, of which each run reads the next."""

    def __init__(self, call: BenchCall, copies: int) -> None:
        super().__init__(call)
        caches = [self.cache] + [self.cache.clone() for _ in range(copies - 1)]
        self.copies = [tuple(cache) for cache in caches]
        self._turns = itertools.cycle(self.copies)

    def next_kv(self) -> tuple[Any, ...]:
        return next(self._turns)


@dataclass(frozen=True)
class PresetCall(BenchCall):
    """A call whose mask has a short name, or that decodes: one query against a cache."""

    label: str = ""  # of the mask
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.work} {self.label} {self.n} D{self.d} {self.dtype}"

    @property
    def queries(self) -> int:
        return 1 if self.work == "decode" else self.n

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values."""
        return 2 * self.kv_heads * self.n * self.d * BYTES[self.dtype]

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Decoding is memory-bound, everything else compute-bound."""
        return "GB/s" if self.work == "decode" else "GFLOP/s"

    @property
    def amount(self) -> float:
        """The GB that a decoding call reads; else GFLOP."""
        return self.cache_bytes / 1e9 if self.work == "decode" else super().amount

    def tensors(self) -> Tensors:
        """The inputs. Caches are together four times as large as the CPU's last-level cache, so that each is read from memory."""
        copies = 1
        if self.work == "decode":
            needed = math.ceil(4 * last_cache_bytes() / self.cache_bytes)
            copies = max(1, min(needed, _MOST_CACHES // self.cache_bytes))
        return RotatingCaches(self, copies) if copies > 1 else Tensors(self)

    def limit(self, tensors: Tensors, threads: int) -> tuple[Callable[[], object], float]:
        """What only reads, where the call decodes; else what only multiplies."""
        if self.work != "decode":
            return super().limit(tensors, threads)
        return lambda: read(tensors.next_kv()[0].data_ptr(), self.cache_bytes, threads), self.amount


def mask_text(label: str, n: int, part: int = 0) -> str:
    """The mask that a label names, over ``n`` tokens.

    >>> mask_text("sinks", 64, 16)
    'causal & (window(16) | first(4))'
    >>> mask_text("documents", 1024, 512)
    'causal & documents(lengths=[512, 512])'

    Args:
        part: tokens of a window, a document or a prefix; 0: a window of 256, eight documents.
    """
    size = part or WINDOW
    texts = {
        "window": f"window({size})",
        "documents": f"causal & documents(lengths={document_lengths(n, part)})",
        "prefix": f"causal | first({size})",
        "sinks": f"causal & (window({size}) | first(4))",
    }
    return texts.get(label, label)


def document_lengths(n: int, part: int = 0) -> list[int]:
    """The lengths of the documents: equal, with the rest in the last."""
    each = part or max(1, n // 8)
    count = max(1, n // each)
    return [each] * (count - 1) + [n - each * (count - 1)]


def preset(work: str, label: str, n: int, d: int, dtype: str, heads: int = 8, kv_heads: int = 8) -> PresetCall:
    """A call by the label of its mask."""
    return PresetCall(work, mask_text(label, n), n, d, dtype, heads, kv_heads, label)


def _table() -> list[PresetCall]:
    calls = [preset("forward", "causal", n, 64, t) for n in (512, 1024, 2048, 4096) for t in ("float32", "bf16")]
    calls += [preset("forward", "causal", 2048, 128, t) for t in BYTES]
    calls += [preset("forward", "causal", 4096, 64, "float16")]
    calls += [preset("forward", "full", 2048, d, t) for d in (64, 128) for t in ("float32", "bf16")]
    calls += [preset("forward", "documents", 4096, 64, t) for t in BYTES]
    calls += [preset("forward", "window", 4096, 64, "float16")]
    lengths = [2**power for power in range(9, 17)]
    calls += [preset("forward", "window", n, 64, t) for t in ("float32", "bf16") for n in lengths]
    calls += [preset("training", "causal", 2048, d, t) for d in (64, 128) for t in ("float32", "bf16")]
    calls += [preset("training", label, 4096, 64, t) for label in ("window", "documents") for t in ("float32", "bf16")]
    return calls + [preset("decode", "causal", 4096, 128, t, 32, 8) for t in ("float32", "bf16")]


TABLE = _table()
_SHORT_NAMES = {
    *("forward causal 1024 D64 float32", "forward causal 4096 D64 float32", "forward causal 4096 D64 bf16"),
    *("forward window 4096 D64 float32", "forward window 4096 D64 bf16", "forward documents 4096 D64 float32"),
    *("training causal 2048 D64 float32", "decode causal 4096 D128 float32", "decode causal 4096 D128 bf16"),
}
SHORT = [call for call in TABLE if call.name in _SHORT_NAMES]


def choose(full: bool = False, words: Sequence[str] = ()) -> list[PresetCall]:
    """The short table, the full one, or the calls of the full one whose names have all the words of one of ``words``.

    >>> [call.name for call in choose(words=["decode bf16"])]
    ['decode causal 4096 D128 bf16']

    Raises:
        DataError: if words fit no call.
    """
    if not words:
        return TABLE if full else SHORT
    chosen: list[PresetCall] = []
    for text in words:
        wanted = text.lower().split()
        matching = [call for call in TABLE if set(wanted) <= set(call.name.lower().split())]
        if not (wanted and matching):
            raise DataError(_no_such_call(text, wanted))
        chosen += matching
    return [call for call in TABLE if call in chosen]


def _no_such_call(text: str, words: Sequence[str]) -> str:
    known = list(dict.fromkeys(word.lower() for call in TABLE for word in call.name.split()))
    unknown = [word for word in words if word not in known]
    similar = difflib.get_close_matches(unknown[0], known, 1) if unknown else []
    hint = f" Did you mean {similar[0]!r}?" if similar else ""
    return f"no case is named by --case {text!r}.{hint} Fix: words of {', '.join(known)}."


def growing(label: str, n: int, dtype: str) -> PresetCall:
    """The call of ``n`` tokens of one head, whose window or documents stay as long as they are."""
    part = DOCUMENT if label == "documents" else WINDOW
    return PresetCall("forward", mask_text(label, n, part), n, 64, dtype, 1, 1, label)


def grid(quick: bool = False, threads: Sequence[int] = (1, 2)) -> list[PresetCall]:
    """All calls, of four heads; windows, documents and prefixes are a quarter of the tokens long. ``quick`` takes some seconds.

    >>> len(grid()), len(grid(quick=True))
    (720, 39)
    """
    lengths = [2**p for p in range(4, 12)]
    caches = [2**p for p in range(6, 14)]
    tabled = TABLED
    if quick:
        lengths = [16, 64]
        caches = [64]
        threads = threads[:1]
        tabled = TABLED[:1]
    calls: list[PresetCall] = []
    for count in threads:
        for labels in (PLAIN, tabled):
            decoded: tuple[str, ...] = ()
            if labels is PLAIN:
                decoded = ("causal",)  # one query sees the whole cache under "causal" and "full" alike
            elif not quick:
                decoded = ("window", "sinks")
            sizes = [(work, label, n) for label in labels for work in ("forward", "training") for n in lengths]
            sizes += [("decode", label, n) for label in decoded for n in caches]
            for dtype in BYTES:
                for work, label, n in sizes:
                    mask = mask_text(label, n, max(4, n // 4))
                    calls.append(PresetCall(work, mask, n, 64, dtype, 4, 4, label, count))
    return calls
