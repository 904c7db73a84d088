"""A fixture of the tests of bf16 on tile registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels import select


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No library has kernels on emulated tiles: tests that use them compile them."""
    for item in items:
        if "tiles" in getattr(item, "fixturenames", ()):
            item.add_marker("compiler")


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bf16 is computed on tiles, whichever way this CPU would choose."""
    variants = [
        variant._replace(enabled=variant.enabled or variant.operand == "tiles")
        for variant in select._VARIANTS
        if (variant.family, variant.dtype) != ("forward", "bfloat16") or variant.operand == "tiles"
    ]
    monkeypatch.setattr(select, "_VARIANTS", variants)
    PREPARED.clear()
    yield
    PREPARED.clear()
