"""``@inner``: a function that kernels call and Python never does.

Numba would make two wrappers of every function, one for Python and one for C, and compile them with it: a quarter of the time that
a kernel takes to compile. Nothing here allocates, so nothing is counted; and a division is the machine's own, without a check.
"""

from __future__ import annotations

from typing import Any

from numba import njit

__all__ = ["ALONE", "inner", "inlined"]

ALONE: dict[str, Any] = {"error_model": "numpy", "_nrt": False}  # no Python exceptions, no allocation

inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **ALONE)

# Copied into its only caller before it is typed. LLVM optimises each function with all that it calls, so a chain of large ones is
# optimised once for each link; copying has a price too, and pays for the last links only.
inlined = njit(inline="always", no_cpython_wrapper=True, no_cfunc_wrapper=True, **ALONE)
