"""The backend ``formula``: attention in torch as it is written on the board, query tile by query tile.

It takes every option, any device, and gradients to any order; memory grows with Nq x tile, since each tile is computed again
for its gradient. It is *the* plain formula of the precision contract: for half types it rounds inputs, weights and output.

tiles             the tiles of queries
visible_products  two products that keep to the mask: what it hides leaves no trace, forward and backward
"""

from __future__ import annotations

from lowtri.backends.base import Prepared
from lowtri.ops.call import Call

__all__ = ["cost", "name", "prepare", "supports"]

name = "formula"


def supports(call: Call) -> str | None:
    """None: the formula runs everything."""
    return None


def cost(call: Call) -> float:
    """Every pair is computed; NumPy arrays wait for torch to load."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    computing, reading = batch * heads * nq * nk * (d + dv + 64) / 8_000, batch * kv_heads * nk * (d + dv) / 400
    return (14_000 if call.is_numpy else 400) + max(computing, reading)


def prepare(call: Call) -> Prepared:
    from lowtri.backends.formula.tiles import Tiles

    return Tiles(call)
