"""``@device_function``: a function that kernels call and Python never does; ``@by_spec``: one that is chosen by the kernel's spec.

A division is the machine's own, without a check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import overload

from lowtri.compat.numba_private import NO_ALLOCATION, NO_WRAPPERS

__all__ = ["OPTIONS", "by_spec", "device_function", "inlined"]

OPTIONS: dict[str, Any] = {"error_model": "numpy", **NO_ALLOCATION}  # no Python exceptions
_NO_WRAPPERS = {**NO_WRAPPERS, **OPTIONS}

device_function = njit(**_NO_WRAPPERS)

# Copied into its only caller before it is typed. LLVM optimises each function with all that it calls, so a chain of large ones is
# optimised once for each link; copying has a price too, and pays for the last links only.
inlined = njit(inline="always", **_NO_WRAPPERS)


def by_spec(choose: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A device function that ``choose(spec)`` picks while a kernel is typed. Its last argument is the spec."""

    def chosen(*arguments: Any) -> Any:
        raise NotImplementedError(f"{choose.__name__} is called by kernels only")

    @overload(chosen, strict=False, jit_options=_NO_WRAPPERS)
    def resolve(*kinds: Any) -> Callable[..., Any]:
        return choose(kinds[-1].value)

    return chosen
