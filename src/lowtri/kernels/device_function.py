"""``@device_function``: a function that only kernels call. ``@by_spec``: a device function that is chosen by the kernel's spec.

Both are compiled into the kernel only (see :mod:`lowtri.compat.numba_linking`), without reference counting, since kernels do not
allocate, and without checks for division by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import overload

from lowtri.compat.numba_linking import LINKED
from lowtri.compat.numba_private import NO_ALLOCATION

__all__ = ["NUMBA_OPTIONS", "by_spec", "device_function"]

NUMBA_OPTIONS: dict[str, Any] = {"error_model": "numpy", **NO_ALLOCATION}  # no Python exceptions, no allocation
_LINKED = {**LINKED, **NUMBA_OPTIONS}

device_function = njit(**_LINKED)


def by_spec(choose: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A device function that ``choose(spec)`` selects during type inference. Its last argument is the spec."""

    def chosen(*arguments: Any) -> Any:
        raise NotImplementedError(f"{choose.__name__} is called by kernels only")

    @overload(chosen, strict=False, jit_options=_LINKED)
    def resolve(*kinds: Any) -> Callable[..., Any]:
        return choose(kinds[-1].value)

    return chosen
