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

Bits are a word for each key, a bit for each of 64 queries. The bits of ``m & n`` are the bits of ``m`` and the bits of ``n``, combined
word by word. So pairs are evaluated only for the operands, only in tiles whose answer is PARTIAL, and only once for all tiles with the
same key (``Mask._tile_key``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.formulas import causal
from lowtri.masks.mask import And, Join, Mask, Not
from lowtri.masks.positions import default_positions
from lowtri.masks.tile import EMPTY, FULL, PARTIAL, POSITION_MAX

Ints = NDArray[np.int64]
TILE_Q = 64  # queries in a tile: their bits for one key are one machine word
_TILES_AT_ONCE = 4096  # a million words: 4 MB for each mask that is joined
_PAIRS_AT_ONCE = 2**19  # computed by a formula at once: they fit into a processor's cache
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)

Words = NDArray[np.uint64]


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
        masks: how many distinct masks there are.
    """

    nq: int
    nk: int
    tile_k: int
    mask_index: NDArray[np.int32]
    row_start: Ints
    runs: NDArray[np.int32]
    tile_bits: NDArray[np.int32]
    bits: NDArray[np.uint64]
    masks: int

    @property
    def rows(self) -> int:
        """Rows of query tiles of a mask."""
        return -(-self.nq // TILE_Q)

    @cached_property
    def mask_pairs(self) -> tuple[int, ...]:
        """Visible pairs of each mask."""
        return tuple(self.row_pairs().sum(axis=1).tolist())

    @property
    def pairs(self) -> int:
        """Visible pairs of all batch rows and heads."""
        return sum(self.mask_pairs[index] for index in self.mask_index.flat)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.mask_index, self.row_start, self.runs, self.tile_bits, self.bits))

    def row(self, r: int, mask: int = 0) -> NDArray[np.int32]:
        """The runs of one row of query tiles, (n, 4)."""
        index = mask * self.rows + r
        return self.runs[self.row_start[index] : self.row_start[index + 1]]

    def row_pairs(self) -> Ints:
        """(masks, rows): the visible pairs of each row of query tiles."""
        row = row_of_runs(self)
        runs = self.runs.astype(np.int64)
        first, last = runs[:, 0], runs[:, 1]
        kind, index = runs[:, 2], runs[:, 3]
        before = np.concatenate([[0], np.cumsum(bit_counts(self.bits)[self.tile_bits])])
        partial = before[index + np.where(kind == PARTIAL, last - first, 0)] - before[index]
        queries = np.minimum((row % self.rows + 1) * TILE_Q, self.nq) - row % self.rows * TILE_Q
        keys = np.minimum(last * self.tile_k, self.nk) - first * self.tile_k
        pairs = np.zeros(len(self.row_start) - 1, np.int64)
        np.add.at(pairs, row, np.where(kind == FULL, queries * keys, partial))
        return pairs.reshape(self.masks, self.rows)

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
    q = np.atleast_2d(q_positions)
    k = np.atleast_2d(k_positions)
    mask_rows = mask.batch[0] if mask.batch else 1
    heads = mask.batch[1] if len(mask.batch) > 1 else 1
    shape = (max(len(q), len(k), mask_rows), heads)
    patterns = Patterns(tile_k)
    known: dict[tuple[Mask, bytes, bytes], int] = {}
    plans: list[tuple[Ints, NDArray[np.int32], Ints]] = []
    mask_index = np.zeros(shape, np.int32)
    for b, h in np.ndindex(shape):
        unbatched = mask.for_row(b, h)
        qb, kb = q[b % len(q)], k[b % len(k)]
        key = (unbatched, b"", b"") if len(q) == len(k) == 1 else (unbatched, qb.tobytes(), kb.tobytes())
        if key not in known:
            known[key] = len(plans)
            plans.append(_plan_mask(unbatched, qb, kb, patterns))
        mask_index[b, h] = known[key]
    counts, runs, tile_bits = (list(parts) for parts in zip(*plans, strict=True))
    offset = 0
    for of_mask, tiles in zip(runs, tile_bits, strict=True):
        of_mask[of_mask[:, 2] == PARTIAL, 3] += offset
        offset += len(tiles)
    return Plan(
        nq=q.shape[1],
        nk=k.shape[1],
        tile_k=tile_k,
        mask_index=mask_index,
        row_start=np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64),
        runs=np.concatenate(runs),
        tile_bits=np.concatenate(tile_bits).astype(np.int32),
        bits=patterns.bits(),
        masks=len(plans),
    )


def pairs(mask: Mask, nq: int, nk: int | None = None) -> Any:
    """How many pairs are visible among ``nq`` queries and ``nk`` keys; an array over ``m.batch`` if there is one.

    >>> causal().pairs(1_000_000)
    500000500000
    """

    def count(mask: Mask) -> int:
        q, k = default_positions(mask, nq, nk)
        return plan(mask, q, k).pairs

    return mask._each(count) if mask.batch else count(mask)


def is_causal(mask: Mask, n: int) -> bool:
    """Whether no query among the first ``n`` positions sees a later key, in any batch row and head.

    >>> from lowtri import first, window
    >>> window(4).is_causal(100), first(4).is_causal(100)
    (True, False)
    """
    return not np.any(pairs(mask - causal(), n))


class _Runs(NamedTuple):
    """Runs of key tiles, an entry for each."""

    row: Ints
    first: Ints  # key tile
    last: Ints  # one past it
    kind: Ints  # FULL or PARTIAL
    pattern: Ints  # of a PARTIAL tile


def _plan_mask(mask: Mask, q: Ints, k: Ints, patterns: Patterns) -> tuple[Ints, NDArray[np.int32], Ints]:
    """Of one unbatched mask and unbatched positions: how many runs each row has (rows,), the runs (R, 4), and tile_bits (P,)."""
    rows = -(-len(q) // TILE_Q)
    columns = -(-len(k) // patterns.tile_k)
    words = mask._packed(q, k)
    if words is None:
        full, partial = _subdivide(mask, q, k, patterns.tile_k)
    else:
        full = np.empty((0, 4), np.int64)
        partial = np.argwhere(np.ones((rows, columns), bool))
    found = _runs_of_rectangles(full)
    if len(partial):
        if words is None:
            tile_pattern = patterns.of_tiles(mask, q, k, partial)
        else:
            tile_pattern = patterns.of_words(words, len(q))
        found = _Runs(*map(np.concatenate, zip(found, _runs_of_tiles(partial, tile_pattern), strict=True)))
    order = np.argsort(found.row * (columns + 1) + found.first, kind="stable")
    found = _Runs(*(field[order] for field in found))
    # Neighbours of one kind become one run.
    begins_run = np.ones(len(order), bool)
    begins_run[1:] = found.row[1:] != found.row[:-1]
    begins_run[1:] |= found.first[1:] != found.last[:-1]
    begins_run[1:] |= found.kind[1:] != found.kind[:-1]
    starts, ends = run_bounds(begins_run)
    is_partial = found.kind == PARTIAL
    tile_index = np.concatenate([[0], np.cumsum(is_partial)])[starts]
    tile_index[~is_partial[starts]] = 0
    runs = np.stack([found.first[starts], found.last[ends], found.kind[starts], tile_index], axis=1)
    return np.bincount(found.row[starts], minlength=rows), runs.astype(np.int32), found.pattern[is_partial]


def _runs_of_rectangles(full: Ints) -> _Runs:
    """FULL rectangles (first row, one past the last, the same for columns): a run for each of their rows."""
    height = full[:, 1] - full[:, 0]
    row = np.repeat(full[:, 0], height) + count_up(height)
    kind = np.full(len(row), int(FULL))
    return _Runs(row, np.repeat(full[:, 2], height), np.repeat(full[:, 3], height), kind, np.zeros(len(row), np.int64))


def _runs_of_tiles(tiles: Ints, pattern: Ints) -> _Runs:
    """A run for each of the tiles (row, column) whose pattern has any bit."""
    visible = pattern != Patterns.NO_BIT
    tiles = tiles[visible]
    pattern = pattern[visible]
    kind = np.where(pattern == Patterns.EVERY_BIT, int(FULL), int(PARTIAL))
    return _Runs(tiles[:, 0], tiles[:, 1], tiles[:, 1] + 1, kind, pattern)


def run_bounds(begins: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The first and the last index of each run, from whether an index begins one."""
    starts = np.flatnonzero(begins)
    return starts, np.append(starts[1:], len(begins)) - 1 if len(starts) else starts


def _subdivide(mask: Mask, q: Ints, k: Ints, tile_k: int) -> tuple[Ints, Ints]:
    """Recursive subdivision: FULL rectangles (first row, one past the last, the same for columns) and PARTIAL tiles (row, column)."""
    queries = boxes(q, TILE_Q)
    keys = boxes(k, tile_k)
    levels = max(len(queries), len(keys))
    queries += [queries[-1]] * (levels - len(queries))
    keys += [keys[-1]] * (levels - len(keys))
    rows = len(queries[0].low)
    columns = len(keys[0].low)
    full: list[Ints] = [np.empty((0, 4), np.int64)]
    i = j = np.zeros(min(rows, columns, 1), np.int64)  # the row and the column of each rectangle of a level
    for level in range(levels - 1, -1, -1):
        q_boxes = queries[level]
        k_boxes = keys[level]
        answer = mask.tile(q_boxes.low[i], q_boxes.stop[i], k_boxes.low[j], k_boxes.stop[j])
        is_full = (answer == FULL) & q_boxes.no_padding[i] & k_boxes.no_padding[j]
        row = i[is_full]
        column = j[is_full]
        row_edges = [row << level, np.minimum((row + 1) << level, rows)]
        edges = [*row_edges, column << level, np.minimum((column + 1) << level, columns)]
        full.append(np.stack(edges, axis=1))
        undecided = (answer != EMPTY) & ~is_full
        i, j = i[undecided], j[undecided]
        if level:
            i = (i[:, None] * 2 + [0, 0, 1, 1]).ravel()
            j = (j[:, None] * 2 + [0, 1, 0, 1]).ravel()
            inside = (i < len(queries[level - 1].low)) & (j < len(keys[level - 1].low))
            i, j = i[inside], j[inside]
    return np.concatenate(full), np.stack([i, j], axis=1)


def count_up(sizes: Ints) -> Ints:
    """0 .. n-1 for each n in sizes, one after the other."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)


def row_of_runs(plan: Plan) -> Ints:
    """The row of each run, counted through all masks."""
    return np.repeat(np.arange(len(plan.row_start) - 1), np.diff(plan.row_start))


# The bits of partial tiles.


class Patterns:
    """All patterns of a plan."""

    NO_BIT = -1  # a pattern that is not stored: its pairs are all hidden
    EVERY_BIT = -2  # another one: its pairs are all visible

    def __init__(self, tile_k: int) -> None:
        self.tile_k = tile_k
        self._words: list[Words] = []
        self._known: dict[bytes, int] = {}

    def bits(self) -> Words:
        """(patterns, tile_k) words."""
        return np.concatenate([np.empty((0, self.tile_k), np.uint64), *self._words])

    def of_tiles(self, mask: Mask, q: Ints, k: Ints, tiles: Ints) -> Ints:
        """The pattern of each tile (row, column)."""
        queries = _tiles(q, TILE_Q)
        keys = _tiles(k, self.tile_k)
        patterns = np.empty(len(tiles), np.int64)
        for start in range(0, len(tiles), _TILES_AT_ONCE):
            chunk = slice(start, start + _TILES_AT_ONCE)
            row, column = tiles[chunk].T
            group, words = _words(mask, queries, keys, row, column)
            group, words = _clear_padding((group, words), queries, keys, row, column)
            patterns[chunk] = self._stored(group, words, queries.sizes[row] * keys.sizes[column])
        return patterns

    def of_words(self, words: Words, nq: int) -> Ints:
        """The pattern of each tile, row by row, from the words of all pairs (rows, Nk)."""
        rows, nk = words.shape
        columns = -(-nk // self.tile_k)
        padded = np.zeros((rows, columns * self.tile_k), np.uint64)
        padded[:, :nk] = words
        queries = np.minimum(TILE_Q, nq - TILE_Q * np.arange(rows))
        keys = np.minimum(self.tile_k, nk - self.tile_k * np.arange(columns))
        pairs = np.repeat(queries, columns) * np.tile(keys, rows)
        return self._stored(np.arange(len(pairs)), padded.reshape(-1, self.tile_k), pairs)

    def _stored(self, group: Ints, words: Words, pairs: Ints) -> Ints:
        """The pattern of each tile, from its group and the words of each group."""
        counts = bit_counts(words)
        partial = (counts[group] > 0) & (counts[group] < pairs)
        pattern = np.full(len(words), -1)
        new = []
        for index in np.unique(group[partial]).tolist():
            content = hashlib.blake2b(words[index].tobytes(), digest_size=16).digest()
            if content not in self._known:
                self._known[content] = len(self._known)
                new.append(index)
            pattern[index] = self._known[content]
        self._words.append(words[new])
        pattern_of_tile = np.where(counts[group] == 0, self.NO_BIT, self.EVERY_BIT)
        pattern_of_tile[partial] = pattern[group[partial]]
        return pattern_of_tile


def bit_counts(words: Words) -> Ints:
    """(n,): how many bits are set in each of n rows of words."""
    return _ONES[words.view(np.uint8)].sum(1, dtype=np.int64)


class Boxes(NamedTuple):
    """The range of the positions in each block of tiles."""

    low: Ints  # the least position
    stop: Ints  # one past the greatest
    no_padding: NDArray[np.bool_]  # whether every position holds a token


def boxes(positions: Ints, tile: int) -> list[Boxes]:
    """The boxes of single tiles, of two tiles each, of four, ... up to one of all tiles."""
    if len(positions) == 0:
        return [Boxes(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool))]
    edges = np.arange(0, len(positions), tile)
    least = np.minimum.reduceat(positions, edges)
    low = least if least.min() >= 0 else np.minimum.reduceat(np.where(positions < 0, POSITION_MAX, positions), edges)
    levels = [Boxes(low, np.maximum.reduceat(positions, edges) + 1, least >= 0)]
    while len(levels[-1].low) > 1:
        below = levels[-1]
        edges = np.arange(0, len(below.low), 2)
        low = np.minimum.reduceat(below.low, edges)
        stop = np.maximum.reduceat(below.stop, edges)
        levels.append(Boxes(low, stop, np.logical_and.reduceat(below.no_padding, edges)))
    return levels


class _Tiles(NamedTuple):
    """Queries or keys, tile by tile."""

    positions: Ints  # (tiles, tile), the last one padded with -1: no token
    boxes: Boxes
    sizes: Ints  # positions in each tile
    complete: NDArray[np.bool_]  # whether the tile is full-size and every position of it holds a token
    consecutive: NDArray[np.bool_]  # whether, moreover, its positions count up by one


def _tiles(positions: Ints, tile: int) -> _Tiles:
    count = -(-len(positions) // tile)
    tiles = np.pad(positions, (0, count * tile - len(positions)), constant_values=-1).reshape(-1, tile)
    sizes = np.minimum(tile, len(positions) - tile * np.arange(count))
    complete = np.all(tiles >= 0, axis=1)
    consecutive = complete & np.all(np.diff(tiles, axis=1) == 1, axis=1)
    return _Tiles(tiles, boxes(positions, tile)[0], sizes, complete, consecutive)


def _words(mask: Mask, queries: _Tiles, keys: _Tiles, row: Ints, column: Ints) -> tuple[Ints, Words]:
    """The bits of tiles: a group for each tile, and the words of each group. Group 0 is EMPTY, group 1 is FULL."""
    q = queries.boxes
    k = keys.boxes
    answer = mask.tile(q.low[row], q.stop[row], k.low[column], k.stop[column])
    undecided = np.flatnonzero(answer == PARTIAL)
    group = np.where(answer == FULL, 1, 0)
    empty_and_full = np.zeros((2, keys.positions.shape[1]), np.uint64)
    empty_and_full[1] = ~empty_and_full[1]
    if not len(undecided):
        return group, empty_and_full
    row = row[undecided]
    column = column[undecided]
    mask = mask.for_plan
    if isinstance(mask, Not):
        subgroup, words = _words(mask.inner, queries, keys, row, column)
        words = ~words
    elif isinstance(mask, Join):
        left_group, left = _words(mask.left, queries, keys, row, column)
        right_group, right = _words(mask.right, queries, keys, row, column)
        both, subgroup = np.unique(left_group * len(right) + right_group, return_inverse=True)
        left = left[both // len(right)]
        right = right[both % len(right)]
        words = left & right if isinstance(mask, And) else left | right
    else:
        subgroup, sample = _group_by_key(mask, queries, keys, row, column)
        words = _evaluated(mask, queries.positions[row[sample]], keys.positions[column[sample]])
    group[undecided] = subgroup + 2
    return group, np.concatenate([empty_and_full, words])


def _clear_padding(
    bits: tuple[Ints, Words], queries: _Tiles, keys: _Tiles, row: Ints, column: Ints
) -> tuple[Ints, Words]:
    """The groups and words of :func:`_words` with the pairs cleared in which a position holds no token."""
    group, words = bits
    incomplete = np.flatnonzero(~(queries.complete[row] & keys.complete[column]))
    if not len(incomplete):
        return bits
    tokens = np.packbits(queries.positions[row[incomplete]] >= 0, axis=1, bitorder="little").view(np.uint64)  # (n, 1)
    with_tokens = np.where(keys.positions[column[incomplete]] >= 0, tokens, np.uint64(0))  # (n, tile_k)
    with_tokens &= words[group[incomplete]]
    group[incomplete] = len(words) + np.arange(len(incomplete))
    return group, np.concatenate([words, with_tokens])


def _group_by_key(mask: Mask, queries: _Tiles, keys: _Tiles, row: Ints, column: Ints) -> tuple[Ints, Ints]:
    """Groups of tiles with the same key, hence the same bits: the group of each tile, and one tile of each group."""
    each = np.arange(len(row))
    q = queries.positions
    k = keys.positions
    tile_key = mask._tile_key(q[row, 0], k[column, 0], q.shape[1], k.shape[1])
    if tile_key is None:
        return each, each
    # A key describes whole tiles of consecutive positions; any other tile is a group of its own.
    group = np.where(queries.consecutive[row] & keys.consecutive[column], 0, each + 1)
    for numbers in tile_key:
        _, number = np.unique(np.broadcast_to(numbers, each.shape), return_inverse=True)
        _, group = np.unique(group * (number.max() + 1) + number, return_inverse=True)
    _, sample, group = np.unique(group, return_index=True, return_inverse=True)
    return group, sample


def _evaluated(mask: Mask, q: Ints, k: Ints) -> Words:
    """(n, tile_k) words, pair by pair: the queries are (n, 64), the keys (n, tile_k)."""
    words = np.empty(k.shape, np.uint64)
    step = max(1, _PAIRS_AT_ONCE // (TILE_Q * k.shape[1]))
    for start in range(0, len(q), step):
        chunk = slice(start, start + step)
        visible = np.broadcast_to(mask._sees(q[chunk, None, :], k[chunk, :, None]), (*k[chunk].shape, TILE_Q))
        words[chunk] = np.packbits(visible, axis=2, bitorder="little").view(np.uint64)[:, :, 0]
    return words
