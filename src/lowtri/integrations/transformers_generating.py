"""Whether a forward is a step of transformers' ``generate`` without a cache, which computes the whole row again for each token.

Each step then gives earlier tokens other outputs if the mask shows them later ones, so such masks are refused as with a cache.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["is_recomputed"]


def is_recomputed(model: Any, options: dict[str, Any]) -> bool:
    """Whether ``generate`` of this model calls a forward with these options, without a cache.

    A forward outside of ``generate`` has the same arguments, so its callers decide.
    """
    generate = getattr(type(model), "generate", None)
    if options.get("use_cache") is not False or generate is None:
        return False
    code = inspect.unwrap(generate).__code__
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
