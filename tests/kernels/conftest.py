"""What is collected, and a fixture of the tests of bf16 on tile registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from amx_emulated import with_tiles
from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels import select
from lowtri.kernels.variants import spec_of_variant, variants_of

collect_ignore = ["amx_at_start"]  # for the start of an interpreter, which may have imported a system's sitecustomize


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No library has kernels on emulated tiles: tests that use them compile them."""
    for item in items:
        if "tiles" in getattr(item, "fixturenames", ()):
            item.add_marker("compiler")


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bf16 is computed on tiles, whichever way this CPU would choose."""
    isa = with_tiles()
    on_tiles = next(variant for variant in variants_of(isa) if variant.operand == "tiles")
    others = [variant for variant in select._VARIANTS if variant[:2] != on_tiles[:2]]
    monkeypatch.setattr(select, "_VARIANTS", [on_tiles, *others])
    monkeypatch.setitem(select.SPECS, on_tiles[:3], spec_of_variant(on_tiles, isa))
    PREPARED.clear()
    yield
    PREPARED.clear()
