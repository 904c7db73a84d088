"""How many files an engineer reads to follow ``q`` from ``lowtri.attention`` to the kernel: counted while a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import lowtri
from lowtri.dispatch.prepared import PREPARED

SOURCE = Path(lowtri.__file__).parent


def files_that_get(q: torch.Tensor, engine: str) -> list[str]:
    """The files with a function that gets q, or its address, as an argument or in one; in the order of the calls."""
    files: list[str] = []

    def is_q(x: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return x.data_ptr() == q.data_ptr()
        return x == q.data_ptr() if type(x) is int else False

    def look(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(SOURCE):
            return
        values = list(frame.f_locals.values())  # at its call a function has no locals but its arguments
        for x in tuple(values):
            values += x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else ()
        name = path.relative_to(SOURCE).as_posix()
        if name not in files and any(map(is_q, values)):
            files.append(name)

    PREPARED.clear()
    sys.setprofile(look)
    try:
        lowtri.attention(q, q.clone(), q.clone(), "causal", engine=engine)
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.parametrize("engine", ["cpu", "sdpa", "formula", "reference"])
def test_q_passes_through_few_files(engine: str) -> None:
    q = torch.randn(1, 8, 64, 64)
    for leaf in (q, q.clone().requires_grad_()):
        files = files_that_get(leaf, engine)
        assert files[0] == "dispatch/attend.py" and files[-1].startswith(f"backends/{engine}"), files
        assert len(files) <= 13, files  # and the kernel itself


def files_that_run(function: Callable[[], object]) -> list[str]:
    """The files of which any function runs, in the order of the first."""
    files: list[str] = []

    def look(frame: FrameType, *_: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and (name := path.relative_to(SOURCE).as_posix()) not in files:
            files.append(name)

    sys.settrace(look)
    try:
        function()
    finally:
        sys.settrace(None)
    return files


def test_a_warm_call_runs_few_files() -> None:
    q = torch.randn(1, 2, 16, 64)
    leaf = q.clone().requires_grad_()
    for x in (q, leaf):
        lowtri.attention(x, x, x, "causal")
    assert len(files_that_run(lambda: lowtri.attention(q, q, q, "causal"))) <= 6
    assert len(files_that_run(lambda: lowtri.attention(leaf, leaf, leaf, "causal"))) <= 7


@pytest.mark.parametrize(
    ("mask", "rows", "files"),
    [
        ("causal", 1, 13),
        ("causal & window(64)", 1, 13),
        ("causal & (window(64) | first(4))", 1, 13),
        ("causal & (window(64) | first(4))", 2, 13),  # whose rows have different positions
    ],
)
def test_a_token_of_a_cache_runs_few_files_in_every_layer(mask: str, rows: int, files: int) -> None:
    def new(n: int) -> torch.Tensor:
        return torch.randn(rows, 2, n, 64)

    cache = lowtri.KVCache(mask)
    positions = None if rows == 1 else np.stack([np.arange(40) - 7 * row for row in range(rows)])
    for layer in range(2):
        cache.attend(new(40), new(40), new(40), positions, layer=layer)
    most, calls = 0, []
    for t in range(100):
        slots = cache._slots
        proven, since = slots.lookahead._proven, slots._since_sweep
        ran = [
            len(files_that_run(lambda layer=layer: cache.attend(new(1), new(1), new(1), layer=layer)))
            for layer in range(2)
        ]
        # A token that evicts others, lets the buffers grow, or looks further ahead for keys that may be missing runs more.
        if t and slots.lookahead._proven is proven and slots._since_sweep == since + 1:
            most = max(most, *ran)
        calls.append(len(PREPARED))
    assert 0 < most <= files, most
    # A cache that turns contiguous positions into others is a second call; growth is none.
    assert calls[-1] - calls[0] <= 2
