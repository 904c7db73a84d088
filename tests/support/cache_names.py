"""What the installed transformers calls the cache of a model, in its arguments."""

from __future__ import annotations

import inspect
from typing import Any

from lowtri.compat.model_caches import cache_argument, cache_of


def cache_name(model: Any) -> str:
    """The argument of a model's forward, and of its ``generate``."""
    name = cache_argument(inspect.signature(type(model).forward).parameters, model)
    assert name is not None
    return name


def cache_in(output: Any) -> Any:
    """The cache in a model's output."""
    found = cache_of(output)
    assert found is not None
    return found[1]
