"""The interface of a key/value cache as the modules use it; :class:`lowtri.KVCache` implements it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowtri.masks import Mask

__all__ = ["Cache"]


class Cache(Protocol):
    """Keys and values of all layers. A cache may also have ``contiguous``, as :class:`lowtri.KVCache` does."""

    mask: Mask

    def next_positions(self, n: int, layer: int = 0) -> NDArray[np.int64]:
        """Positions of a layer's next ``n`` tokens, (n,) or (B, n)."""
        ...

    def append(self, k: Any, v: Any, positions: Any = None, layer: int = 0) -> tuple[Any, Any, NDArray[np.int64]]:
        """Add new tokens; return the keys and values that their queries can see, and the positions of these."""
        ...
