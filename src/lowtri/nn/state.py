"""What a module asks of a key/value cache. :class:`lowtri.KVCache` is one; the modules know no more about it than this."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowtri.masks import Mask

__all__ = ["Cache"]


class Cache(Protocol):
    """Keys and values of the tokens so far, for all layers."""

    mask: Mask

    def next_positions(self, n: int, layer: int = 0) -> NDArray[np.int64]:
        """The places of the next ``n`` tokens of a layer, (n,) or (B, n)."""
        ...

    def append(self, k: Any, v: Any, positions: Any = None, layer: int = 0) -> tuple[Any, Any, NDArray[np.int64]]:
        """Add new tokens; give all keys and values that their queries can see, and the places of those."""
        ...
