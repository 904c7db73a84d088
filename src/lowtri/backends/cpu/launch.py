"""How a kernel reads the arrays of a call, and its launch: its record, its threads, and memory.

A launch is prepared from everything about a call except its addresses. It can run many times, also from several threads at once.

A call has as many threads as its work is worth, at most as many as it may use. A thread whose core is busy with something else starts
up to 8 ms late, and the others wait for it. So a small call runs on one thread, as torch's own operations do below their grain size.
The number depends on the call alone, so equal calls give equal results.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from array import array
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.kernels import abi
from lowtri.kernels.library import code
from lowtri.kernels.spec import BYTES, KernelSpec, symbol
from lowtri.kernels.threads import run_team
from lowtri.masks.plan import TILE_Q, Plan
from lowtri.ops.call import ArrayInfo, Call, Inputs
from lowtri.ops.dropout import kept_scale, key_words, threshold

Fields: TypeAlias = dict[str, Any]  # of a kernel's record, named as in :mod:`lowtri.kernels.abi`
Strides: TypeAlias = tuple[int, ...]  # in elements


class Launch:
    """A kernel ready to run. Thread-safe: each run has a record of its own.

    Args:
        fields: the record's fields but for the run's and the scratch memory's, by name.
        keep: the owner of the memory that the fields point to.
        varying: names of fields that differ between runs, whose numbers each run is given (:meth:`fields_with`).
    """

    def __init__(
        self,
        record: abi.Abi,
        spec: KernelSpec,
        fields: Fields,
        threads: int,
        keep: Any = None,
        varying: Sequence[str] = (),
    ) -> None:
        self.threads, self._keep = max(1, min(threads, fields["tasks"])), keep
        layout, scratch_bytes, (_, zeros) = record.layout(spec, fields, self.threads)
        start, end = record.run_format.size, record.dtype.itemsize
        # Scratch memory follows the record. The part that begins at 0 lies between them, so that one write sets it, too.
        self._scratch = abi.aligned(end + zeros)
        if zeros:
            layout["offsets"][record.zeros] = end - self._scratch
        self.prepared = record.record_bytes(fields | layout)
        self._bytes = self._scratch + scratch_bytes
        self._places = [place for name in varying for place in _places_of_field(record.dtype, name, start)]
        self._code = code(symbol(record.name, spec))
        # What a run writes: two counters, the addresses of scratch memory and of arrays, the prepared fields, zeros.
        self._write = struct.Struct(f"{start // 8}q{len(self.prepared)}s{zeros}x").pack_into
        # With the first six arrays alone, what follows their addresses is the same in each run.
        self._absent = start - 8 * 9
        self._write_six = struct.Struct(f"9q{self._absent + len(self.prepared)}s{zeros}x").pack_into

    def fields_with(self, numbers: Sequence[int]) -> bytes:
        """The prepared fields where the varying ones have these numbers."""
        fields = array("q", self.prepared)
        for place, number in zip(self._places, numbers, strict=True):
            fields[place] = number
        return fields.tobytes()

    def run_at(self, prepared: bytes, *addresses: int) -> None:
        """Run the kernel with these prepared fields on arrays at these addresses, in the order of the ABI, 0 for absent ones."""
        try:
            memory = _pool.pop()
            if memory.size < self._bytes:
                memory = _Memory(self._bytes)
        except IndexError:
            memory = _Memory(self._bytes)
        self._write(memory.bytes, 0, 0, 0, memory.address + self._scratch, *addresses, prepared)
        if self.threads == 1:
            self._code.call(memory.address)
        else:
            run_team(self._code, memory.address, self.threads)
        if memory.size <= _POOLED_BYTES:
            _pool.append(memory)

    def on_three_tensors(
        self,
        prepared: bytes,
        shape: Strides,
        steps: Strides,
        new_sums: Callable[[Any], Any] | None = None,
        keep: Any = None,
    ) -> Callable[[Any, Any, Any], Any]:
        """A function of the tensors q, k and v that makes the output, and runs the kernel as :meth:`run_at` without other arrays.

        Inside a model, where weights have emptied the caches, each further function of Python costs a microsecond. So this is one, and
        has what it reads in its variables.

        Args:
            shape, steps: of the output.
            new_sums: makes the log-sum-exp and what it loses to rounding, for gradients; the function then returns a result's fields.
            keep: the owner of memory that the prepared fields point to.
        """
        rest, write = bytes(self._absent) + prepared, self._write_six
        size, scratch = self._bytes, self._scratch
        threads = self.threads
        code = self._code
        call = self._code.call

        # The last argument is never passed: it keeps what the addresses in the fields point to.
        def run(q: Any, k: Any, v: Any, keep: Any = (self, keep)) -> Any:
            output, sums = q.new_empty_strided(shape, steps), None
            lse = lse_residual = 0
            if new_sums is not None:
                sums = new_sums(q)
                lse = sums.data_ptr()
                lse_residual = lse + sums.nbytes // 2
            try:
                memory = _pool.pop()
                if memory.size < size:
                    memory = _Memory(size)
            except IndexError:
                memory = _Memory(size)
            where = memory.address
            q_at = q.data_ptr()
            k_at = k.data_ptr()
            v_at = v.data_ptr()
            write(memory.bytes, 0, 0, 0, where + scratch, q_at, k_at, v_at, output.data_ptr(), lse, lse_residual, rest)
            if threads == 1:
                call(where)
            else:
                run_team(code, where, threads)
            if memory.size <= _POOLED_BYTES:
                _pool.append(memory)
            return output if sums is None else (output, None, None, sums)

        return run


def _places_of_field(record: np.dtype[Any], name: str, start: int) -> range:
    """The places of a field's numbers, counted from the byte ``start`` of the record."""
    fields: Any = record.fields
    kind, offset = fields[name][:2]
    first = int(offset - start) // 8
    return range(first, first + kind.itemsize // 8)


class _Memory:
    """Memory of one run, reused by later ones: the record, then the scratch memory. It starts at a cache line."""

    __slots__ = "address", "bytes", "size"

    def __init__(self, size: int) -> None:
        memory = np.empty(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        # Writing through a memoryview reads none of NumPy's code.
        self.bytes = memory.data[start:]
        self.address = memory.ctypes.data + start
        self.size = size


_POOLED_BYTES = 2**26  # larger blocks are freed after the run
_pool: list[_Memory] = []


# Which kernel, and how it reads the arrays.

_DECODED_QUERIES = 16  # fewer are decoded: the other kernels compute groups of 16 queries whole
# With products on tile registers a group takes less time than 16 queries one by one: half of it, estimated from the numbers of
# instructions; not measured on a CPU with AMX yet.
_DECODED_QUERIES_AMX = 8


class Selection(NamedTuple):
    """The kernel of a call: its family, forward (with its gradients) or decode; and whether q, k and v are cast to float32 for it."""

    family: str
    spec: KernelSpec
    cast: bool


def select(call: Call) -> Selection:
    """The kernel that runs a call: decode for few queries without gradients, if their rows can be read in whole vectors.

    The decode kernel does not drop weights.
    """
    tiles, arrays = select_tiles(call), [call.q, call.k, call.v]
    limit = _DECODED_QUERIES_AMX if tiles.spec.uses_amx else _DECODED_QUERIES
    if call.q.shape[2] < limit and not (call.needs_grad or call.dropout):
        dtype = "float32" if tiles.cast else call.dtype
        arrays = [contiguous(x) for x in arrays] if tiles.cast else [contiguous(call.q), call.k, call.v]
        decode = _spec_of("decode", dtype, arrays)
        if decode is not None:
            return Selection("decode", decode, tiles.cast)
    return tiles


def select_tiles(call: Call) -> Selection:
    """The kernel of whole tiles for a call."""
    arrays = [call.q, call.k, call.v]
    spec = _spec_of("forward", call.dtype, arrays)
    if spec is not None:
        return Selection("forward", spec, False)
    spec = _spec_of("forward", "float32", [contiguous(x) for x in arrays])
    assert spec is not None, "contiguous arrays in float32 are read on every CPU"
    return Selection("forward", spec, True)


def _spec_of(family: str, dtype: str, arrays: list[ArrayInfo]) -> KernelSpec | None:
    """The spec of the kernel that reads arrays of this dtype and layout, or None."""
    # Imported late: the import finds out which CPU this is, and raises if LOWTRI_ISA names another.
    from lowtri.kernels.target import spec_of

    return spec_of(family, dtype, *arrays)


class KernelArrays:
    """The arrays of a call as the kernels read them.

    Half types are read directly, or cast to float32 if the CPU lacks the instructions. The decode kernel reads contiguous queries.

    Attributes:
        cast: whether q, k and v are cast to float32.
        spec: of the kernel; the backward kernel has that of the forward.
        dtype, compute_dtype: of the arrays that the kernels read, and of sums, log-sum-exps, biases and gradients.
        arrays: q, k and v.
        unchanged: whether the kernels read all arrays as they are.
        q_positions, key_words: of a call with dropout, which its kernels read.
        is_plain: and these are three tensors, with an output that takes no large pages.
        address: the address of an array's first element.
    """

    def __init__(self, call: Call, selection: Selection) -> None:
        family, self.spec, self.cast = selection
        self.call, self.decodes = call, family == "decode"
        self.compute_dtype = self.spec.compute_dtype
        self.dtype = "float32" if self.cast else call.dtype
        self.arrays = [contiguous(x) for x in (call.q, call.k, call.v)] if self.cast else [call.q, call.k, call.v]
        if self.decodes:
            self.arrays[0] = contiguous(call.q)
        others = [x for x in (call.bias, call.sinks) if x is not None]
        self.bias_strides = () if call.bias is None else self._strides_of_bias(call.bias)
        self.unchanged = not self.cast and all(map(self._keeps, others))
        # A dimension of one number has any stride.
        steps = zip(call.q.shape, call.q.strides, contiguous_strides(call.q.shape), strict=True)
        self.unchanged &= not self.decodes or all(size == 1 or step == dense for size, step, dense in steps)
        output_bytes = prod(call.q.shape[:3]) * call.v.shape[3] * BYTES[self.dtype]
        self.is_plain = self.unchanged and not (call.is_numpy or others or call.dropout) and output_bytes < LARGE
        self.address: Callable[[Any], int] = _address_of_array if call.is_numpy else _address_of_tensors()
        self.q_positions = np.ascontiguousarray(call.q_positions) if call.dropout else np.empty((1, 0), np.int64)
        self.key_words = key_words(call.k_positions) if call.dropout else np.empty((1, 0), np.uint32)

    def inputs(self, inputs: Inputs) -> Inputs:
        """The arrays in dtypes that the kernels read; ``inputs`` themselves where they are ``unchanged``, which callers ask first."""
        q, k, v = inputs[:3]
        if self.cast:
            q, k, v = (to_dtype(x, "float32") for x in (q, k, v))
        elif self.decodes:
            q = np.ascontiguousarray(q) if self.call.is_numpy else q.contiguous()
        bias, sinks = (None if x is None else to_dtype(x, self.compute_dtype) for x in (inputs.bias, inputs.sinks))
        return Inputs(q, k, v, bias, sinks)

    def bias_address(self, bias: Any, steps: Strides) -> int:
        """The address of the bias, or of its gradient, of the first query and the first key."""
        start = 0
        if self.call.distance_low is not None:
            first = self.call.first_distance
            assert first is not None, "supports() has rejected other positions"
            start = first * steps[-1] * self.spec.number_bytes
        return self.address(bias) + start

    def new(self, shape: Strides, steps: Strides | None = None, dtype: str | None = None) -> Callable[[Any], Any]:
        """A function that makes arrays of this shape, strides and dtype, of the kind of its argument; NumPy's are contiguous."""
        kind: Any = dtype or self.compute_dtype
        if self.call.is_numpy:
            return lambda like: np.empty(shape, kind)
        import torch

        steps = steps or contiguous_strides(shape)
        if kind == self.dtype:  # naming the dtype takes a microsecond

            def make(like: Any) -> Any:
                return like.new_empty_strided(shape, steps)

        else:
            other = getattr(torch, kind)

            def make(like: Any) -> Any:
                return like.new_empty_strided(shape, steps, dtype=other)

        def make_large(like: Any) -> Any:
            x = make(like)
            ask_for_large_pages(x.data_ptr(), x.nbytes)
            return x

        return make_large if prod(shape) * BYTES[kind] >= LARGE else make

    def new_zeros(self, shape: Strides) -> Callable[[Any], Any]:
        """The same for contiguous arrays of zeros in the compute dtype."""
        if self.call.is_numpy:
            return lambda like: np.zeros(shape, self.compute_dtype)
        import torch

        kind = getattr(torch, self.compute_dtype)
        return lambda like: like.new_zeros(shape, dtype=kind)

    def fields(self) -> Fields:
        """The fields that every kernel reads: sizes, strides, options."""
        call = self.call
        sizes = call.sizes
        q, k, v = (x.strides for x in self.arrays)
        return {
            **{name: getattr(sizes, name) for name in ("batch", "heads", "nq", "nk", "head_dim", "value_dim")},
            "group": sizes.heads // sizes.kv_heads,
            **{"q_strides": stride_fields(q), "k_strides": stride_fields(k), "v_strides": stride_fields(v)},
            "bias_strides": bias_fields(call, None if call.bias is None else call.bias.shape, self.bias_strides),
            "options": {"scale": call.scale, "softcap": call.softcap or 0.0},
        }

    def tile_fields(self, plan: Plan) -> Fields:
        """The fields that the kernels of tiles read."""
        return self.fields() | {
            "plan": plan_fields(plan),
            "dropout": dropout_fields(self.call, self.q_positions, self.key_words),
        }

    def launch(self, family: str, fields: Fields, plan: Plan, varying: Sequence[str] = ()) -> Launch:
        """The launch of a kernel of tiles."""
        threads = tile_threads(family, self.call, plan)
        return Launch(getattr(abi, family.upper()), self.spec, fields, threads, plan, varying)

    def _strides_of_bias(self, bias: ArrayInfo) -> Strides:
        """Of the bias as the kernels read it."""
        return bias.strides if self._keeps(bias) else contiguous_strides(bias.shape)

    def _keeps(self, x: ArrayInfo) -> bool:
        return x.dtype == self.compute_dtype


def plan_fields(plan: Plan) -> Fields:
    """The fields of the plan."""
    masks_b, masks_h = plan.mask_index.shape
    arrays = ("mask_index", "row_start", "runs", "tile_bits", "bits")
    strides = {"mask_index_b": masks_h if masks_b > 1 else 0, "mask_index_h": int(masks_h > 1)}
    return {name: _address_of_array(getattr(plan, name)) for name in arrays} | strides | {"rows": plan.rows}


def dropout_fields(call: Call, q_positions: NDArray[np.int64], words: NDArray[np.uint32]) -> Fields:
    """The fields of dropout, all 0 without; the positions of the queries are (B|1, Nq), the words of the keys (B|1, Nk)."""
    below = threshold(call.dropout)
    if below == 0:  # no draw is less
        return dict.fromkeys(abi.DROPOUT.names or (), 0)
    return {
        "q_positions": _address_of_array(q_positions),
        "q_positions_b": q_positions.shape[1] if len(q_positions) > 1 else 0,
        "key_words": _address_of_array(words),
        "key_words_b": words.shape[1] if len(words) > 1 else 0,
        "last_dropped": below - 1,
        "share": 1 - call.dropout,
        "scale": kept_scale(call.dropout),
    }


def bias_fields(call: Call, shape: Sequence[int] | None, steps: Strides, axes: Sequence[str] = "bhqk") -> Fields:
    """The strides of a bias of this call, or of its gradient: 0 along broadcast axes, and without a bias.

    One over distances q - k ascends with q and descends with k.
    """
    if shape is None:
        return dict.fromkeys(axes, 0)
    fields = {axis: step if size > 1 else 0 for axis, size, step in zip(axes, shape, steps, strict=True)}
    return fields if call.distance_low is None else fields | {"q": steps[-1], "k": -steps[-1]}


# Arrays, NumPy's or torch's, and their strides.


def stride_fields(of: Strides) -> Fields:
    """The strides of an array (B, H, N, D)."""
    return dict(zip("bhnd", of, strict=True))


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous array of this shape."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def like_array(x: ArrayInfo, size: int) -> Strides:
    """The strides of an array without gaps that has the sizes of x (B, H, N, D) but for D, and the order of x in memory."""
    heads, n = x.shape[1:3]
    head_step, token_step = x.strides[1:3]
    if head_step < token_step and heads > 1:  # tokens before heads
        return heads * n * size, size, heads * size, 1
    return heads * n * size, n * size, size, 1


def contiguous(x: ArrayInfo) -> ArrayInfo:
    """The layout of a contiguous array of the same shape."""
    return x._replace(strides=contiguous_strides(x.shape))


def to_dtype(x: Any, dtype: str) -> Any:
    """The array in this dtype: itself, or a contiguous copy."""
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else np.ascontiguousarray(x, dtype)
    import torch

    kind = getattr(torch, dtype)
    return x if x.dtype is kind else x.detach().to(kind, memory_format=torch.contiguous_format)


def _address_of_array(x: Any) -> int:
    return int(x.ctypes.data)


def _address_of_tensors() -> Callable[[Any], int]:
    import torch

    return torch.Tensor.data_ptr


# Multiplications for each thread: about as long as to wake a thread takes, tens of thousands of cycles on any CPU, so that a factor of
# two in it matters little. On an AMD EPYC (Zen 4) two threads take 0.6 to 0.75 of the time where the work is worth them by this number,
# and 0.75 to 1.2 of it where it is not. It chooses no algorithm.
WORK_PER_THREAD = 2**20
BYTE_COST = 2  # a byte of keys and values takes as long as so many multiplications
# For NumPy arrays: without torch each run starts its threads, some ten times as long as to wake them.
THREAD_START_COST = 16
_PRODUCTS = {"forward": 2, "backward": 5, "weights": 1}  # of matrices


def tile_threads(family: str, call: Call, plan: Plan) -> int:
    """For the tiles that the kernel of this family computes: forward, backward or weights."""
    sizes = call.sizes
    tiles = int((plan.runs[:, 1] - plan.runs[:, 0]).sum())  # of all masks, each taken to be as frequent as the others
    pairs = min(sizes.nq * sizes.nk, tiles * TILE_Q * plan.tile_k // plan.masks)
    numbers = sizes.head_dim + sizes.value_dim
    work = sizes.batch * sizes.heads * pairs * numbers * _PRODUCTS[family] // 2
    return threads_for(work, call.threads, call.is_numpy)


def decode_work(call: Call, number_bytes: int) -> int:
    """Of few queries, for each key: what is multiplied or read, whichever takes longer."""
    sizes = call.sizes
    rows = max(sizes.heads * sizes.nq, sizes.kv_heads * number_bytes * BYTE_COST)
    return sizes.batch * (sizes.head_dim + sizes.value_dim) * rows


def threads_for(multiplications: int, most: int, is_numpy: bool) -> int:
    """How many threads work is worth, of the most that it may have."""
    grain = WORK_PER_THREAD * THREAD_START_COST if is_numpy else WORK_PER_THREAD
    return max(1, min(most, multiplications // grain))


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
