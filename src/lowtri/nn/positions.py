"""The sinusoidal position encodings of the original Transformer, added to token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtri.errors import CallError

__all__ = ["sinusoidal"]


def sinusoidal(n: int, d: int) -> Tensor:
    """Sines and cosines of the positions ``0 .. n-1``, from high frequencies (left columns) to low (right columns).

    >>> sinusoidal(2, 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])

    Entry ``2i`` is ``sin(position / 10000 ** (2i / d))`` and entry ``2i + 1`` the cosine of the same angle.

    Args:
        n: number of positions.
        d: size of an encoding.

    Returns:
        float32 (n, d).

    Raises:
        CallError: if ``n`` is negative or ``d`` is below 1.

    Source: Vaswani et al. 2017, section 3.5.
    """
    if n < 0 or d < 1:
        raise CallError(f"sinusoidal: n is {n} and d is {d}; n is at least 0 and d at least 1.")
    frequency = 10000.0 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)  # (ceil(d/2),)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * frequency  # (n, ceil(d/2))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d].float()
