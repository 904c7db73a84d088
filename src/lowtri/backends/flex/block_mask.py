"""torch's BlockMask from a plan: no pair is evaluated, and no mask is recognised by its name.

Its ``mask_mod`` reads tensors only, so that FlexAttention compiles one program for many masks. By ranges: a query sees at most two
ranges of keys (causal, windows, documents, chunks, prefixes, sinks). By bits: any mask, from the bits of the plan's partial tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lowtri.masks.plan import TILE_Q, Plan, key_ranges, row_of_runs, tile_patterns
from lowtri.masks.tile import FULL

Bools = NDArray[np.bool_]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_RANGES = 2  # of keys for each query


def block_mask_of(plan: Plan, block: int, device: Any) -> BlockMask:
    """The BlockMask of a plan, for blocks of ``block`` queries (a multiple of 64) and of the keys of a tile."""
    seen, full = blocks_of_plan(plan, block)
    size = (block, plan.tile_k)
    return block_mask_of_blocks(seen, full, (plan.nq, plan.nk), size, _mask_mod_of(plan, device), device)


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


def _mask_mod_of(plan: Plan, device: Any) -> MaskMod:
    """True where the query with index q may see the key with index k, in batch row b and head h."""
    rows, heads = plan.mask_index.shape
    # Factors instead of conditions: a program for masks with batch rows is also one for masks without.
    which = [torch.as_tensor(x, device=device) for x in (plan.mask_index, int(rows > 1), int(heads > 1))]
    ranges = key_ranges(plan, _RANGES)
    if ranges is not None:
        return _by_ranges(*which, *(torch.from_numpy(edges).to(device) for pair in ranges for edges in pair))
    return _by_bits(*which, *(torch.from_numpy(x).to(device) for x in _patterns(plan)))


def _by_ranges(
    mask_index: Tensor,
    differs_by_row: Tensor,
    differs_by_head: Tensor,
    low: Tensor,
    high: Tensor,
    low2: Tensor,
    high2: Tensor,
) -> MaskMod:
    """low, high, low2, high2: (masks, Nq)."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        m = mask_index[b * differs_by_row, h * differs_by_head]
        return ((k >= low[m, q]) & (k < high[m, q])) | ((k >= low2[m, q]) & (k < high2[m, q]))

    return mask_mod


def _by_bits(
    mask_index: Tensor, differs_by_row: Tensor, differs_by_head: Tensor, pattern_of_tile: Tensor, words: Tensor
) -> MaskMod:
    """pattern_of_tile: (masks, rows of 64 queries, columns); words: (patterns, keys in a tile, 2 halves of 32 queries)."""
    tile_k = torch.as_tensor(words.shape[1], device=words.device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        m = mask_index[b * differs_by_row, h * differs_by_head]
        pattern = pattern_of_tile[m, q // TILE_Q, k // tile_k]
        return (words[pattern, k % tile_k, q % TILE_Q // 32] >> (q % 32)) & 1 != 0

    return mask_mod


def _patterns(plan: Plan) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The pattern of each tile, and the words of the patterns: those of the plan, then FULL and EMPTY."""
    full_and_empty = np.array([[~np.uint64(0)], [np.uint64(0)]]) * np.ones(plan.tile_k, np.uint64)
    words = np.concatenate([plan.bits, full_and_empty]).view(np.int32).reshape(-1, plan.tile_k, 2)
    full, empty = len(words) - 2, len(words) - 1
    tiles = np.full((len(plan.row_start) - 1, -(-plan.nk // plan.tile_k)), empty, np.int32)
    first, last, kind, _ = plan.runs.T
    for row, start, stop in zip(row_of_runs(plan)[kind == FULL], first[kind == FULL], last[kind == FULL], strict=True):
        tiles[row, start:stop] = full
    row, column, pattern = tile_patterns(plan)
    tiles[row, column] = pattern
    return tiles.reshape(len(plan.mask_pairs), plan.rows, -1), words
