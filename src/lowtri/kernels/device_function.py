"""``@device_function``: a function that only kernels call. ``@by_spec``: a device function that is chosen by the kernel's spec.

Both are compiled without Numba's wrappers for Python and C, which take a quarter of a kernel's compile time; without reference
counting, since kernels do not allocate; and without checks for division by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import overload

from lowtri.compat.numba_private import NO_ALLOCATION, NO_WRAPPERS

__all__ = ["NUMBA_OPTIONS", "by_spec", "device_function", "inline_device_function"]

NUMBA_OPTIONS: dict[str, Any] = {"error_model": "numpy", **NO_ALLOCATION}  # no Python exceptions, no allocation
_NO_WRAPPERS = {**NO_WRAPPERS, **NUMBA_OPTIONS}

device_function = njit(**_NO_WRAPPERS)

# Inlined into its only caller before type inference. LLVM optimises each function together with all that it calls, so the end of a
# chain of large functions is optimised once for each link. Inlining costs compile time as well, and pays for the last links only.
inline_device_function = njit(inline="always", **_NO_WRAPPERS)


def by_spec(choose: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A device function that ``choose(spec)`` selects during type inference. Its last argument is the spec."""

    def chosen(*arguments: Any) -> Any:
        raise NotImplementedError(f"{choose.__name__} is called by kernels only")

    @overload(chosen, strict=False, jit_options=_NO_WRAPPERS)
    def resolve(*kinds: Any) -> Callable[..., Any]:
        return choose(kinds[-1].value)

    return chosen
