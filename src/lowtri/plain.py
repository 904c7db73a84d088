"""The textbook formulas of attention, under the names that notebooks use, in NumPy and torch.

Notebooks disagree about what ``True`` means, so the first line of every docstring defines it:

    name                       the mask that it returns or takes
    make_causal_mask           added to the scores: 0 where visible, -1e9 where hidden           (NumPy)
    create_causal_mask         added to the scores: 0 where visible, -inf where hidden           (torch)
    create_causal_mask_bool    True = attend                                                     (torch)
    masked_attention_bool      True = attend                                                     (torch)
    masked_self_attention      numbers: added to the scores; booleans: True = attend             (NumPy and torch)
    MaskedSelfAttention        True = hidden                                                     (torch)

These functions are neither fast nor checked. A query that sees nothing gives the mean of all values with -1e9, and NaN with
-inf, while ``lowtri.attention`` gives 0. ``docs/from-a-notebook.md`` has the equivalent call of lowtri for each of them.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtri.extras import is_installed, require

if TYPE_CHECKING:
    from torch import Tensor

    from lowtri.plain_torch import AutoRegressiveModel as AutoRegressiveModel
    from lowtri.plain_torch import MaskedSelfAttention as MaskedSelfAttention
    from lowtri.plain_torch import create_causal_mask as create_causal_mask
    from lowtri.plain_torch import create_causal_mask_bool as create_causal_mask_bool
    from lowtri.plain_torch import masked_attention_bool as masked_attention_bool

    Array = TypeVar("Array", NDArray[Any], Tensor)

_NEED_TORCH = (
    *("create_causal_mask", "create_causal_mask_bool", "masked_attention_bool"),
    *("MaskedSelfAttention", "AutoRegressiveModel"),
)
__all__ = ["make_causal_mask", "softmax"]
if is_installed("torch"):  # else `from lowtri.plain import *` gives the other names
    __all__ += ["create_causal_mask", "create_causal_mask_bool", "masked_attention_bool"]
__all__ += ["masked_self_attention", "self_attention"]
if is_installed("torch"):
    __all__ += ["MaskedSelfAttention", "AutoRegressiveModel"]


def __getattr__(name: str) -> Any:
    """The names that need torch, at their first use.

    Raises:
        ExtraError: where torch is not installed.
    """
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'lowtri.plain' has no attribute {name!r}")
    require(f"lowtri.plain.{name}", "torch")
    from lowtri import plain_torch

    value = globals()[name] = getattr(plain_torch, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NEED_TORCH})


def make_causal_mask(T: int, neg_large: float = -1e9) -> NDArray[np.float64]:
    """A number to add to the scores: 0 where visible, ``neg_large`` above the diagonal. (T, T), NumPy.

    >>> print(make_causal_mask(3, neg_large=-9.0))
    [[ 0. -9. -9.]
     [ 0.  0. -9.]
     [ 0.  0.  0.]]
    """
    row, column = np.indices((T, T))
    return np.where(column <= row, 0.0, neg_large)  # (T, T)


def softmax(x: NDArray[Any], axis: int = -1) -> NDArray[Any]:
    """No mask: a score of -inf, or far below the others, gets weight 0. Weights along ``axis`` sum to 1. NumPy.

    The row's maximum is subtracted first, so that ``exp`` never overflows; the result is the same.

    >>> print(softmax(np.array([1000.0, 1000.0, -1e9])))
    [0.5 0.5 0. ]
    """
    with np.errstate(under="ignore"):  # a weight too small for a float is 0
        exponentials = np.exp(x - x.max(axis=axis, keepdims=True))
    weights: NDArray[Any] = exponentials / exponentials.sum(axis=axis, keepdims=True)
    return weights


def masked_self_attention(Q: Array, K: Array, V: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """Numbers are added to the scores (0 = visible); in booleans, True = attend; without a mask every token sees every token.

    Q, K (..., T, d_h) and V (..., T, d_v), usually with leading dimensions (batch, heads), NumPy or torch; the mask
    broadcasts to (..., T, T). Returns the output (..., T, d_v) and the weights (..., T, T). Source: Vaswani et al. 2017,
    "Attention Is All You Need", section 3.2.1.

    >>> Q = K = np.zeros((2, 1)); V = np.array([[1.0], [3.0]])
    >>> output, weights = masked_self_attention(Q, K, V, make_causal_mask(2))
    >>> print(weights.tolist(), output.tolist())
    [[1.0, 0.0], [0.5, 0.5]] [[1.0], [2.0]]
    """
    scores: Any = Q @ K.swapaxes(-1, -2) / math.sqrt(Q.shape[-1])  # (..., T, T)
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(scores, torch.Tensor)
    if mask is not None and str(mask.dtype) in ("bool", "torch.bool"):
        scores = scores.masked_fill(~mask, -math.inf) if is_torch else np.where(mask, scores, -np.inf)
    elif mask is not None:
        scores = scores + mask
    weights: Any = scores.softmax(-1) if is_torch else softmax(scores)
    return weights @ V, weights


def self_attention(x: Array) -> tuple[Array, Array]:
    """No mask: every token sees every token. Q = K = V = x (..., T, d), without projections; returns output and weights.

    The form with a mask is ``masked_self_attention(x, x, x, mask)``.

    >>> output, weights = self_attention(np.zeros((1, 2, 4)))
    >>> print(weights)
    [[[0.5 0.5]
      [0.5 0.5]]]
    """
    return masked_self_attention(x, x, x)
