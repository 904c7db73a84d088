"""Rejects results that cannot fit into this machine's memory before anything is computed."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

from lowtri.errors import CallError

__all__ = ["check_weights"]


def check_weights(shape: tuple[int, int, int, int], itemsize: int, dtype: str) -> None:
    """Raise a CallError if the weights (B, Hq, Nq, Nk) do not fit into this machine's memory."""
    size, available = math.prod(shape) * itemsize, _memory_bytes()
    if available is not None and size > available:
        raise CallError(
            f"attention: return_weights=True makes an array {shape} of {dtype}: {size / 2**30:,.0f} GiB, and this machine has "
            f"{available / 2**30:,.0f} GiB.\n"
            "Fix: a part of the queries at a time, attention(q[..., a:b, :], k, v, mask, q_positions=range(a, b), return_weights=True)."
        )


@cache
def _memory_bytes() -> int | None:
    """The memory that this process may use at most; None where the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a Unix
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:  # no control groups
        return total
    return min(total, int(limit)) if limit.isdigit() else total
