"""The backend ``flex``: torch's FlexAttention, compiled, on a GPU, with a BlockMask made from the mask's tiles.

It skips the blocks that the mask hides, which torch's own attention with a table does not. The first call of a shape compiles for
seconds, so short calls are left to other backends.

The BlockMask comes from a plan: no pair is evaluated, and no mask is recognised by its name. Its ``mask_mod`` reads tensors only, so
that FlexAttention compiles one program for many masks. By ranges: a query sees at most two ranges of keys (causal, windows, documents,
chunks, prefixes, sinks). By bits: any mask, from the bits of the plan's partial tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.backends import GradientSource, Prepared
from lowtri.masks.plan import TILE_Q, Plan, row_of_runs
from lowtri.masks.ranges import key_ranges, keys_seen, queries_that_see, tile_patterns
from lowtri.masks.tile import FULL
from lowtri.ops.call import Call, Inputs, Result

__all__ = [
    "attend",
    "block_mask_of",
    "block_mask_of_blocks",
    "blocks_of_plan",
    "name",
    "prepare",
    "score_mod_of",
    "supports",
    "why_not",
    "with_sinks",
]

name = "flex"

Bools = NDArray[np.bool_]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_DEVICES = ("cuda", "xpu")
_LEAST_SIZE = 16  # of a head: the smallest product of Triton
_BLOCK = 128  # queries and keys: what the kernels take
_RANGES = 2  # of keys for each query


def supports(call: Call) -> str | None:
    """Reject what FlexAttention's GPU kernels, or our use of them, do not have."""
    if call.device not in _DEVICES:
        return f"the tensors are on {call.device}"
    return why_not(call)


def why_not(call: Call) -> str | None:
    """The reasons that do not depend on the device."""
    *_, d, dv = call.sizes
    missing = {
        f"{call.transformation}, which it does not support": call.transformation is not None,
        "the tensors are fake": call.why_unreadable is not None and "FakeTensor" in call.why_unreadable,
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
        "it does not drop weights": bool(call.dropout),
        "it does not return weights": call.return_weights,
        "it does not return what keys received": call.return_received,
        "it takes a bias of all pairs, not of distances": call.distance_low is not None,
        "its kernels have no float64": call.dtype == "float64",
        f"its kernels take head sizes from {_LEAST_SIZE} on": min(d, dv) < _LEAST_SIZE,
        "triton is not installed": call.device == "cuda" and find_spec("triton") is None,
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def prepare(call: Call) -> Prepared:
    return _Compiled(call)


class _Compiled(Prepared):
    """A prepared call. torch differentiates it.

    Queries that see no key and keys that no query sees are set to 0 before the call: the kernels multiply hidden numbers by 0, and a
    NaN would stay.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        plan = call.plan(_BLOCK)
        self.block_mask = None if call.shows_all else block_mask_of(plan, _BLOCK, call.device)
        self.fully_masked_queries, self.fully_masked_keys = (None, None) if call.shows_all else _unused(plan, call)
        lists = () if self.block_mask is None else self.block_mask.as_tuple()
        kept = (*lists, self.fully_masked_queries, self.fully_masked_keys)
        self.nbytes = 4096 + sum(x.nbytes for x in kept if isinstance(x, Tensor))

    def gradient_source(self) -> GradientSource:
        return GradientSource.GRAPH

    def checks_values(self) -> bool:
        return False

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        call, sinks = self.call, inputs.sinks
        q, k, v = inputs[:3]
        if self.fully_masked_queries is not None:
            q = q.masked_fill(self.fully_masked_queries, 0)
        if self.fully_masked_keys is not None:
            k, v = k.masked_fill(self.fully_masked_keys, 0), v.masked_fill(self.fully_masked_keys, 0)
        output, lse = attend(
            q,
            k,
            v,
            score_mod=score_mod_of(call.softcap, inputs.bias),
            block_mask=self.block_mask,
            scale=call.scale,
            group=call.group,
            want_lse=call.return_lse or sinks is not None,
        )
        if sinks is not None:
            output, lse = with_sinks(output, lse, sinks)
        return Result(output, None, lse)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float,
    group: int,
    want_lse: bool,
) -> tuple[Tensor, Any]:
    """The output, and the log-sum-exp or None, by compiled FlexAttention."""
    function, request = _compiled(q.is_cpu)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": group > 1}
    if not want_lse:
        return function(q, k, v, score_mod, block_mask, **options), None
    if request is None:
        output, lse = function(q, k, v, score_mod, block_mask, return_lse=True, **options)
        return output, lse
    output, auxiliary = function(q, k, v, score_mod, block_mask, return_aux=request(lse=True), **options)
    return output, auxiliary.lse


@cache
def _compiled(on_cpu: bool) -> tuple[Callable[..., Any], Any]:
    """torch's function, compiled, and its class of auxiliary results (None in versions that have ``return_lse`` only).

    torch's C++ code for CPUs, which tests run, does not compile with sizes that vary; on a GPU they save compilations.
    """
    from torch.nn.attention import flex_attention as module

    return torch.compile(module.flex_attention, dynamic=False if on_cpu else None), getattr(module, "AuxRequest", None)


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (B, Hq, Nq) with one more score in each softmax, (Hq,), which has no value."""
    together = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (output * torch.exp(lse - together)[..., None]).to(output.dtype), together


def score_mod_of(softcap: float | None, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """The cap and the bias (B|1, H|1, Nq|1, Nk|1) as a score_mod, or None without them."""
    if bias is None:
        if softcap is None:
            return None
        return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
    # A factor of 0 broadcasts: every index is a tensor, also where the bias has one entry.
    by = [int(n > 1) for n in bias.shape]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score + bias[b * by[0], h * by[1], q * by[2], k * by[3]]

    return score_mod


def _unused(plan: Plan, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The queries that see no key, (B|1, H|1, Nq, 1), and the keys that no query of the group sees, (B|1, Hkv|1, Nk, 1), or None."""
    sees = queries_that_see(plan)[plan.mask_index]  # (B|1, H|1, Nq)
    seen: Bools = keys_seen(plan)[plan.mask_index]  # (B|1, H|1, Nk)
    if seen.shape[1] > 1:
        seen = np.any(seen.reshape(len(seen), -1, call.group, seen.shape[2]), axis=2)
    queries, keys = (
        None if used.all() else torch.from_numpy(np.logical_not(used[..., None])).to(call.device)
        for used in (sees, seen)
    )
    return queries, keys


# The BlockMask.


def block_mask_of(plan: Plan, block: int, device: Any) -> Any:
    """The BlockMask of a plan, for blocks of ``block`` queries (a multiple of 64) and of the keys of a tile."""
    seen, full = blocks_of_plan(plan, block)
    size = (block, plan.tile_k)
    return block_mask_of_blocks(seen, full, (plan.nq, plan.nk), size, _mask_mod_of(plan, device), device)


def block_mask_of_blocks(
    seen: Bools, full: Bools | None, lengths: tuple[int, int], size: tuple[int, int], mask_mod: Any, device: Any
) -> Any:
    """The BlockMask of (B, H, rows, columns) bools: the blocks with a visible pair, and those with no hidden one.

    Without ``full``, mask_mod decides in every block that is seen.
    """
    from torch.nn.attention.flex_attention import BlockMask  # loads torch's compiler

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
        edges = np.zeros((plan.masks * rows, columns + 1), np.int32)
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
    return tiles.reshape(plan.masks, plan.rows, -1), words
