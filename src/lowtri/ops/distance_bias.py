"""Biases that depend on the head and on the distance between query and key only: one number for each distance, not for each pair.

A call stores the numbers of all its distances, ``q - k`` from the least to the greatest, in the place of a bias: (B|1, Hq|1, 1, L).
Backends either read them with a step of +1 along the queries and -1 along the keys, or look pairs up with ``Call.bias_of_pairs``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.arrays import is_tensor
from lowtri.masks.tile import POSITION_MAX, short_repr

_MOST = 2**27  # distances of a call


@dataclass(frozen=True, eq=False)
class DistanceBias:
    """A bias over distances, made by :func:`alibi` or :func:`distance_bias`.

    Attributes:
        values: the array or tensor that it is made from, which receives the gradient.
        kind: what it is, with its parameters; equal for biases that differ in their values only.
    """

    values: Any
    kind: tuple[Any, ...]
    function: Callable[[Any, NDArray[np.int64]], Any]  # (values, consecutive distances (L,)) -> (..., L)

    def along(self, low: int, count: int) -> Any:
        """The numbers of ``count`` distances from ``low`` on, (B|1, H|1, 1, L)."""
        numbers = self.function(self.values, np.arange(low, low + count))
        return numbers[(None,) * (3 - numbers.ndim)][:, :, None]


def alibi(slopes: Any) -> DistanceBias:
    """Linear biases: ``-slope * |q - k|`` is added to the scores of each head.

    >>> import numpy as np, lowtri
    >>> x = np.zeros((1, 3, 2))
    >>> lowtri.attention(x, x, x, "causal", bias=lowtri.alibi(np.array([1.0])), return_weights=True)[1].round(2)[0]
    array([[1.  , 0.  , 0.  ],
           [0.27, 0.73, 0.  ],
           [0.09, 0.24, 0.67]])

    Args:
        slopes: floats, (Hq,) or (B, Hq), an array or a tensor like q. Gradients flow to it.

    Positions count, so the bias is the same with a cache, a window, or packed documents. Memory grows with the number of distances.

    Source: Press et al. 2022.
    """
    _check("alibi", "slopes", slopes, (1, 2), "(Hq,) or (B, Hq)")
    return DistanceBias(slopes, ("alibi",), lambda s, d: -s[..., None] * _like(np.abs(d).astype(np.float64), s))


def distance_bias(table: Any, first: int | None = None) -> DistanceBias:
    """A number for each head and distance: ``table[h, q - k - first]`` is added to the score, the nearest entry where there is none.

    >>> import numpy as np, lowtri
    >>> x = np.zeros((1, 3, 2))
    >>> bias = lowtri.distance_bias(np.log([[1.0, 3.0]]), first=0)  # one position back, and further: three times the weight
    >>> lowtri.attention(x, x, x, "causal", bias=bias, return_weights=True)[1].round(2)[0]
    array([[1.  , 0.  , 0.  ],
           [0.75, 0.25, 0.  ],
           [0.43, 0.43, 0.14]])

    Args:
        table: floats, (L,), (Hq, L) or (B, Hq, L), an array or a tensor like q. Gradients flow to it. T5's buckets are a table
            ``weights[bucket(distances)].T``.
        first: the distance q - k of the first entry; default ``-(L // 2)``, so that the middle of an odd table is distance 0.

    Source: Shaw et al. 2018; Raffel et al. 2020.
    """
    _check("distance_bias", "table", table, (1, 2, 3), "(L,), (Hq, L) or (B, Hq, L)")
    n = int(table.shape[-1])
    if first is None:
        first = -(n // 2)
    start = _whole_number(first)
    if start is None or abs(start) > POSITION_MAX:
        raise CallError(
            f"distance_bias: first is {short_repr(first)}, but a distance q - k is a whole number, "
            "between -2**62 and 2**62. Fix: first=0."
        )

    def look_up(values: Any, distances: NDArray[np.int64]) -> Any:
        low, high = int(distances[0]) - start, int(distances[-1]) - start
        if 0 <= low <= high < n:  # distances are consecutive
            return values[..., low : high + 1]
        return values[..., _like(np.clip(distances - start, 0, n - 1), values)]

    return DistanceBias(table, ("distance_bias", start), look_up)


def _whole_number(x: Any) -> int | None:
    """A number without a fraction as an int, else None."""
    try:
        return int(x) if not isinstance(x, str) and x == int(x) else None
    except (TypeError, ValueError, OverflowError):
        return None


def bias_arguments(bias: Any) -> tuple[Any, str | None]:
    """The values that a bias is made from and its kind as text, which operators of torch take; None for a bias of pairs."""
    if not isinstance(bias, DistanceBias):
        return bias, None
    return bias.values, " ".join(str(x) for x in bias.kind)


def bias_from_arguments(values: Any, kind: str | None) -> Any:
    """The bias again, from what :func:`bias_arguments` returns. A new kind of bias is added here."""
    if kind is None:
        return values
    name, *numbers = kind.split()
    make: Any = {"alibi": alibi, "distance_bias": distance_bias}[name]
    return make(values, *map(int, numbers))


def distances_of(bias: DistanceBias, q: NDArray[np.int64], k: NDArray[np.int64]) -> tuple[int, Any]:
    """The least distance between queries and keys at these positions, and the bias of all distances from it on."""
    q, k = q[q >= 0], k[k >= 0]
    if not (q.size and k.size):
        return 0, bias.along(0, 1)
    low, high = int(q.min()) - int(k.max()), int(q.max()) - int(k.min())
    if high - low >= _MOST:
        raise CallError(
            f"attention: bias has {high - low + 1:,} distances at these positions, at most {_MOST:,} are stored.\n"
            "Fix: positions that begin near 0."
        )
    return low, bias.along(low, high - low + 1)


def _like(numbers: NDArray[Any], like: Any) -> Any:
    """NumPy numbers as an array or a tensor where ``like`` is one; floats in its dtype, at least float32."""
    is_index = numbers.dtype.kind == "i"
    if isinstance(like, np.ndarray):
        return numbers if is_index else numbers.astype(np.promote_types(like.dtype, np.float32))
    import torch

    dtype = None if is_index else torch.promote_types(like.dtype, torch.float32)
    return torch.from_numpy(numbers).to(like.device, dtype)


def _check(function: str, name: str, x: Any, ranks: tuple[int, ...], layout: str) -> None:
    is_array = isinstance(x, np.ndarray) or is_tensor(x)
    if not is_array or x.ndim not in ranks or "float" not in str(x.dtype) or x.shape[-1] == 0:
        got = f"{x.dtype} {tuple(x.shape)}" if is_array else f"{type(x).__module__}.{type(x).__name__}"
        raise CallError(
            f"{function}: {name}: got {got.removeprefix('builtins.')}. "
            f"Fix: a NumPy array or torch tensor of floats, {layout}."
        )
