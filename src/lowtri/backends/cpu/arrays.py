"""Arrays as the kernels read and write them: NumPy's or torch's, of a dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["empty_like", "to_dtype"]


def to_dtype(x: Any, dtype: str) -> Any:
    """The array in this dtype: itself, or a contiguous copy."""
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else np.ascontiguousarray(x, dtype)
    import torch

    kind = getattr(torch, dtype)
    return x if x.dtype is kind else x.detach().to(kind, memory_format=torch.contiguous_format)


def empty_like(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype or like.dtype)
    if dtype is None:
        return like.new_empty(shape)
    import torch

    return like.new_empty(shape, dtype=getattr(torch, dtype))
