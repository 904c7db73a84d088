"""Tests find the kernels as on a fresh machine, so that no result depends on what an earlier run has compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lowtri.backends.cpu import ready


@pytest.fixture(autouse=True, scope="session")
def nothing_is_compiled_before() -> Iterator[None]:
    """``engine="auto"`` leaves small calls to torch, as where no kernel is compiled; tests of kernels name the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "found", lambda: frozenset())
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Four processes, for all tests of a session."""
    from ranks import Ranks

    group = Ranks(4)
    yield group
    group.stop()
