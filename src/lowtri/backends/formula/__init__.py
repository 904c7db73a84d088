"""The backend ``formula``: the formula of attention in torch, in tiles of queries.

It supports every option, any device, and gradients to any order. Each tile is recomputed for its gradient, so memory grows with
the tile and not with Nq x Nk. It is the plain formula of the precision contract: float16 and bf16 round inputs, weights and output.
"""

from __future__ import annotations

from lowtri.backends.base import Prepared
from lowtri.extras import is_installed
from lowtri.ops.call import Call

__all__ = ["name", "prepare", "supports"]

name = "formula"


def supports(call: Call) -> str | None:
    """Every call, where torch is installed."""
    return None if is_installed("torch") else "it computes with torch, which is not installed"


def prepare(call: Call) -> Prepared:
    from lowtri.backends.formula.tiles import Tiles

    return Tiles(call)
