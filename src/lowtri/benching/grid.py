"""The calls of ``lowtri bench --never-slower``: every dtype, size, kind of mask and number of threads, as a user would write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PLAIN", "TABLED", "GridCall", "grid"]

Work = Literal["forward", "training", "decode"]

PLAIN = ("causal", "full")  # torch's function has an argument for them, or needs none
TABLED = ("window", "documents", "prefix", "sinks")  # torch's function gets a table of bools

_DTYPES = ("float32", "bf16", "float16")
_LENGTHS = tuple(2**power for power in range(4, 12))  # 16 .. 2048
_CACHES = tuple(2**power for power in range(6, 14))  # 64 .. 8192
_QUICK_LENGTHS, _QUICK_CACHES = (16, 64), (64,)


@dataclass(frozen=True)
class GridCall:
    """One call: batch 1, as many key/value heads as query heads.

    >>> GridCall("forward", "sinks", 64, "bf16", 1).mask
    'causal & (window(16) | first(4))'
    """

    work: Work  # training is forward and backward; decode is one query against a cache
    who: str
    n: int  # keys; and queries, unless it is decode
    dtype: str
    threads: int
    heads: int = 4
    d: int = 64

    @property
    def name(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.work} {self.who} {self.n} {self.dtype} {threads}"

    @property
    def queries(self) -> int:
        return 1 if self.work == "decode" else self.n

    @property
    def mask(self) -> str:
        """The mask as text; windows, documents and prefixes are a quarter of the tokens long."""
        part = max(4, self.n // 4)
        lengths = [part] * (self.n // part)
        return {
            "window": f"window({part})",
            "documents": f"causal & documents(lengths={lengths})",
            "prefix": f"causal | first({part})",
            "sinks": f"causal & (window({part}) | first(4))",
        }.get(self.who, self.who)


def grid(quick: bool = False, threads: tuple[int, ...] = (1, 2)) -> list[GridCall]:
    """All calls; or the ``quick`` part, which takes some seconds.

    >>> len(grid()), len(grid(quick=True))
    (720, 39)
    """
    lengths, caches = (_QUICK_LENGTHS, _QUICK_CACHES) if quick else (_LENGTHS, _CACHES)
    calls: list[GridCall] = []
    for count in threads[:1] if quick else threads:
        for masks in (PLAIN, TABLED[:1] if quick else TABLED):
            for dtype in _DTYPES:
                for who in masks:
                    works: tuple[Work, ...] = ("forward", "training")
                    calls += [GridCall(work, who, n, dtype, count) for work in works for n in lengths]
                if masks is PLAIN or not quick:
                    # One query sees the whole cache under "causal" and "full" alike.
                    decoded = ("causal",) if masks is PLAIN else ("window", "sinks")
                    calls += [GridCall("decode", who, n, dtype, count) for who in decoded for n in caches]
    return calls
