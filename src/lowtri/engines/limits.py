"""What cannot fit into this machine's memory is refused before anything is computed."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from lowtri.errors import CallError
from lowtri.ops.call import Call

__all__ = ["check_weights"]


def check_weights(call: Call) -> None:
    """The weights fit into this machine's memory: refused before anything is computed."""
    (rows, heads, nq, _), nk = call.q.shape, call.k.shape[2]
    size, has = rows * heads * nq * nk * call.q.dtype.itemsize, _memory_bytes()
    if call.device == "cpu" and has is not None and size > has:
        raise CallError(
            f"attention: return_weights=True makes an array {(rows, heads, nq, nk)} of {call.dtype}: {size / 2**30:,.0f} GiB, and this "
            f"machine has {has / 2**30:,.0f} GiB.\n"
            "Fix: ask for some queries at a time, attention(q[..., a:b, :], k, v, mask, q_positions=range(a, b), return_weights=True)."
        )


@cache
def _memory_bytes() -> int | None:
    """The memory that this process may use at most; None where the system does not say."""
    try:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a Unix
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:  # no control groups
        return has
    return min(has, int(limit)) if limit.isdigit() else has
