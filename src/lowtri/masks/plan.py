"""The plan: a mask in the form that kernels read.

A row of the plan is a tile of 64 queries. It holds *runs* of key tiles. EMPTY tiles are omitted; tiles of FULL runs need no mask;
tiles of PARTIAL runs have mask bits, and each distinct pattern of bits is stored once.

    Plan for causal, tiles of 2 x 2:     row 0   PARTIAL [0, 1)                      one pattern of bits,
        █···                             row 1   FULL    [0, 1)  PARTIAL [1, 2)      used twice
        ██··
        ███·
        ████

Runs are computed by recursive subdivision: a rectangle that is EMPTY or FULL is decided by one tile answer, and a PARTIAL one is
split into four. So the cost grows with the boundary of the mask and not with the number of tiles. Positions may be in any order: the
answer for a rectangle of *indices* is the answer for the bounding box of its *positions*, which is conservative, and the bits of the
smallest tiles are computed pair by pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.mask import Mask
from lowtri.masks.patterns import TILE_Q, Patterns, bit_counts, boxes
from lowtri.masks.tile import EMPTY, FULL, PARTIAL

__all__ = ["TILE_Q", "Plan", "plan"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plan:
    """Runs of key tiles for each row of 64 queries, of each distinct mask (with its positions) in the batch.

    Attributes:
        nq, nk, tile_k: queries, keys, and keys in a tile.
        mask_index: (B, H) int32, the mask of a batch row and head; size 1 means all of them.
        row_start: (masks * rows + 1,) int64; the runs of row r of mask m are ``runs[row_start[m * rows + r] : ...]``.
        runs: (R, 4) int32: first key tile, one past the last, FULL or PARTIAL, and for PARTIAL the index of its first tile in
            ``tile_bits``.
        tile_bits: (P,) int32, for each partial tile the index of its pattern.
        bits: (U, tile_k) uint64, a word for each key of a pattern; bit i is query i.
        mask_pairs: visible pairs of each mask.
    """

    nq: int
    nk: int
    tile_k: int
    mask_index: NDArray[np.int32]
    row_start: Ints
    runs: NDArray[np.int32]
    tile_bits: NDArray[np.int32]
    bits: NDArray[np.uint64]
    mask_pairs: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of query tiles of a mask."""
        return -(-self.nq // TILE_Q)

    @property
    def pairs(self) -> int:
        """Visible pairs of all batch rows and heads."""
        return sum(self.mask_pairs[index] for index in self.mask_index.flat)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.mask_index, self.row_start, self.runs, self.tile_bits, self.bits))

    def row(self, r: int, mask: int = 0) -> NDArray[np.int32]:
        """The runs of one row of query tiles, (n, 4)."""
        start, stop = self.row_start[mask * self.rows + r :][:2]
        return self.runs[start:stop]

    def row_pairs(self) -> Ints:
        """(masks, rows): the visible pairs of each row of query tiles."""
        row = np.repeat(np.arange(len(self.row_start) - 1), np.diff(self.row_start))
        first, last, kind, index = self.runs.T.astype(np.int64)
        before = np.concatenate([[0], np.cumsum(bit_counts(self.bits)[self.tile_bits])])
        partial = before[index + np.where(kind == PARTIAL, last - first, 0)] - before[index]
        queries = np.minimum((row % self.rows + 1) * TILE_Q, self.nq) - row % self.rows * TILE_Q
        keys = np.minimum(last * self.tile_k, self.nk) - first * self.tile_k
        pairs = np.zeros(len(self.row_start) - 1, np.int64)
        np.add.at(pairs, row, np.where(kind == FULL, queries * keys, partial))
        return pairs.reshape(len(self.mask_pairs), self.rows)

    def dense(self, mask: int = 0) -> NDArray[np.bool_]:
        """The dense table of the plan, (nq, nk); slow, for tests."""
        out = np.zeros((self.rows * TILE_Q, -(-self.nk // self.tile_k) * self.tile_k), bool)
        for r in range(self.rows):
            for first, last, kind, index in self.row(r, mask).tolist():
                for tile in range(first, last):
                    block = out[r * TILE_Q : (r + 1) * TILE_Q, tile * self.tile_k : (tile + 1) * self.tile_k]
                    if kind == FULL:
                        block[:] = True
                    else:
                        words = self.bits[self.tile_bits[index + tile - first]]
                        block[:] = np.unpackbits(words[:, None].view(np.uint8), axis=1, bitorder="little").T
        return out[: self.nq, : self.nk]


def plan(mask: Mask, q_positions: Ints, k_positions: Ints, *, tile_k: int = 128) -> Plan:
    """The plan of a mask for queries and keys at the given positions.

    >>> import numpy as np
    >>> from lowtri import causal
    >>> p = plan(causal(), np.arange(256), np.arange(256), tile_k=64)
    >>> p.row(2)  # two tiles without any mask, then the diagonal
    array([[0, 2, 2, 0],
           [2, 3, 1, 2]], dtype=int32)
    >>> len(p.bits), p.pairs
    (1, 32896)

    Args:
        mask: any mask.
        q_positions, k_positions: (N,) or (B, N) int64, in any order; -1 where there is no token.
        tile_k: keys in a tile.
    """
    q, k = np.atleast_2d(q_positions), np.atleast_2d(k_positions)
    shape = (max(len(q), len(k), *(mask.batch[:1] or (1,))), (*mask.batch, 1, 1)[1])
    patterns = Patterns(tile_k)
    known: dict[tuple[Mask, bytes, bytes], int] = {}
    plans: list[_MaskPlan] = []
    mask_index = np.zeros(shape, np.int32)
    for b, h in np.ndindex(shape):
        unbatched, qb, kb = mask.at(b, h), q[b % len(q)], k[b % len(k)]
        key = (unbatched, b"", b"") if len(q) == len(k) == 1 else (unbatched, qb.tobytes(), kb.tobytes())
        if key not in known:
            known[key] = len(plans)
            plans.append(_plan_mask(unbatched, qb, kb, patterns))
        mask_index[b, h] = known[key]
    offsets = np.cumsum([0] + [len(part.tile_bits) for part in plans[:-1]])
    for offset, part in zip(offsets, plans, strict=True):
        part.runs[part.runs[:, 2] == PARTIAL, 3] += offset
    counts = np.concatenate([part.row_counts for part in plans])
    return Plan(
        nq=q.shape[1],
        nk=k.shape[1],
        tile_k=tile_k,
        mask_index=mask_index,
        row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        runs=np.concatenate([part.runs for part in plans]),
        tile_bits=np.concatenate([part.tile_bits for part in plans]).astype(np.int32),
        bits=patterns.bits(),
        mask_pairs=tuple(part.pairs for part in plans),
    )


class _MaskPlan(NamedTuple):
    """The part of a plan that belongs to one mask."""

    row_counts: Ints  # (rows,) runs in each row
    runs: NDArray[np.int32]  # (R, 4)
    tile_bits: Ints  # (P,)
    pairs: int


def _plan_mask(mask: Mask, q: Ints, k: Ints, patterns: Patterns) -> _MaskPlan:
    """The rows of one unbatched mask for unbatched positions."""
    rows, columns = -(-len(q) // TILE_Q), -(-len(k) // patterns.tile_k)
    full, partial = _descend(mask, q, k, patterns.tile_k)
    # Full rectangles, a run for each of their rows: (row, first, last).
    height = full[:, 1] - full[:, 0]
    row = np.repeat(full[:, 0], height) + _count_up(height)
    first, last = np.repeat(full[:, 2], height), np.repeat(full[:, 3], height)
    kind, pattern = np.full(len(row), int(FULL)), np.zeros(len(row), np.int64)
    if len(partial):
        tile_pattern = patterns.of_tiles(mask, q, k, partial)
        visible = tile_pattern != Patterns.EMPTY
        tile, tile_pattern = partial[visible], tile_pattern[visible]
        row, first = np.concatenate([row, tile[:, 0]]), np.concatenate([first, tile[:, 1]])
        last, pattern = np.concatenate([last, tile[:, 1] + 1]), np.concatenate([pattern, tile_pattern])
        kind = np.concatenate([kind, np.where(tile_pattern == Patterns.FULL, int(FULL), int(PARTIAL))])
    order = np.argsort(row * (columns + 1) + first, kind="stable")
    row, first, last, kind, pattern = row[order], first[order], last[order], kind[order], pattern[order]
    # Neighbours of one kind become one run.
    begins_run = np.ones(len(row), bool)
    begins_run[1:] = (row[1:] != row[:-1]) | (first[1:] != last[:-1]) | (kind[1:] != kind[:-1])
    starts = np.flatnonzero(begins_run)
    ends = np.append(starts[1:], len(row)) - 1 if len(starts) else starts
    is_partial = kind == PARTIAL
    tile_index = np.concatenate([[0], np.cumsum(is_partial)])[starts]
    runs = np.stack([first[starts], last[ends], kind[starts], np.where(is_partial[starts], tile_index, 0)], axis=1)
    queries = np.minimum((row + 1) * TILE_Q, len(q)) - row * TILE_Q
    keys = np.minimum(last * patterns.tile_k, len(k)) - first * patterns.tile_k
    pairs = int((queries * keys)[~is_partial].sum()) + int(patterns.counts[pattern[is_partial]].sum())
    return _MaskPlan(np.bincount(row[starts], minlength=rows), runs.astype(np.int32), pattern[is_partial], pairs)


def _descend(mask: Mask, q: Ints, k: Ints, tile_k: int) -> tuple[Ints, Ints]:
    """Recursive subdivision: FULL rectangles (first row, one past the last, the same for columns) and PARTIAL tiles (row, column)."""
    queries, keys = boxes(q, TILE_Q), boxes(k, tile_k)
    levels = max(len(queries), len(keys))
    queries += [queries[-1]] * (levels - len(queries))
    keys += [keys[-1]] * (levels - len(keys))
    rows, columns = len(queries[0].low), len(keys[0].low)
    full: list[Ints] = [np.empty((0, 4), np.int64)]
    i, j = np.zeros(min(rows, columns, 1), np.int64), np.zeros(min(rows, columns, 1), np.int64)
    for level in range(levels - 1, -1, -1):
        q_boxes, k_boxes = queries[level], keys[level]
        answer = mask.tile(q_boxes.low[i], q_boxes.stop[i], k_boxes.low[j], k_boxes.stop[j])
        is_full = (answer == FULL) & q_boxes.real[i] & k_boxes.real[j]
        a, b = i[is_full], j[is_full]
        edges = [a << level, np.minimum((a + 1) << level, rows), b << level, np.minimum((b + 1) << level, columns)]
        full.append(np.stack(edges, axis=1))
        undecided = (answer != EMPTY) & ~is_full
        i, j = i[undecided], j[undecided]
        if level:
            i, j = (i[:, None] * 2 + [0, 0, 1, 1]).ravel(), (j[:, None] * 2 + [0, 1, 0, 1]).ravel()
            inside = (i < len(queries[level - 1].low)) & (j < len(keys[level - 1].low))
            i, j = i[inside], j[inside]
    return np.concatenate(full), np.stack([i, j], axis=1)


def _count_up(sizes: Ints) -> Ints:
    """0 .. n-1 for each n in sizes, one after the other."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
