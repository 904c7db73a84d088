"""Parses and checks a GGUF header: metadata fields and the locations of the tensors.

    magic, version, number of tensors, number of fields
    fields    name, type, value; an array is a type, a count and the items
    tensors   name, dimensions (the innermost first), type of block, offset
    padding to the alignment; then the tensors

Every count and length is checked against the rest of the file before use, and tensors may not overlap, so time and memory are
proportional to the file's size even for hostile files. The reader of the package gguf makes no such checks, and takes twenty
times as long (dev/LOG.md).

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Header", "StoredTensor", "read_header"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_NAMES = 2**16  # fields, and tensors; the largest models have a few thousand
_MOST_ITEMS = 2**23  # in all arrays together; a vocabulary of 262,144 with its merges has 1.3 million


class StoredTensor(NamedTuple):
    """The location of a tensor in the file."""

    shape: tuple[int, ...]  # in NumPy's order, in elements rather than blocks
    kind: int  # a GGMLQuantizationType
    start: int  # in bytes, from the beginning of the file
    row: int  # bytes of a row, the innermost dimension

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape[:-1]) * self.row

    def blocks(self, file: Any) -> NDArray[np.uint8]:
        """Its bytes, (..., row)."""
        return np.frombuffer(file, np.uint8, self.end - self.start, self.start).reshape(*self.shape[:-1], self.row)


class Header(NamedTuple):
    """A file's metadata."""

    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(file: Any, blocks: Mapping[int, tuple[int, int]]) -> Header:
    """Read the header at the beginning of a file.

    Args:
        file: its bytes, or an mmap.
        blocks: for each block type, its number of elements and its size in bytes.

    Raises:
        ValueError: if the header is invalid; the message says why.
    """
    reader = _Reader(file)
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, where 2 and 3 are read (in little-endian byte order)")
    n_tensors, n_fields = reader.number("Q"), reader.number("Q")
    for count, what in ((n_tensors, "tensors"), (n_fields, "fields")):
        if count > _MOST_NAMES:
            raise ValueError(f"it announces {count} {what}, where at most {_MOST_NAMES} are read")
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        _add(fields, reader.text(), reader.value(reader.number("I")))
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name, dimensions = reader.text(), reader.number("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions, where 1 to 4 are possible")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        _add(entries, name, (shape, reader.number("I"), reader.number("Q")))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment}, which is not a power of two")
    begin = -(-reader.position // alignment) * alignment
    tensors = {
        name: _located(name, shape, kind, begin + offset, blocks) for name, (shape, kind, offset) in entries.items()
    }
    previous, end = "", 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:  # overlapping tensors would let a small file describe a large model
            raise ValueError(f"the tensors {previous} and {name} overlap")
        previous, end = name, tensor.end
        if end > len(file):
            raise ValueError(f"the tensor {name} ends at byte {end}, the file at {len(file)}")
    return Header(fields, tensors)


class _Reader:
    """Reads one value after the other; reading past the end raises."""

    def __init__(self, file: Any) -> None:
        self.file, self.position, self.items = file, 0, 0

    def take(self, size: int) -> bytes:
        if size > len(self.file) - self.position:
            raise ValueError(
                f"{size} bytes are announced at byte {self.position}, {len(self.file) - self.position} are left"
            )
        self.position += size
        return bytes(self.file[self.position - size : self.position])

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a field has the type {kind}, which does not exist")
        inner, count = self.number("I"), self.number("Q")
        self.items += count
        if self.items > _MOST_ITEMS:
            raise ValueError(f"its arrays announce {self.items} items, where at most {_MOST_ITEMS} are read")
        if inner in _NUMBERS:
            return list(self.numbers(_NUMBERS[inner], count))
        if inner != _TEXT:
            raise ValueError(f"an array has items of the type {inner}, which are neither numbers nor texts")
        return [self.text() for _ in range(count)]

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(f"<{form}")))


def _add(entries: dict[str, Any], name: str, value: Any) -> None:
    if name in entries:
        raise ValueError(f"{name} occurs twice in it")
    entries[name] = value


def _located(
    name: str, shape: tuple[int, ...], kind: int, start: int, blocks: Mapping[int, tuple[int, int]]
) -> StoredTensor:
    if kind not in blocks:
        raise ValueError(f"the tensor {name} has the type {kind}, which does not exist")
    elements, size = blocks[kind]
    if min(shape) < 1 or shape[-1] % elements:
        raise ValueError(f"the tensor {name} is {shape}, which is not a whole number of blocks of {elements}")
    return StoredTensor(shape, kind, start, shape[-1] // elements * size)
