"""All private functions of torch, Numba and transformers that lowtri uses, under plain names; and what differs between versions.

programs              what traces the caller, and what it knows of numbers
torch_private         torch
numba_private         Numba; what only tools/build_kernels.py uses is there
transformers_private  transformers
model_caches          what transformers calls the cache of a model, and what such a cache is
tested                the versions that the tests have run with

Private functions change without notice, so each has a comment that says what it does
and why no public function suffices. ``tests/compat`` finds private names in other packages. Where a version lacks a function, the
code that needs it falls back to something slower, or raises an EngineError that names the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["compile_as", "constant_while_traced"]

F = TypeVar("F", bound=Callable[..., Any])


def constant_while_traced(function: F) -> F:
    """Torch's compiler calls the function while it traces, and treats the string that it returns as a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but it loads torch. A torch that does not know the mark traces
    into the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_as(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Torch's compiler traces ``traced`` where a program calls ``function``.

    ``torch.compiler.substitute_in_graph`` does so, too, but it loads the compiler. A torch that does not know the mark traces
    ``function``.
    """
    function._torchdynamo_inline = traced  # type: ignore[attr-defined]
