"""torch's BlockMask from a plan: no pair is evaluated, and no mask is recognised by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowtri.backends.flex.mask_mods import mask_mod_of
from lowtri.masks.plan import TILE_Q, Plan, row_of_runs
from lowtri.masks.tile import FULL

__all__ = ["block_mask_of", "block_mask_of_blocks", "blocks_of_plan"]

Bools = NDArray[np.bool_]


def block_mask_of(plan: Plan, block: int, device: Any) -> BlockMask:
    """The BlockMask of a plan, for blocks of ``block`` queries (a multiple of 64) and of the keys of a tile."""
    seen, full = blocks_of_plan(plan, block)
    size = (block, plan.tile_k)
    return block_mask_of_blocks(seen, full, (plan.nq, plan.nk), size, mask_mod_of(plan, device), device)


def block_mask_of_blocks(
    seen: Bools, full: Bools | None, lengths: tuple[int, int], size: tuple[int, int], mask_mod: Any, device: Any
) -> BlockMask:
    """The BlockMask of (B, H, rows, columns) bools: the blocks with a visible pair, and those with no hidden one.

    Without ``full``, mask_mod decides in every block that is seen.
    """
    kinds = {"": seen if full is None else seen & ~full, "full_": full}
    lists: dict[str, Any] = {}
    for name, blocks in kinds.items():
        for of, turned in (("kv", blocks), ("q", None if blocks is None else blocks.swapaxes(2, 3))):
            counts, indices = (None, None) if turned is None else _lists(turned, device)
            lists |= {f"{name}{of}_num_blocks": counts, f"{name}{of}_indices": indices}
    return BlockMask(seq_lengths=lengths, BLOCK_SIZE=size, mask_mod=mask_mod, **lists)


def blocks_of_plan(plan: Plan, block: int) -> tuple[Bools, Bools]:
    """(B, H, rows, columns): the blocks with a visible pair, and those with no hidden one.

    torch pads the last block of queries and of keys with hidden pairs, so it is full only where it is whole.
    """
    tile_rows, columns = block // TILE_Q, -(-plan.nk // plan.tile_k)
    rows = -(-plan.rows // tile_rows)
    tile_row = row_of_runs(plan)
    row = tile_row // plan.rows * rows + tile_row % plan.rows // tile_rows
    first, last, kind, _ = plan.runs.T

    def tiles_in_block(runs: Any) -> NDArray[np.int32]:
        edges = np.zeros((len(plan.mask_pairs) * rows, columns + 1), np.int32)
        np.add.at(edges, (row[runs], first[runs]), 1)
        np.add.at(edges, (row[runs], last[runs]), -1)
        return np.cumsum(edges[:, :-1], axis=1, dtype=np.int32).reshape(-1, rows, columns)

    seen, full = tiles_in_block(slice(None)) > 0, tiles_in_block(kind == FULL) == tile_rows
    full[:, rows - 1 :] &= plan.nq % block == 0
    full[:, :, columns - 1 :] &= plan.nk % plan.tile_k == 0
    return seen[plan.mask_index], full[plan.mask_index]


def _lists(blocks: Bools, device: Any) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row, and their indices in increasing order; further entries of a row are unused."""
    counts = blocks.sum(axis=3, dtype=np.int32)
    rows, columns = np.nonzero(blocks.reshape(-1, blocks.shape[3]))
    starts = np.cumsum(counts.ravel()) - counts.ravel()
    indices = np.zeros(blocks.shape, np.int32)
    indices.reshape(-1, blocks.shape[3])[rows, np.arange(len(rows)) - starts[rows]] = columns
    return torch.from_numpy(counts).to(device), torch.from_numpy(indices).to(device)
