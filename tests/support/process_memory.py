"""The memory of this process, so that a test sees what leaks."""

from __future__ import annotations

import resource


def peak_of_process() -> int:
    """The most bytes that this process has occupied."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
