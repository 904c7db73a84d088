"""A kernel's launch: its record, its threads, and memory: scratch memory, and large pages for new tensors.

A launch is prepared from everything about a call except its addresses. It can run many times, also from several threads at once.

A call has as many threads as its work is worth, at most as many as it may use. A thread whose core is busy with something else starts
up to 8 ms late, and the others wait for it. So a small call runs on one thread, as torch's own operations do below their grain size.
The number depends on the call alone, so equal calls give equal results.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from lowtri.kernels.abi import Abi, aligned
from lowtri.kernels.library import code
from lowtri.kernels.spec import KernelSpec, symbol
from lowtri.kernels.threads import run_team
from lowtri.masks.plan import TILE_Q, Plan
from lowtri.ops.call import Call

Fields: TypeAlias = dict[str, Any]  # of a kernel's record, named as in :mod:`lowtri.kernels.abi`


class Launch:
    """A kernel ready to run. Thread-safe: each run has a record of its own.

    Args:
        fields: the record's fields but for the run's and the scratch memory's, by name.
        keep: the owner of the memory that the fields point to.
    """

    def __init__(self, abi: Abi, spec: KernelSpec, fields: Fields, threads: int, keep: Any = None) -> None:
        self.threads, self._keep = max(1, min(threads, fields["tasks"])), keep
        layout, self._bytes, self._zeros = abi.layout(spec, fields, self.threads)
        self._prepared, self._start = abi.pack(fields | layout), abi.run_format.size
        self._format = struct.Struct(f"{len(self._prepared) // 8}q")
        self._values = list(self._format.unpack(self._prepared))
        self._write, self._names, self._pick = abi.run_format.pack_into, abi.addresses, itemgetter(*abi.addresses)
        self._code = code(symbol(abi.name, spec))
        self._call = self._code.call
        # A pool of records and their addresses; a record is used by one run at a time.
        self._records: list[tuple[Any, int]] = []

    def changed(self, words: Sequence[int], numbers: Sequence[int], keep: Any) -> Launch:
        """This launch with other numbers in words of the record (:func:`word`), none of which changes threads or scratch memory."""
        other: Launch = object.__new__(Launch)
        other.__dict__.update(self.__dict__)
        values = self._values.copy()
        for place, number in zip(words, numbers, strict=True):
            values[place] = number
        other._values, other._prepared = values, self._format.pack(*values)
        other._keep, other._records = keep, []
        return other

    def run(self, **addresses: int) -> None:
        """Run the kernel on arrays at these addresses, one for each name of the ABI; 0 for an absent array.

        Raises:
            KeyError: if an address is missing or its name is unknown.
        """
        values = self._pick(addresses)
        if len(addresses) != len(values):
            raise KeyError(f"the kernel has no arrays {sorted(set(addresses) - set(self._names))}")
        self.run_at(*values)

    def run_at(self, *addresses: int) -> None:
        """Run the kernel with the addresses in the order of the ABI, which saves small calls some microseconds."""
        try:
            record, where = self._records.pop()
        except IndexError:
            record = ctypes.create_string_buffer(bytes(self._start) + self._prepared)
            where = ctypes.addressof(record)
        scratch = _take_scratch(self._bytes)
        self._write(record, 0, 0, 0, scratch.address, *addresses)
        offset, size = self._zeros
        if size:
            ctypes.memset(scratch.address + offset, 0, size)
        if self.threads == 1:
            self._call(where)
        else:
            run_team(self._code, where, self.threads)
        self._records.append((record, where))
        if scratch.size <= _POOLED_BYTES:
            _scratch.append(scratch)


def word(abi: Abi, name: str, part: str = "") -> int:
    """Which word of the prepared fields is a field, or a part of one."""
    fields: Any = abi.dtype.fields
    kind, start = fields[name][:2]
    start += kind.fields[part][1] if part else 0
    return int(start - abi.run_format.size) // 8


class _Scratch:
    """Scratch memory of one run, reused by later ones; it starts at a cache line."""

    def __init__(self, size: int) -> None:
        self._memory, self.size = np.empty(size + 64, np.uint8), size
        self.address = aligned(self._memory.ctypes.data)


_POOLED_BYTES = 2**26  # larger blocks are freed after the run
_scratch: list[_Scratch] = []  # a pool


def _take_scratch(size: int) -> _Scratch:
    try:
        scratch = _scratch.pop()
    except IndexError:
        return _Scratch(size)
    return scratch if scratch.size >= size else _Scratch(size)


# Multiplications for each thread: about as long as to wake a thread takes, tens of thousands of cycles on any CPU, so that a factor of
# two in it matters little. On an AMD EPYC (Zen 4) two threads take 0.6 to 0.75 of the time where the work is worth them by this number,
# and 0.75 to 1.2 of it where it is not. It chooses no algorithm.
GRAIN = 2**20
_READ = 2  # a byte of keys and values takes as long as so many multiplications
_STARTED = 16  # NumPy arrays: without torch each run starts its threads, some ten times as long as to wake them
_PRODUCTS = {"forward": 2, "backward": 5}  # of matrices


def tile_threads(family: str, call: Call, plan: Plan) -> int:
    """For the tiles that the kernel of this family computes: forward or backward."""
    batch, heads, _, nq, nk, d, dv = call.sizes
    tiles = int((plan.runs[:, 1] - plan.runs[:, 0]).sum())  # of all masks, each taken to be as frequent as the others
    pairs = min(nq * nk, tiles * TILE_Q * plan.tile_k // len(plan.mask_pairs))
    return _threads(call, batch * heads * pairs * (d + dv) * _PRODUCTS[family] // 2)


def decode_threads(call: Call, keys: int, number_bytes: int) -> int:
    """For few queries and so many keys: what is multiplied or read, whichever takes longer."""
    batch, heads, kv_heads, nq, _, d, dv = call.sizes
    return _threads(call, batch * keys * (d + dv) * max(heads * nq, kv_heads * number_bytes * _READ))


def _threads(call: Call, multiplications: int) -> int:
    grain = GRAIN * _STARTED if call.is_numpy else GRAIN
    return max(1, min(call.threads, multiplications // grain))


# Pages of 2 MB for large new tensors, on Linux. The system gives out memory page by page as it is first written, and clears each page,
# so that writing a new output of 32 MB once takes 12 ms with pages of 4 KB and 3.5 ms with pages of 2 MB (AMD EPYC, Zen 4). NumPy asks
# for them itself, from the same size on.
LARGE = 2**22  # bytes

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # on Linux only
_madvise = None if _ADVICE is None else ctypes.CDLL(None).madvise
if _madvise is not None:
    _madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """Ask for them in this new memory. The system may refuse, which changes nothing."""
    if _madvise is not None:
        skipped = -address % mmap.PAGESIZE
        _madvise(address + skipped, max(0, nbytes - skipped), _ADVICE)
