"""Locks in forked processes.

Only the thread that forks lives on in the child process: a lock that another thread holds at that moment is never released there. What
the library locks is renewed in the child, by what modules say with :func:`after_fork`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import cached_property

_after_fork: list[Callable[[], object]] = []


def after_fork(act: Callable[[], object]) -> None:
    """Call ``act`` in every child process that is forked from now on: it replaces a lock, and repairs what the lock guards."""
    _after_fork.append(act)


def _in_forked_child() -> None:
    for act in _after_fork:
        act()


def renew_cached_properties() -> None:
    """Before Python 3.12 a cached property has a lock, which is held while the property of any object is computed."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "lowtri"]:
        for value in list(vars(module).values()):
            if isinstance(value, type):
                _renew_locks_of(value)


def _renew_locks_of(kind: type) -> None:
    for value in list(vars(kind).values()):
        if isinstance(value, cached_property) and hasattr(value, "lock"):
            value.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_forked_child)
