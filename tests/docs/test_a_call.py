"""The page that follows a call names functions that run, in the order of the page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import lowtri
from lowtri.dispatch.prepared import PREPARED

SOURCE = Path(lowtri.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "a-call.md"


def tables() -> list[list[str]]:
    """The functions of each table of the page, as file:function."""
    parts = re.split(r"\n\| \| function .*\n", PAGE.read_text(encoding="utf-8"))[1:]
    return [re.findall(r"^\| \d+ \| `([^`]+)`", part.split("\n\n")[0], re.MULTILINE) for part in parts]


def functions_that_run(function: Callable[[], object]) -> list[str]:
    ran: list[str] = []

    def look(frame: FrameType, *_: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            ran.append(f"{path.relative_to(SOURCE).as_posix()}:{frame.f_code.co_name}")

    threads_of_torch = torch.autograd.set_multithreading_enabled(False)  # the backward runs on this thread
    sys.settrace(look)
    try:
        with threads_of_torch:
            function()
    finally:
        sys.settrace(None)
    return ran


@pytest.mark.parametrize("number", range(5), ids=["again", "with gradients", "with sinks", "the first", "a token"])
def test_the_page_names_what_runs_in_its_order(number: int) -> None:
    assert len(tables()) == 5
    q = torch.randn(1, 2, 16, 64, requires_grad=number == 1)
    cache = lowtri.KVCache("causal & window(64)")
    token = torch.randn(1, 2, 1, 64)

    def call() -> None:
        output = lowtri.attention(q, q, q, "causal", sinks=torch.zeros(2) if number == 2 else None)
        if number == 1:
            output.sum().backward()

    def step() -> None:
        cache.attend(token, token, token)

    run = step if number == 4 else call
    PREPARED.clear()
    for _ in range(0 if number == 3 else 2):
        run()
    ran = functions_that_run(run)
    start = 0
    for name in tables()[number]:
        assert name in ran[start:], f"{PAGE.name}: {name} does not run after the step before it"
        start = ran.index(name, start) + 1
