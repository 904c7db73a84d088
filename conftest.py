"""Settings of all tests: the work that is worth a thread, and processes for tests of several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import amx_emulated  # noqa: F401 - an instruction set, before lowtri chooses one
import pytest

from lowtri.backends.cpu import launch


@pytest.fixture(autouse=True, scope="session")
def small_calls_use_all_threads() -> Iterator[None]:
    """Tests of several threads compute small calls, which run on one thread elsewhere, as in processes that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "WORK_PER_THREAD", 1)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Four processes, for all tests of a session."""
    from ranks import Ranks

    group = Ranks(4)
    yield group
    group.stop()
