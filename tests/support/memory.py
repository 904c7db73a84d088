"""The memory of a process and of a function."""

from __future__ import annotations

import json
import resource
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["peak_of_arrays", "peak_of_process"]


def peak_of_process() -> int:
    """The most bytes that this process has occupied."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of_arrays(function: Callable[[], object]) -> int:
    """The most bytes that the tensors and arrays made by a function have at a time, from what torch and NumPy ask for.

    What the process occupies says less: freed memory goes back when the allocator pleases, and differs from run to run.
    The peaks of torch and NumPy are added, so that the sum is never too small.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    tracemalloc.start()
    try:
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            function()
        of_numpy = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    now = of_torch = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"])):
        now += event["args"]["Bytes"]
        of_torch = max(of_torch, now)
    assert of_torch > 0
    return of_torch + of_numpy
