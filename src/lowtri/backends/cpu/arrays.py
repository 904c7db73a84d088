"""Arrays as the kernels read and write them: NumPy's or torch's, of a dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["empty", "to_dtype", "torch_dtype"]


def to_dtype(x: Any, dtype: str) -> Any:
    """The array in this dtype: itself, or a contiguous copy."""
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else np.ascontiguousarray(x, dtype)
    import torch

    kind = getattr(torch, dtype)
    return x if x.dtype is kind else x.detach().to(kind, memory_format=torch.contiguous_format)


def empty(like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    """An array of the kind of ``like``; NumPy's are contiguous."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype)
    return like.new_empty_strided(shape, strides, dtype=torch_dtype(dtype))


def torch_dtype(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype)
