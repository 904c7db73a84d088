"""A copy of a model that computes in float64 throughout, in which leaks remain and rounding noise vanishes.

Casting the weights is not enough: many models cast to float32 internally (norms, softmax, rotary tables), which brings the
noise back. So the copy runs under a torch function mode that reads every request for a narrower float as one for float64.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["computing_in_float64", "float64_copy"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def float64_copy(model: Any) -> Any:
    """A float64 copy of a module; a plain function is its own copy."""
    return copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model


@contextlib.contextmanager
def computing_in_float64() -> Iterator[None]:
    """Read every request for float32, float16 or bfloat16 as one for float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)


class _Widen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if func in _CASTS:
            func, kwargs = torch.Tensor.double, {}
        args = tuple(_wide(value) for value in args)
        if getattr(func, "__name__", "").endswith("grouped_mm") and _by_rows(*args, **kwargs):
            return _grouped(*args, **kwargs)
        result = func(*args, **kwargs)
        created = isinstance(result, torch.Tensor) and not types and result.dtype in _NARROW
        return result.double() if created else result


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def _by_rows(rows: Any, weights: Any, *, offs: Any = None, **others: Any) -> bool:
    by_offset = offs is not None and not any(value is not None for value in others.values())
    return by_offset and rows.dtype == torch.float64 and rows.dim() == 2 and weights.dim() == 3


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **others: Any) -> torch.Tensor:
    """A product with another matrix for each group of rows; torch's own has no float64."""
    ends = [0, *offs.tolist()]
    parts = [rows[a:b] @ weight for a, b, weight in zip(ends, ends[1:], weights, strict=False)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])
