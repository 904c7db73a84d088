"""How many files an engineer reads to follow ``q`` from ``lowtri.attention`` to the kernel: counted while a call runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

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
