from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes, for all tests of a session."""
    group = Ranks(4)
    yield group
    group.stop()
