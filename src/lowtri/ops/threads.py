"""The number of threads that a call may use."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from lowtri.system import fast_cpus


def thread_count(is_numpy: bool) -> int:
    """torch's own setting where torch is in use, else ``OMP_NUM_THREADS``, else the CPUs that this process may use.

    >>> thread_count(is_numpy=True) >= 1
    True
    """
    torch = sys.modules.get("torch")
    if torch is not None and not is_numpy:
        return int(torch.get_num_threads())
    return _available()


@cache
def _available() -> int:
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return max(1, min(fast_cpus(), _quota()))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> int:
    """The CPUs that a container's quota allows (cgroup v2, then v1), rounded up; a large number where there is none."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in files).split()
            if int(quota) > 0:
                return -(-int(quota) // int(period))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return 2**16
