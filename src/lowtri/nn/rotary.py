"""Rotary position embedding: queries and keys turned by angles that grow with their places.

A score then depends on how far apart two tokens stand, and on nothing else about their places. The layout is Llama's: entry
``i`` of a head turns together with entry ``i + D/2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.masks.arrays import why_not_plain

__all__ = ["RopeScaling", "apply_rotary", "from_pairs", "rotary_speeds", "rotary_tables"]


@dataclass(frozen=True)
class RopeScaling:
    """Slower turns, for a context longer than the one a model began with.

    Pairs that turn often within ``original`` places keep their speed; those that do not turn ``low_freq_factor`` times turn
    ``factor`` times slower; between the two, speed is mixed in proportion. With both bounds infinite every pair is slower,
    which is linear scaling.

    >>> rotary_speeds(4, 256.0, RopeScaling(8.0)).tolist()
    [0.125, 0.0078125]

    Args:
        factor: how many times slower, at least 1.
        low_freq_factor, high_freq_factor: turns within ``original`` places, the first below the second.
        original: the context, in tokens, that the model began with.

    Raises:
        CallError: if a number makes no sense.

    Source: linear, Chen et al. 2023 (position interpolation); with bounds, Llama 3.1 (Grattafiori et al. 2024).
    """

    factor: float
    low_freq_factor: float = float("inf")
    high_freq_factor: float = float("inf")
    original: int = 1

    def __post_init__(self) -> None:
        linear = self.low_freq_factor == self.high_freq_factor == float("inf")
        if not (
            self.factor >= 1 and self.original >= 1 and (linear or 0 < self.low_freq_factor < self.high_freq_factor)
        ):
            raise CallError(
                f"RopeScaling: factor is {self.factor}, original {self.original}, and the bounds are "
                f"{self.low_freq_factor} and {self.high_freq_factor}.\n"
                "Fix: factor and original at least 1; the low bound above 0 and below the high one."
            )

    @property
    def linear(self) -> bool:
        """Whether every pair is slowed alike."""
        return self.low_freq_factor == float("inf")

    def slowed(self, speed: Tensor) -> Tensor:
        """The speeds after scaling, (D/2,)."""
        if self.linear:
            return speed / self.factor
        turns = self.original * speed / (2 * math.pi)  # of each pair within the original context
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * speed / self.factor + kept * speed


def rotary_speeds(
    size: int, theta: float, scaling: RopeScaling | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """By how much each pair turns from one place to the next, radians, float32 (D/2,)."""
    speed = 1.0 / theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    return speed if scaling is None else scaling.slowed(speed)


def rotary_tables(
    positions: Any,
    size: int,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    *,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the given places, made once and used by every layer.

    >>> cos, sin = rotary_tables([0, 1, 2], 4)
    >>> x = torch.ones(1, 3, 4)
    >>> apply_rotary(x, cos, sin)[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]

    Args:
        positions: places in the sequence, whole numbers, (N,) or (B, N), in any order. A pad's -1 is an angle like any
            other, and does no harm: nobody sees a pad. Numbers below 0 turn back, as when a cache moves its tokens.
        size: the head size D, an even number.
        theta: the base; pair ``i`` turns by ``position / theta ** (2i / D)``.
        scaling: slower turns for some of the pairs.

    Returns:
        two float32 tensors, (N, D) or (B, 1, N, D), for :func:`apply_rotary`.

    Raises:
        CallError: if the head size is odd, or positions are not (N,) or (B, N).

    Source: Su et al. 2021 (RoFormer); the halves as in Llama (Touvron et al. 2023).
    """
    if size < 2 or size % 2:
        raise CallError(f"rotary: the head size is {size}, but entries turn in pairs. Fix: an even head size.")
    if not torch.compiler.is_compiling() and (trouble := why_not_plain("positions", positions)):
        raise CallError(f"rotary: {trouble}")
    places = torch.as_tensor(np.asarray(positions) if isinstance(positions, list | tuple) else positions)
    if places.ndim not in (1, 2) or places.is_floating_point():
        raise CallError(
            f"rotary: positions are {tuple(places.shape)} {places.dtype}; places are whole numbers (N,) or (B, N)."
        )
    speed = rotary_speeds(size, theta, scaling, device=device)  # (D/2,)
    angle = places.to(device=device, dtype=torch.float32)[..., None] * speed  # (..., N, D/2)
    if places.ndim == 2:
        angle = angle[:, None]  # one angle for all heads
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys (..., H, N, D) by tables of :func:`rotary_tables`; computed in at least float32."""
    half = x.dtype.itemsize < 4
    wide = x.float() if half else x
    # Rolled by half a head, entry i meets its partner i + D/2; the sign of each stands in the sines.
    turned = torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin)
    return turned.to(x.dtype) if half else turned


def from_pairs(rows: Any, heads: int) -> Any:
    """Rows of a map to queries or keys, from the layout in which neighbours turn together to the one in which halves do.

    Where entries 2i and 2i + 1 of a head turn together, here entry i turns with entry i + D/2. The order within a head changes
    nothing else, as queries and keys change alike.

    >>> from_pairs(np.arange(8), heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]

    Args:
        rows: (H * D, ...), a NumPy array or a tensor: weights or biases.
        heads: how many heads, H.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # (H, D/2, 2, ...)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
