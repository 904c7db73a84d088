"""All private functions of torch, Numba and transformers that lowtri uses, under plain names, with a file for each library.

torch_private         torch 2.6 and 2.13
numba_private         Numba 0.62 and 0.68; what only tools/build_kernels.py uses is there
transformers_private  transformers 5.4 and 5.23

The versions are those that the tests run with. Private functions change without notice, so each has a comment that says what it does
and why no public function suffices. ``tests/compat`` finds private names in other packages. Where a version lacks a function, the
code that needs it falls back to something slower, or raises an EngineError that names the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["constant_while_traced"]

F = TypeVar("F", bound=Callable[..., Any])


def constant_while_traced(function: F) -> F:
    """Torch's compiler calls the function while it traces, and treats the string that it returns as a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but it loads torch. A torch that does not know the mark traces
    into the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
