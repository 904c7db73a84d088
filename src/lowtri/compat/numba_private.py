"""Undocumented parts of Numba, under plain names; the docstring of the package lists the tested versions.

Numba documents how a type is added (``numba.extending``), but not how its attributes and constants are compiled. Where a name is
missing, kernels cannot be compiled; a library that was built before runs without Numba.
"""

from __future__ import annotations

from typing import Any

from numba.core.cgutils import alloca_once, for_range
from numba.core.imputils import lower_constant, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.np.numpy_support import from_dtype

__all__ = [
    "NO_ALLOCATION",
    "AttributeTemplate",
    "alloca_once",
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
