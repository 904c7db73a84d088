"""Position encodings: the sinusoidal ones of the original Transformer, added to embeddings, and rotary embedding.

Rotary embedding rotates queries and keys by angles proportional to their positions, which then affect a score only through the
distance of the two tokens. The layout is Llama's: entry ``i`` of a head is paired with ``i + D/2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.masks.arrays import why_not_plain


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
    if not (isinstance(n, Integral) and isinstance(d, Integral)):
        raise CallError(f"sinusoidal: n is {n!r:.60} and d is {d!r:.60}; expected whole numbers.")
    if not 0 <= n <= 2**31 or not 1 <= d <= 2**31:
        raise CallError(f"sinusoidal: n is {n} and d is {d}; n is at least 0 and d at least 1, both at most 2**31.")
    frequency = 10000.0 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)  # (ceil(d/2),)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * frequency  # (n, ceil(d/2))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d].float()


_MOST = 1e15  # torch takes no whole numbers beyond 64 bits


@dataclass(frozen=True)
class RopeScaling:
    """Lower rotary frequencies, for a context longer than the original one.

    Pairs with more than ``high_freq_factor`` periods in the ``original`` context keep their frequency; those with fewer than
    ``low_freq_factor`` have theirs divided by ``factor``; between the two it is interpolated. With both bounds infinite every
    frequency is divided, which is linear scaling.

    >>> rotary_frequencies(4, 256.0, RopeScaling(8.0)).tolist()
    [0.125, 0.0078125]

    Args:
        factor: divisor of the frequencies, at least 1.
        low_freq_factor, high_freq_factor: periods in the ``original`` context, the first below the second.
        original: the original context length, in tokens.

    Raises:
        CallError: if a number is out of range.

    Source: linear, Chen et al. 2023 (position interpolation); with bounds, Llama 3.1 (Grattafiori et al. 2024).
    """

    factor: float
    low_freq_factor: float = float("inf")
    high_freq_factor: float = float("inf")
    original: int = 1

    def __post_init__(self) -> None:
        linear = self.low_freq_factor == self.high_freq_factor == float("inf")
        bounded = linear or 0 < self.low_freq_factor < self.high_freq_factor <= _MOST
        if not (1 <= self.factor <= _MOST and 1 <= self.original <= _MOST and bounded):
            raise CallError(
                f"RopeScaling: factor is {self.factor}, original {self.original}, and the bounds are "
                f"{self.low_freq_factor} and {self.high_freq_factor}.\n"
                f"Fix: factor and original from 1 to {_MOST:.0e}; the low bound above 0 and below the high one."
            )

    @property
    def linear(self) -> bool:
        """Whether all frequencies are divided alike."""
        return self.low_freq_factor == float("inf")

    def scaled(self, frequency: Tensor) -> Tensor:
        """The scaled frequencies, (D/2,)."""
        if self.linear:
            return frequency / self.factor
        periods = self.original * frequency / (2 * math.pi)  # of each pair in the original context
        unscaled = ((periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - unscaled) * frequency / self.factor + unscaled * frequency


def rotary_frequencies(
    size: int, theta: float, scaling: RopeScaling | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """The rotation of each pair per position, in radians, float32 (D/2,)."""
    frequency = 1.0 / theta ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    return frequency if scaling is None else scaling.scaled(frequency)


def rotary_tables(
    positions: Any,
    size: int,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    *,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of positions, computed once for all layers.

    >>> cos, sin = rotary_tables([0, 1, 2], 4)
    >>> x = torch.ones(1, 3, 4)
    >>> apply_rotary(x, cos, sin)[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]

    Args:
        positions: integers (N,) or (B, N), in any order. Negative ones rotate back, as when a cache shifts its tokens; the
            -1 of padding is harmless, since padding is masked.
        size: the head size D, an even number.
        theta: the base; pair ``i`` is rotated by ``position / theta ** (2i / D)``.
        scaling: scaled frequencies.

    Returns:
        two float32 tensors, (N, D) or (B, 1, N, D), for :func:`apply_rotary`.

    Raises:
        CallError: if the head size is odd, or positions are not (N,) or (B, N).

    Source: Su et al. 2021 (RoFormer); the halves as in Llama (Touvron et al. 2023).
    """
    if size < 2 or size % 2:
        raise CallError(f"rotary: the head size is {size}, but entries are rotated in pairs. Fix: an even head size.")
    if not torch.compiler.is_compiling() and (reason := why_not_plain("positions", positions)):
        raise CallError(f"rotary: {reason}")
    positions = torch.as_tensor(np.asarray(positions) if isinstance(positions, list | tuple) else positions)
    if positions.ndim not in (1, 2) or positions.is_floating_point():
        raise CallError(
            f"rotary: positions are {tuple(positions.shape)} {positions.dtype}; expected integers (N,) or (B, N)."
        )
    frequency = rotary_frequencies(size, theta, scaling, device=device)  # (D/2,)
    angle = positions.to(device=device, dtype=torch.float32)[..., None] * frequency  # (..., N, D/2)
    if positions.ndim == 2:
        angle = angle[:, None]  # one angle for all heads
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys (..., H, N, D) by tables of :func:`rotary_tables`, in at least float32."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    # Rolling by D/2 aligns entry i with its partner i + D/2; the sines carry the signs.
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def from_pairs(rows: Any, heads: int) -> Any:
    """Reorder the rows of a query or key projection from interleaved pairs (2i, 2i + 1) to half-split pairs (i, i + D/2).

    Scores do not change, since queries and keys are reordered alike.

    >>> from_pairs(np.arange(8), heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]

    Args:
        rows: (H * D, ...), a NumPy array or a tensor: weights or biases.
        heads: number of heads, H.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # (H, D/2, 2, ...)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
