"""``attention`` as a program under ``torch.compile`` calls it: outside the graph, whole.

A compiler that traced it would trace the NumPy of masks and plans too, and bake this call's answers into the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtri.engines.attend import attention

__all__ = ["outside"]

outside: Callable[..., Any] = torch.compiler.disable(attention)
