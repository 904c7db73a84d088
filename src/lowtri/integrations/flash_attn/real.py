"""The real package flash-attn, where it is installed and a tensor is on a CUDA device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module, util
from typing import Any

__all__ = ["MARK", "is_real_installed", "real_function"]

MARK = "lowtri_installed"  # an attribute of the module that install() puts in the place of flash_attn


def is_real_installed() -> bool:
    """Whether ``import flash_attn`` finds a module that is not lowtri's."""
    module = sys.modules.get("flash_attn")
    if module is not None:
        return not hasattr(module, MARK)
    return util.find_spec("flash_attn") is not None


def real_function(name: str, q: Any) -> Callable[..., Any] | None:
    """The real function for tensors on a CUDA device; None where lowtri computes."""
    if not getattr(q, "is_cuda", False) or not is_real_installed():
        return None
    function: Callable[..., Any] = getattr(import_module("flash_attn"), name)
    return function
