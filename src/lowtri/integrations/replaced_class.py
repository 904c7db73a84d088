"""Modules whose forward is replaced: their class becomes a subclass of their own, so ``isinstance`` and checkpoints still fit."""

from __future__ import annotations

from functools import cache
from typing import Any


class SwappedForward:
    """The base of what replaces the forward of a module; copies and pickles of the module keep it."""

    original: type[Any]
    replacement: type[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:  # the class has no name by which it could be found
        return _new, (self.original, self.replacement), self.__dict__


def replace_forward(module: Any, replacement: Any) -> None:
    """Give a module the forward of ``replacement``, in place."""
    original: Any = type(module)
    module.__class__ = _subclass(original, replacement)


def restore_forward(module: Any) -> None:
    """Give a module its own class again."""
    module.__class__ = module.original


@cache
def _subclass(original: Any, replacement: Any) -> Any:
    body = {"original": original, "replacement": replacement, "__module__": original.__module__}
    return type(original.__name__, (replacement, original), body)


def _new(original: Any, replacement: Any) -> Any:
    kind = _subclass(original, replacement)
    return kind.__new__(kind)
