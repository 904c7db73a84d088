"""A pytest plugin: a sample of the tests for a machine on which they are slow, such as an emulated one.

    PYTHONPATH=src:tests/support:tools python -m pytest -p sampled --salt neoverse-v1 --examples 8 tests/masks

Of each parametrized test it keeps as few cases as contain every value of every parameter; which ones depends on the salt. --cases
limits their number further. A property runs on at most that many examples, the same in every run. Nothing else changes: what a test
checks, and how exactly. Tests that are left out count as deselected.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import hypothesis
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--salt", default="", help="another salt, other cases")
    parser.addoption(
        "--cases", type=int, default=0, help="of each parametrized test, at most; 0: as many as the values need"
    )
    parser.addoption("--examples", type=int, default=8, help="of each property")


def values(item: pytest.Item) -> set[tuple[str, int]]:
    """The parameters of a case with their values: cases of the same test share the objects."""
    callspec = getattr(item, "callspec", None)
    return {(name, id(value)) for name, value in callspec.params.items()} if callspec else set()


def cover(cases: Iterable[pytest.Item], salt: str, most: int = 0) -> list[pytest.Item]:
    """Cases that contain every value of every parameter, at most ``most``: always the one with the most that are missing."""
    left = sorted(cases, key=lambda case: sha256(f"{salt} {case.nodeid}".encode()).digest())
    missing = set().union(*map(values, left))
    chosen = []
    while left and (missing or not chosen) and not (most and len(chosen) == most):
        best = max(left, key=lambda case: len(missing & values(case)))
        missing -= values(best)
        left.remove(best)
        chosen.append(best)
    return chosen


@pytest.hookimpl(trylast=True)  # after the markers that -m names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    salt = config.getoption("--salt")
    most = config.getoption("--cases")
    kept = {case.nodeid for cases in tests.values() for case in cover(cases, salt, most)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
    for function in {getattr(item, "obj", None) for item in items}:
        # A second @settings on a function is an error of hypothesis, so its attribute is replaced.
        if old := getattr(function, "_hypothesis_internal_use_settings", None):
            examples = min(old.max_examples, config.getoption("--examples"))
            new = hypothesis.settings(old, max_examples=examples, derandomize=True, database=None)
            function._hypothesis_internal_use_settings = new
