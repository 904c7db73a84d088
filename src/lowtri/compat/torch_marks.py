"""Attributes of functions that torch.compile reads; this file does not load torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant_while_traced(function: F) -> F:
    """Torch's compiler calls the function while it traces, and treats the string that it returns as a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but it loads torch. A torch that does not know the mark traces
    into the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
