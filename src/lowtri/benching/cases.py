"""What is measured: one call of attention, a :class:`Case`; and three presets of cases.

``choose``  the table of ``lowtri bench``
``growing`` a case of ``lowtri bench --plot``, of any length
``grid``    the calls of ``lowtri bench --never-slower``: every dtype, size, kind of mask and number of threads
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from lowtri.errors import DataError
from lowtri.masks import mask as read_mask

Work = Literal["forward", "training", "decode"]

BYTES = {"float32": 4, "bf16": 2, "float16": 2}
WINDOW, DOCUMENT = 256, 512  # tokens, where a case does not say otherwise
PLAIN = ("causal", "full")  # torch's function has an argument for them, or needs none
TABLED = ("window", "documents", "prefix", "sinks")  # torch's function gets a table of bools


@dataclass(frozen=True)
class Case:
    """One call of attention, batch 1.

    >>> Case("forward", "causal", 4, 64, "float32").pairs
    10
    >>> Case("forward", "sinks", 64, 64, "bf16", part=16).mask
    'causal & (window(16) | first(4))'
    """

    work: Work  # training is forward and backward; decode is one query against a cache
    mask_name: str  # one of PLAIN or TABLED
    n: int  # keys; and queries, unless it is decode
    d: int  # head size
    dtype: str
    heads: int = 8
    kv_heads: int = 8
    part: int = 0  # tokens of a window, a document or a prefix; 0: a window of 256, eight documents
    threads: int = 1  # where the preset varies them

    @property
    def name(self) -> str:
        return f"{self.work} {self.mask_name} {self.n} D{self.d} {self.dtype}"

    @property
    def short(self) -> bool:
        """Whether it is in the short table."""
        return self.name in _SHORT

    @property
    def mask(self) -> str:
        """The mask, as text."""
        part = self.part or WINDOW
        texts = {
            "window": f"window({part})",
            "documents": f"causal & documents(lengths={self.lengths})",
            "prefix": f"causal | first({part})",
            "sinks": f"causal & (window({part}) | first(4))",
        }
        return texts.get(self.mask_name, self.mask_name)

    @property
    def lengths(self) -> list[int]:
        """The lengths of the documents: equal, with the rest in the last."""
        each = self.part or max(1, self.n // 8)
        count = max(1, self.n // each)
        return [each] * (count - 1) + [self.n - each * (count - 1)]

    @property
    def queries(self) -> int:
        return 1 if self.work == "decode" else self.n

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of one head."""
        return int(np.asarray(read_mask(self.mask).pairs(self.queries, self.n)).sum())

    @property
    def flops(self) -> float:
        """Two products of D multiplications and additions for each visible pair; five more for the gradients."""
        return (3.5 if self.work == "training" else 1) * 4 * self.d * self.pairs * self.heads

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values."""
        return 2 * self.kv_heads * self.n * self.d * BYTES[self.dtype]

    @property
    def unit(self) -> str:
        """Decoding is memory-bound, everything else compute-bound."""
        return "GB/s" if self.work == "decode" else "GFLOP/s"

    @property
    def amount(self) -> float:
        """The work of one run: GB or GFLOP."""
        return (self.cache_bytes if self.work == "decode" else self.flops) / 1e9


_SHORT = {
    *("forward causal 1024 D64 float32", "forward causal 4096 D64 float32", "forward causal 4096 D64 bf16"),
    *("forward window 4096 D64 float32", "forward window 4096 D64 bf16", "forward documents 4096 D64 float32"),
    *("training causal 2048 D64 float32", "decode causal 4096 D128 float32", "decode causal 4096 D128 bf16"),
}


def _table() -> list[Case]:
    cases = [Case("forward", "causal", n, 64, t) for n in (512, 1024, 2048, 4096) for t in ("float32", "bf16")]
    cases += [Case("forward", "causal", 2048, 128, t) for t in BYTES]
    cases += [Case("forward", "causal", 4096, 64, "float16")]
    cases += [Case("forward", "full", 2048, d, t) for d in (64, 128) for t in ("float32", "bf16")]
    cases += [Case("forward", "documents", 4096, 64, t) for t in BYTES]
    cases += [Case("forward", "window", 4096, 64, "float16")]
    lengths = [2**power for power in range(9, 17)]
    cases += [Case("forward", "window", n, 64, t) for t in ("float32", "bf16") for n in lengths]
    cases += [Case("training", "causal", 2048, d, t) for d in (64, 128) for t in ("float32", "bf16")]
    cases += [Case("training", who, 4096, 64, t) for who in ("window", "documents") for t in ("float32", "bf16")]
    return cases + [Case("decode", "causal", 4096, 128, t, heads=32, kv_heads=8) for t in ("float32", "bf16")]


CASES = _table()


def choose(full: bool = False, words: Sequence[str] = ()) -> list[Case]:
    """The short table, the full one, or the cases of the full one whose names have all the words of one of ``words``.

    >>> [case.name for case in choose(words=["decode bf16"])]
    ['decode causal 4096 D128 bf16']

    Raises:
        DataError: if a filter fits no case.
    """
    if not words:
        return [case for case in CASES if full or case.short]
    chosen: list[Case] = []
    for text in words:
        words_of_text = text.lower().split()
        matching = [case for case in CASES if set(words_of_text) <= set(case.name.lower().split())]
        if not (words_of_text and matching):
            raise DataError(_no_such_case(text, words_of_text))
        chosen += matching
    return [case for case in CASES if case in chosen]


def _no_such_case(text: str, words: Sequence[str]) -> str:
    known = list(dict.fromkeys(word.lower() for case in CASES for word in case.name.split()))
    unknown = [word for word in words if word not in known]
    similar = difflib.get_close_matches(unknown[0], known, 1) if unknown else []
    hint = f" Did you mean {similar[0]!r}?" if similar else ""
    return f"bench: no case is named by --case {text!r}.{hint} Fix: words of {', '.join(known)}."


def growing(who: str, n: int, dtype: str) -> Case:
    """The case of ``n`` tokens of one head, whose window or documents stay as long as they are.

    >>> growing("documents", 1024, "float32").mask
    'causal & documents(lengths=[512, 512])'
    """
    return Case("forward", who, n, 64, dtype, heads=1, kv_heads=1, part=DOCUMENT if who == "documents" else WINDOW)


def grid(quick: bool = False, threads: Sequence[int] = (1, 2)) -> list[Case]:
    """All calls, of four heads; windows, documents and prefixes are a quarter of the tokens long. ``quick`` takes some seconds.

    >>> len(grid()), len(grid(quick=True))
    (720, 39)
    """
    lengths, caches = ((16, 64), (64,)) if quick else ([2**p for p in range(4, 12)], [2**p for p in range(6, 14)])
    cases: list[Case] = []
    for count in threads[:1] if quick else threads:
        for masks in (PLAIN, TABLED[:1] if quick else TABLED):
            for dtype in BYTES:
                works: tuple[Work, ...] = ("forward", "training")
                calls = [(work, who, n) for who in masks for work in works for n in lengths]
                if masks is PLAIN or not quick:
                    # One query sees the whole cache under "causal" and "full" alike.
                    decoded = ("causal",) if masks is PLAIN else ("window", "sinks")
                    calls += [("decode", who, n) for who in decoded for n in caches]
                cases += [
                    Case(work, who, n, 64, dtype, 4, 4, part=max(4, n // 4), threads=count) for work, who, n in calls
                ]
    return cases
