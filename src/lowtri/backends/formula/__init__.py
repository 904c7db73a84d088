"""The backend ``formula``: the formula of attention in torch, in tiles of queries.

It supports every option, any device, and gradients to any order. Each tile is recomputed for its gradient, so memory grows with
the tile and not with Nq x Nk. It is the plain formula of the precision contract: float16 and bf16 round inputs, weights and output.

tiles             the tiles of queries
visible_products  two products over visible pairs, forward and backward
"""

from __future__ import annotations

from lowtri.backends.base import Prepared
from lowtri.ops.call import Call

__all__ = ["cost", "name", "prepare", "supports"]

name = "formula"


def supports(call: Call) -> str | None:
    """Every call."""
    return None


def cost(call: Call) -> float:
    """All pairs; for NumPy arrays also the time to import torch."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    computing, reading = batch * heads * nq * nk * (d + dv + 64) / 8_000, batch * kv_heads * nk * (d + dv) / 400
    fixed = 14_000 if call.is_numpy else 1_500 if call.needs_grad else 400
    return fixed + max(computing, reading)


def prepare(call: Call) -> Prepared:
    from lowtri.backends.formula.tiles import Tiles

    return Tiles(call)
