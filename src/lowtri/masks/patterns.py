"""The bits of partial tiles: a word for each key, a bit for each of 64 queries; equal ones stored once.

The bits of ``m & n`` are the bits of ``m`` and of ``n``, joined word by word. So pairs are computed only for single masks, only in
tiles that they answer with PARTIAL, and only once for all tiles with the same signature.
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

__all__ = ["TILE_Q", "Boxes", "Patterns", "boxes"]

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
        queries, keys = _line(q, TILE_Q), _line(k, self.tile_k)
        patterns = np.empty(len(tiles), np.int64)
        for at in range(0, len(tiles), _TILES_AT_ONCE):
            row, column = tiles[at : at + _TILES_AT_ONCE].T
            group, words = _only_tokens(_words(mask, queries, keys, row, column), queries, keys, row, column)
            pairs = queries.sizes[row] * keys.sizes[column]
            patterns[at : at + _TILES_AT_ONCE] = self._stored(group, words, pairs)
        return patterns

    def _stored(self, group: Ints, words: Words, pairs: Ints) -> Ints:
        counts = _ONES[words.view(np.uint8)].sum(1)
        partial = (counts[group] > 0) & (counts[group] < pairs)
        number = np.full(len(words), -1)
        fresh = []
        for one in np.unique(group[partial]).tolist():
            content = hashlib.blake2b(words[one].tobytes(), digest_size=16).digest()
            if content not in self._known:
                self._known[content] = len(self._known)
                fresh.append(one)
            number[one] = self._known[content]
        self._words.append(words[fresh])
        self.counts = np.concatenate([self.counts, counts[fresh]])
        return np.where(partial, number[group], np.where(counts[group] == 0, self.EMPTY, self.FULL))


class Boxes(NamedTuple):
    low: Ints  # least position in each block
    stop: Ints  # one past the greatest
    real: NDArray[np.bool_]  # whether every position holds a token


def boxes(positions: Ints, tile: int) -> list[Boxes]:
    """The least box of positions around each tile, each two tiles, each four, ... up to all."""
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


class _Line(NamedTuple):
    """Queries or keys, tile by tile."""

    positions: Ints  # (tiles, tile), the last one filled up with -1: no token, so nothing seen
    box: Boxes
    sizes: Ints  # positions in each tile
    real: NDArray[np.bool_]  # whether the tile is whole and every position of it holds a token
    ordered: NDArray[np.bool_]  # whether, moreover, its positions count up by one


def _line(positions: Ints, tile: int) -> _Line:
    count = -(-len(positions) // tile)
    filled = np.full(count * tile, -1, np.int64)
    filled[: len(positions)] = positions
    tiles = filled.reshape(-1, tile)
    sizes = np.minimum(tile, len(positions) - tile * np.arange(count))
    real = np.all(tiles >= 0, axis=1)
    return _Line(tiles, boxes(positions, tile)[0], sizes, real, real & np.all(np.diff(tiles, axis=1) == 1, axis=1))


def _words(mask: Mask, queries: _Line, keys: _Line, row: Ints, column: Ints) -> tuple[Ints, Words]:
    """The bits of tiles: a group for each tile, and the words of each group. Group 0 is nothing, group 1 is everything."""
    of_q, of_k = queries.box, keys.box
    answer = mask.tile(of_q.low[row], of_q.stop[row], of_k.low[column], of_k.stop[column])
    undecided = np.flatnonzero(answer == PARTIAL)
    group = np.where(answer == FULL, 1, 0)
    ends = np.zeros((2, keys.positions.shape[1]), np.uint64)
    ends[1] = ~ends[1]
    if not len(undecided):
        return group, ends
    row, column = row[undecided], column[undecided]
    if isinstance(mask, Not):
        inside, words = _words(mask.inner, queries, keys, row, column)
        words = ~words
    elif isinstance(mask, Join):
        inside, words = _joined(
            mask,
            _words(mask.left, queries, keys, row, column),
            _words(mask.right, queries, keys, row, column),
        )
    else:
        inside, sample = _alike(mask, queries, keys, row, column)
        words = _read(mask, queries.positions[row[sample]], keys.positions[column[sample]])
    group[undecided] = inside + 2
    return group, np.concatenate([ends, words])


def _joined(mask: Join, left: tuple[Ints, Words], right: tuple[Ints, Words]) -> tuple[Ints, Words]:
    pairs, group = np.unique(left[0] * len(right[1]) + right[0], return_inverse=True)
    one, two = left[1][pairs // len(right[1])], right[1][pairs % len(right[1])]
    return group, (one & two if isinstance(mask, And) else one | two)


def _only_tokens(bits: tuple[Ints, Words], queries: _Line, keys: _Line, row: Ints, column: Ints) -> tuple[Ints, Words]:
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


def _alike(mask: Mask, queries: _Line, keys: _Line, row: Ints, column: Ints) -> tuple[Ints, Ints]:
    """Groups of tiles with the same bits, by the mask's signature: the group of each tile, and one tile of each group."""
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


def _read(mask: Mask, q: Ints, k: Ints) -> Words:
    """(n, tile_k) words, pair by pair: the queries are (n, 64), the keys (n, tile_k)."""
    words = np.empty(k.shape, np.uint64)
    step = max(1, _PAIRS_AT_ONCE // (TILE_Q * k.shape[1]))
    for at in range(0, len(q), step):
        chunk = slice(at, at + step)
        seen = np.broadcast_to(mask._sees(q[chunk, None, :], k[chunk, :, None]), (*k[chunk].shape, TILE_Q))
        words[chunk] = np.packbits(seen, axis=2, bitorder="little").view(np.uint64)[:, :, 0]
    return words
