"""Parses a GGUF header: metadata fields and the locations of the tensors.

    magic, version, how many tensors, how many fields
    fields    name, type, value; an array is a type, a count and the items
    tensors   name, dimensions (the innermost first), type of block, offset
    padding to the alignment; then the tensors

Every count and length is checked against the rest of the file before use, and tensors may not overlap, so time and memory are
proportional to the file's size even for hostile files.

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Header", "Stored", "read_header"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_NAMES = 2**16  # fields, and tensors; the largest models have a few thousand
_MOST_ITEMS = 2**23  # in all arrays together; a vocabulary of 262,144 with its merges has 1.3 million


class Stored(NamedTuple):
    """A tensor of the file."""

    shape: tuple[int, ...]  # in NumPy's order, in elements rather than blocks
    kind: int  # a GGMLQuantizationType
    start: int  # in bytes, from the beginning of the file
    row: int  # bytes of a row, the innermost dimension

    def bytes_of(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Its bytes, (..., row)."""
        shape = (*self.shape[:-1], self.row)
        return data[self.start : self.start + math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class Header:
    """A file's metadata."""

    fields: dict[str, Any]
    tensors: dict[str, Stored]


def read_header(data: NDArray[np.uint8], blocks: Mapping[int, tuple[int, int]]) -> Header:
    """Read the header at the beginning of ``data``.

    Args:
        data: the bytes of the file, uint8 (size,), mapped or in memory.
        blocks: for each block type, its number of elements and its size in bytes.

    Raises:
        ValueError: if the header is invalid; the message says why.
    """
    file = _Bytes(data)
    if bytes(file.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = file.number("I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, where 2 and 3 are read (in little-endian byte order)")
    n_tensors, n_fields = file.number("Q"), file.number("Q")
    for count, what in ((n_tensors, "tensors"), (n_fields, "fields")):
        if count > _MOST_NAMES:
            raise ValueError(f"it announces {count} {what}, where at most {_MOST_NAMES} are read")
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        _add(fields, file.text(), file.value(file.number("I")))
    waiting: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name, dimensions = file.text(), file.number("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions, where 1 to 4 are possible")
        shape = tuple(file.number("Q") for _ in range(dimensions))[::-1]
        _add(waiting, name, (shape, file.number("I"), file.number("Q")))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment}, which is no power of two")
    begin = -(-file.at // alignment) * alignment
    tensors = {name: _stored(name, *one, begin, blocks) for name, one in waiting.items()}
    _lie_apart(tensors, len(data))
    return Header(fields, tensors)


class _Bytes:
    """Sequential reader; reading past the end raises."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.at, self.items = data, 0, 0

    def take(self, size: int) -> NDArray[np.uint8]:
        if size > len(self.data) - self.at:
            raise ValueError(f"{size} bytes are announced at byte {self.at}, {len(self.data) - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)).tobytes())[0]

    def text(self) -> str:
        return bytes(self.take(self.number("Q"))).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a field has the type {kind}, which is none")
        inner, count = self.number("I"), self.number("Q")
        self.items += count
        if self.items > _MOST_ITEMS:
            raise ValueError(f"its arrays announce {self.items} items, where at most {_MOST_ITEMS} are read")
        if inner in _NUMBERS:
            form = np.dtype(_NUMBERS[inner]).newbyteorder("<")
            return np.frombuffer(self.take(count * form.itemsize).tobytes(), form).tolist()
        if inner != _TEXT:
            raise ValueError(f"an array has items of the type {inner}, which are no numbers and no texts")
        return [self.text() for _ in range(count)]


def _add(to: dict[str, Any], name: str, value: Any) -> None:
    if name in to:
        raise ValueError(f"{name} stands in it twice")
    to[name] = value


def _stored(
    name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int, blocks: Mapping[int, tuple[int, int]]
) -> Stored:
    if kind not in blocks:
        raise ValueError(f"the tensor {name} has the type {kind}, which is none")
    numbers, size = blocks[kind]
    if min(shape) < 1 or shape[-1] % numbers:
        raise ValueError(f"the tensor {name} is {shape}, which is no whole number of blocks of {numbers}")
    return Stored(shape, kind, begin + offset, shape[-1] // numbers * size)


def _lie_apart(tensors: Mapping[str, Stored], end: int) -> None:
    """Overlapping tensors would let a small file describe a large model."""
    last, before = 0, ""
    for name, one in sorted(tensors.items(), key=lambda item: item[1].start):
        if one.start < last:
            raise ValueError(f"the tensors {before} and {name} overlap")
        last, before = one.start + math.prod(one.shape[:-1]) * one.row, name
        if last > end:
            raise ValueError(f"the tensor {name} ends at byte {last}, the file at {end}")
