"""The versions of Python and of other libraries that lowtri's tests have run with, from the oldest to the newest.

``constraints-floor.txt`` and ``constraints.txt`` have the oldest and the usual ones, ``make test-newest`` the newest that exist.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

__all__ = ["TESTED", "installed_versions", "tried_range", "untried"]

TESTED: dict[str, tuple[str, str]] = {
    "python": ("3.10", "3.14"),
    "numpy": ("1.24", "2.5"),
    "torch": ("2.6", "2.15"),
    "transformers": ("5.4", "5.24"),
    "numba": ("0.62", "0.68"),
}


def tried_range(name: str) -> str:
    """The oldest and the newest version of a library that was tried, in words.

    >>> tried_range("torch").split()[1]
    'to'
    """
    oldest, newest = TESTED[name]
    return f"{oldest} to {newest}"


def installed_versions() -> dict[str, str]:
    """The versions of Python and of these libraries, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in TESTED:
        with suppress(PackageNotFoundError):
            found.setdefault(name, version(name))
    return found


def untried(versions: Mapping[str, str | None]) -> list[str]:
    """One line for each library whose version is outside of what was tried; nothing is refused for it.

    >>> untried({"torch": "99.0.1", "numpy": None})[0].split(":")[0]
    'torch 99.0.1 was never tried'
    """
    lines = []
    for name, number in versions.items():
        if name not in TESTED or number is None:
            continue
        oldest, newest = (_minor(bound) for bound in TESTED[name])
        if not oldest <= _minor(number) <= newest:
            lines.append(f"{name} {number} was never tried: lowtri's tests have run with {tried_range(name)}")
    return lines


def _minor(number: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", number)[:2])
