"""The bits of partial tiles: a word for each key, a bit for each of 64 queries. Each distinct pattern is stored once.

The bits of ``m & n`` are the bits of ``m`` and the bits of ``n``, combined word by word. So pairs are evaluated only for the operands,
only in tiles whose answer is PARTIAL, and only once for all tiles with the same signature.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.combinators import And, Join, Not
from lowtri.masks.mask import Mask
from lowtri.masks.positions import POSITION_MAX
from lowtri.masks.tile import FULL, PARTIAL

__all__ = ["TILE_Q", "Boxes", "Patterns", "bit_counts", "boxes"]

TILE_Q = 64  # queries in a tile: their bits for one key are one machine word
_TILES_AT_ONCE = 4096  # a million words: 4 MB for each mask that is joined
_PAIRS_AT_ONCE = 2**19  # computed by a formula at once: they fit into a processor's cache
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.int64)

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


class Patterns:
    """All patterns of a plan, and how many pairs are visible in each."""

    EMPTY, FULL = -1, -2  # patterns without any bit, and with every bit: they are not stored

    def __init__(self, tile_k: int) -> None:
        self.tile_k = tile_k
        self.counts = np.empty(0, np.int64)
        self._words: list[Words] = []
        self._known: dict[bytes, int] = {}

    def bits(self) -> Words:
        """(patterns, tile_k) words."""
        return np.concatenate([np.empty((0, self.tile_k), np.uint64), *self._words])

    def of_tiles(self, mask: Mask, q: Ints, k: Ints, tiles: Ints) -> Ints:
        """The pattern of each tile (row, column)."""
        queries, keys = _tiles(q, TILE_Q), _tiles(k, self.tile_k)
        patterns = np.empty(len(tiles), np.int64)
        for start in range(0, len(tiles), _TILES_AT_ONCE):
            chunk = slice(start, start + _TILES_AT_ONCE)
            row, column = tiles[chunk].T
            group, words = _without_holes(_words(mask, queries, keys, row, column), queries, keys, row, column)
            patterns[chunk] = self._stored(group, words, queries.sizes[row] * keys.sizes[column])
        return patterns

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
        self.counts = np.concatenate([self.counts, counts[new]])
        return np.where(partial, pattern[group], np.where(counts[group] == 0, self.EMPTY, self.FULL))


def bit_counts(words: Words) -> Ints:
    """(n,): how many bits are set in each of n rows of words."""
    return _ONES[words.view(np.uint8)].sum(1)


class Boxes(NamedTuple):
    """The range of the positions in each block of tiles."""

    low: Ints  # the least position
    stop: Ints  # one past the greatest
    real: NDArray[np.bool_]  # whether every position holds a token


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
        low, stop = np.minimum.reduceat(below.low, edges), np.maximum.reduceat(below.stop, edges)
        levels.append(Boxes(low, stop, np.logical_and.reduceat(below.real, edges)))
    return levels


class _Tiles(NamedTuple):
    """Queries or keys, tile by tile."""

    positions: Ints  # (tiles, tile), the last one padded with -1: no token
    boxes: Boxes
    sizes: Ints  # positions in each tile
    real: NDArray[np.bool_]  # whether the tile is whole and every position of it holds a token
    ordered: NDArray[np.bool_]  # whether, moreover, its positions count up by one


def _tiles(positions: Ints, tile: int) -> _Tiles:
    count = -(-len(positions) // tile)
    tiles = np.pad(positions, (0, count * tile - len(positions)), constant_values=-1).reshape(-1, tile)
    sizes = np.minimum(tile, len(positions) - tile * np.arange(count))
    real = np.all(tiles >= 0, axis=1)
    return _Tiles(tiles, boxes(positions, tile)[0], sizes, real, real & np.all(np.diff(tiles, axis=1) == 1, axis=1))


def _words(mask: Mask, queries: _Tiles, keys: _Tiles, row: Ints, column: Ints) -> tuple[Ints, Words]:
    """The bits of tiles: a group for each tile, and the words of each group. Group 0 is EMPTY, group 1 is FULL."""
    q, k = queries.boxes, keys.boxes
    answer = mask.tile(q.low[row], q.stop[row], k.low[column], k.stop[column])
    undecided = np.flatnonzero(answer == PARTIAL)
    group = np.where(answer == FULL, 1, 0)
    empty_and_full = np.zeros((2, keys.positions.shape[1]), np.uint64)
    empty_and_full[1] = ~empty_and_full[1]
    if not len(undecided):
        return group, empty_and_full
    row, column = row[undecided], column[undecided]
    if isinstance(mask, Not):
        subgroup, words = _words(mask.inner, queries, keys, row, column)
        words = ~words
    elif isinstance(mask, Join):
        left, right = (_words(part, queries, keys, row, column) for part in (mask.left, mask.right))
        subgroup, words = _joined(mask, left, right)
    else:
        subgroup, sample = _group_by_signature(mask, queries, keys, row, column)
        words = _evaluated(mask, queries.positions[row[sample]], keys.positions[column[sample]])
    group[undecided] = subgroup + 2
    return group, np.concatenate([empty_and_full, words])


def _joined(mask: Join, left: tuple[Ints, Words], right: tuple[Ints, Words]) -> tuple[Ints, Words]:
    pairs, group = np.unique(left[0] * len(right[1]) + right[0], return_inverse=True)
    a, b = left[1][pairs // len(right[1])], right[1][pairs % len(right[1])]
    return group, (a & b if isinstance(mask, And) else a | b)


def _without_holes(
    bits: tuple[Ints, Words], queries: _Tiles, keys: _Tiles, row: Ints, column: Ints
) -> tuple[Ints, Words]:
    """The bits with the pairs cleared in which a position holds no token."""
    group, words = bits
    incomplete = np.flatnonzero(~(queries.real[row] & keys.real[column]))
    if not len(incomplete):
        return bits
    tokens = np.packbits(queries.positions[row[incomplete]] >= 0, axis=1, bitorder="little").view(np.uint64)  # (n, 1)
    real = np.where(keys.positions[column[incomplete]] >= 0, tokens, np.uint64(0))  # (n, tile_k)
    real &= words[group[incomplete]]
    group[incomplete] = len(words) + np.arange(len(incomplete))
    return group, np.concatenate([words, real])


def _group_by_signature(mask: Mask, queries: _Tiles, keys: _Tiles, row: Ints, column: Ints) -> tuple[Ints, Ints]:
    """Groups of tiles with the same signature, hence the same bits: the group of each tile, and one tile of each group."""
    each = np.arange(len(row))
    q, k = queries.positions, keys.positions
    signature = mask._signature(q[row, 0], k[column, 0], q.shape[1], k.shape[1])
    if signature is None:
        return each, each
    # A signature describes whole tiles of consecutive positions; any other tile is a group of its own.
    group = np.where(queries.ordered[row] & keys.ordered[column], 0, each + 1)
    for numbers in signature:
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
