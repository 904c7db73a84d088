"""The types of attention's arguments, imported for type checkers only."""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lowtri.ops.distance_bias import DistanceBias

Array = TypeVar("Array", Tensor, NDArray[Any])  # all arrays of a call come from one library, and so do its results


class Options(TypedDict, total=False):
    """The keyword arguments of :func:`lowtri.attention` that change neither the return type nor the backend."""

    scale: float | None
    softcap: float | None
    bias: Tensor | NDArray[Any] | DistanceBias | None
    sinks: Tensor | NDArray[Any] | None
    dropout: float
    q_positions: Tensor | ArrayLike | None
    k_positions: Tensor | ArrayLike | None
