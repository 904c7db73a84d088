"""Undocumented parts of Numba, under plain names; the docstring of the package lists the tested versions.

Numba documents how a type is added (``numba.extending``), but not how its attributes and constants are compiled. Where a name is
missing, importing this file fails; the backend ``cpu`` then gives that as its reason, and other backends run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from numba.core import config
from numba.core.cgutils import alloca_once, for_range
from numba.core.imputils import lower_constant, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.np.numpy_support import from_dtype

__all__ = [
    "NO_ALLOCATION",
    "AttributeTemplate",
    "alloca_once",
    "cache_directory",
    "for_range",
    "from_dtype",
    "infer_getattr",
    "lower_constant",
    "lower_getattr_generic",
]

# alloca_once, for_range                a variable on the stack, and a loop, in LLVM
# AttributeTemplate, infer_getattr      the types of a type's attributes
# lower_getattr_generic                 the code that reads an attribute
# lower_constant                        the code of a global variable that is a constant
# from_dtype                            the Numba type of a NumPy dtype

# Options of njit and cfunc: nothing is allocated, so that nothing is counted.
NO_ALLOCATION: dict[str, Any] = {"_nrt": False}


_one_at_a_time = RLock()  # the setting is that of all threads, and Numba compiles one function at a time anyway


@contextmanager
def cache_directory(folder: str) -> Iterator[None]:
    """Where Numba's cache lies while a function is made. The documented environment variable is read once, for all functions."""
    with _one_at_a_time:
        before = config.CACHE_DIR  # type: ignore[attr-defined]
        config.CACHE_DIR = folder  # type: ignore[attr-defined]
        try:
            yield
        finally:
            config.CACHE_DIR = before  # type: ignore[attr-defined]
