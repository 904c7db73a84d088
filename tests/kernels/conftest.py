"""What is collected, and a fixture of the tests of bf16 on tile registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from amx_emulated import with_tiles

from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels import target
from lowtri.kernels.spec import variants_of

collect_ignore = ["amx_at_start"]  # for the start of an interpreter, which may have imported a system's sitecustomize


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No library has kernels on emulated tiles: tests that use them compile them."""
    for item in items:
        if "tiles" in getattr(item, "fixturenames", ()):
            item.add_marker("compiler")


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bf16 is computed on tiles, whichever way this CPU would choose."""
    uses_amx = next(variant for variant in variants_of(with_tiles()) if variant.spec.uses_amx)
    others = [x for x in target.VARIANTS if (x.family, x.spec.dtype) != ("forward", "bfloat16")]
    monkeypatch.setattr(target, "VARIANTS", [uses_amx, *others])
    PREPARED.clear()
    yield
    PREPARED.clear()
