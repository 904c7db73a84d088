"""A plan as a ``mask_mod`` that reads tensors only, so that FlexAttention compiles one program for many masks.

By ranges: a query sees at most two ranges of keys (causal, windows, documents, chunks, prefixes, sinks). By bits: any mask, from the
bits of the plan's partial tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.masks.plan import TILE_Q, Plan, key_ranges, row_of_runs, tile_patterns
from lowtri.masks.tile import FULL

__all__ = ["MaskMod", "mask_mod_of"]

_RANGES = 2  # of keys for each query

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_mod_of(plan: Plan, device: Any) -> MaskMod:
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
