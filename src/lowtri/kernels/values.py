"""What the functions of kernels pass to one another: a value is an address in memory with what one has to know to read it.

The compiler takes values apart, so that they cost nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

Address: TypeAlias = int


class Tokens(NamedTuple):
    """``count`` queries or keys of one head, from ``first`` on."""

    batch: int
    head: int  # of the queries, or of the keys
    first: int
    count: int


class KeyTile(NamedTuple):
    """The keys of a tile that some query of a tile sees, and which query sees which: as :class:`Tokens`, with their mask."""

    batch: int
    head: int
    first: int
    count: int
    mask_words: Address  # a word for each key, with a bit for each of 64 queries; 0: every query sees every key


class Span(NamedTuple):
    """Keys of a tile, counted from its first, to before ``stop``."""

    first: int
    stop: int


class Spans(NamedTuple):
    """The keys that each 16 queries of a tile see, as the first key and one past the last, four times.

    ``groups`` is the number of parts into which products with these queries are divided.
    """

    edges: tuple[int, int, int, int, int, int, int, int]
    groups: int


class Rows(NamedTuple):
    """Rows of an array, or of the compute dtype: steps in numbers."""

    at: Address
    row: int  # from one row to the next
    number: int  # from one number of a row to the next
    count: int
    size: int  # numbers in a row


class Matrix(NamedTuple):
    """The left operand of a product: steps in elements, a number or a pair of bf16."""

    at: Address
    row: int  # from one row to the next
    element: int  # from one element of a row to the next


class Packed(NamedTuple):
    """Rows of neighbouring elements: the right operand and the result of a product, scores, weights."""

    at: Address
    row: int  # from one row to the next, in elements; in bytes where a function says so


class RegisterBlock(NamedTuple):
    """A product of so many rows as are in registers at once, while its code is made: all numbers are values of LLVM."""

    a: Matrix
    b: Packed
    c: Packed
    depth: Any
    ahead: Any  # bytes from the rows of A or B to the lines that are prefetched
    last: Any  # row; those past it repeat it


class Sums(NamedTuple):
    """The sums of a tile of queries, the output before the division or dQ: see :mod:`lowtri.kernels.rows`."""

    at: Address
    count: int  # queries
    size: int  # numbers of a query


class Softmax(NamedTuple):
    """The state of the online softmax of some queries: addresses of a number for each, and their outputs."""

    shift: Address
    total: Address
    output: Sums


class Packing(NamedTuple):
    """Memory to pack a tile of rows in."""

    target: Address
    copy: Address  # scratch, for a copy of the rows
    zeros: Address  # a row of 0
