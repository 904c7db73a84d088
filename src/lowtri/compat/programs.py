"""What traces the caller, torch's compiler or torch.export, and what a program that is traced knows of its numbers.

torch is not imported: where it has not been, nothing traces.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["COMPILER", "integer_of", "is_fixed", "is_surely", "tensor_of", "tracer"]

COMPILER = "compile", "strict export"
"""Those answers of :func:`tracer` that mean torch's compiler."""


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
    if isinstance(value, (float, torch.SymFloat)):
        return torch.scalar_tensor(value, dtype=torch.float64)
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
    if not isinstance(number, (int, float)):
        return not isinstance(number, np.ndarray) and type(number).__name__ != "SymFloat"
    torch = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_dynamo_compiling():
        return True
    symbols = torch.fx.experimental.symbolic_shapes
    return bool(symbols.has_static_value(number)) if hasattr(symbols, "has_static_value") else True


def is_surely(condition: Any) -> bool:
    """The truth of a comparison; False where it is known only when the program runs, since a number was read from a tensor."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_dynamo_compiling():
        return bool(condition)
    symbols = torch.fx.experimental.symbolic_shapes
    return bool(symbols.guard_or_false(condition) if hasattr(symbols, "guard_or_false") else condition)
