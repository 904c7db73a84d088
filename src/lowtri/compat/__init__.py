"""All private functions of torch, Numba and transformers that lowtri uses, under plain names; and what differs between versions.

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

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

__all__ = [
    "COMPILER",
    "compile_as",
    "constant_while_traced",
    "integer_of",
    "is_fixed",
    "is_surely",
    "tensor_of",
    "tracer",
]

COMPILER = "compile", "strict export"
"""Those answers of :func:`tracer` that mean torch's compiler."""

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


# Programs.


def tracer() -> str:
    """What traces the caller; ``""`` where it just runs.

    Returns:
        ``"compile"``: the compiler, for torch.compile; a number that is read makes the program one for this number alone.
        ``"strict export"``: the compiler, for torch.export(strict=True), which keeps no data of NumPy's arrays.
        ``"export"``: torch.export, which runs the caller on tensors without numbers.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    exports = hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()
    if torch.compiler.is_dynamo_compiling():  # false in what the compiler runs while it traces, such as a constant
        return "strict export" if exports else "compile"
    return "export" if exports else ""


def tensor_of(value: Any) -> Any:
    """A NumPy array, a list or a number as a tensor; of numbers that vary in a program it has those of each run."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value if isinstance(value, (list, tuple, int)) else list(value))  # as_tensor fixes what varies


def integer_of(value: Any) -> Any:
    """NumPy's integer as an int, where torch's compiler traces and takes it for an array; other values as they are."""
    if not isinstance(value, np.ndarray) or tracer() not in COMPILER:
        return value
    tensor = tensor_of(value)
    is_integer = tensor.ndim == 0 and not tensor.is_floating_point() and tensor.dtype is not sys.modules["torch"].bool
    return tensor.item() if is_integer else value


def is_fixed(number: Any) -> bool:
    """Whether a program that the compiler traces holds this number, and is compiled again for another one."""
    if isinstance(number, np.ndarray):
        return False
    symbols = sys.modules["torch"].fx.experimental.symbolic_shapes
    if not isinstance(number, (int, float)) or tracer() not in COMPILER or not hasattr(symbols, "has_static_value"):
        return True
    return bool(symbols.has_static_value(number))


def is_surely(condition: Any) -> bool:
    """The truth of a comparison; False where it is known only when the program runs, since a number was read from a tensor."""
    if tracer() not in COMPILER:
        return bool(condition)
    symbols = sys.modules["torch"].fx.experimental.symbolic_shapes
    return bool(symbols.guard_or_false(condition) if hasattr(symbols, "guard_or_false") else condition)
