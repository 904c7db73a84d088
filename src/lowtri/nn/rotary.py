"""Rotary position embedding: queries and keys turned by angles that grow with their places.

A score then depends on how far apart two tokens stand, and on nothing else about their places. The layout is Llama's: entry
``i`` of a head turns together with entry ``i + D/2``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.errors import CallError

__all__ = ["apply_rotary", "rotary_tables"]


def rotary_tables(
    positions: Any, size: int, theta: float = 10000.0, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the given places, made once and used by every layer.

    >>> cos, sin = rotary_tables([0, 1, 2], 4)
    >>> x = torch.ones(1, 3, 4)
    >>> apply_rotary(x, cos, sin)[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]

    Args:
        positions: places in the sequence, whole numbers, (N,) or (B, N), in any order. A pad's -1 is an angle like any
            other, and does no harm: nobody sees a pad.
        size: the head size D, an even number.
        theta: the base; pair ``i`` turns by ``position / theta ** (2i / D)``.

    Returns:
        two float32 tensors, (N, D) or (B, 1, N, D), for :func:`apply_rotary`.

    Raises:
        CallError: if the head size is odd, or positions are not (N,) or (B, N).

    Source: Su et al. 2021 (RoFormer); the halves as in Llama (Touvron et al. 2023).
    """
    if size < 2 or size % 2:
        raise CallError(f"rotary: the head size is {size}, but entries turn in pairs. Fix: an even head size.")
    places = torch.as_tensor(np.asarray(positions) if isinstance(positions, list | tuple) else positions)
    if places.ndim not in (1, 2) or places.is_floating_point():
        raise CallError(
            f"rotary: positions are {tuple(places.shape)} {places.dtype}; places are whole numbers (N,) or (B, N)."
        )
    speed = 1.0 / theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)  # (D/2,)
    angle = places.to(device=device, dtype=torch.float32)[..., None] * speed  # (..., N, D/2)
    if places.ndim == 2:
        angle = angle[:, None]  # one angle for all heads
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys (..., H, N, D) by tables of :func:`rotary_tables`; computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Rolled by half a head, entry i meets its partner i + D/2; the sign of each stands in the sines.
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
