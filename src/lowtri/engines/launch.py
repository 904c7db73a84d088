"""The kernels, launched: their results, their record, scratch memory, and the team of threads.

A launch is prepared from everything about a call but where its numbers lie, and can run again and again, from several threads at once.
The functions take the call and its arrays in a dtype that the kernels read, and give back what the kernel wrote.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from lowtri.engines.descriptor import Fields, address, broadcast, of_call, packed, steps, strides
from lowtri.engines.plans import plan_of
from lowtri.kernels.abi import BACKWARD, FORWARD, Abi, aligned
from lowtri.ops.call import Call, dtype_name

__all__ = [
    "PreparedLaunch",
    "backward",
    "empty",
    "empty_lse",
    "forward",
    "kernel_file",
    "readable",
    "spec_for",
    "threads_of",
]


class PreparedLaunch:
    """A kernel laid out to run. Safe among threads: a run has a record of its own.

    Args:
        fields: the record's fields but for the run's and the scratch memory's, by name.
        scratch, shared: bytes of the parts of the scratch memory, of each thread and for all together.
        zeros: the part of ``shared`` that begins as 0.
        keep: what owns the memory that fields point to.
    """

    def __init__(
        self,
        abi: Abi,
        spec: Any,
        fields: Fields,
        threads: int,
        scratch: dict[str, int],
        shared: dict[str, int] | None = None,
        zeros: str | None = None,
        keep: Any = None,
    ) -> None:
        threads_file, shared = kernel_file("threads"), shared or {}
        self.threads, self._keep = max(1, min(threads, fields["tasks"])), keep
        layout = abi.layout(scratch, shared, self.threads)
        self._bytes = layout.pop("bytes")
        self._zeros = (layout["offsets"][zeros], shared[zeros]) if zeros else None
        self._prepared, self._start = abi.pack(fields | layout), abi.run_format.size
        self._write, self._names, self._pick = abi.run_format.pack_into, abi.addresses, itemgetter(*abi.addresses)
        self._code = threads_file.compiled(getattr(kernel_file(abi.name), abi.name), abi, spec)
        self._team = threads_file
        self._records: list[Any] = []  # as many as ever ran at once; each is in one run at a time

    def run(self, **addresses: int) -> None:
        """Run it on arrays at these addresses, one for each name of the ABI; 0 for an array that the call does not have.

        Raises:
            KeyError: if an address is missing, or its name is no array of the kernel.
        """
        values = self._pick(addresses)
        if len(addresses) != len(values):
            raise KeyError(f"the kernel has no arrays {sorted(set(addresses) - set(self._names))}")
        try:
            record = self._records.pop()
        except IndexError:
            record = ctypes.create_string_buffer(bytes(self._start) + self._prepared)
        scratch = _take_scratch(self._bytes)
        self._write(record, 0, 0, 0, scratch.address, *values)
        if self._zeros is not None:
            offset, size = self._zeros
            ctypes.memset(scratch.address + offset, 0, size)
        self._team.run_team(self._code, ctypes.addressof(record), self.threads)
        self._records.append(record)
        if scratch.size <= _KEPT:
            _scratch.append(scratch)


class _Scratch:
    """Memory that one run works in and a later one can use again; it begins at a whole cache line."""

    def __init__(self, size: int) -> None:
        self._memory, self.size = np.empty(size + 64, np.uint8), size
        self.address = aligned(self._memory.ctypes.data)


_KEPT = 2**24  # bytes that are worth keeping
_scratch: list[_Scratch] = []  # as many as ever were in use at once


def _take_scratch(size: int) -> _Scratch:
    try:
        scratch = _scratch.pop()
    except IndexError:
        return _Scratch(size)
    return scratch if scratch.size >= size else _Scratch(size)


def forward(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output (B, Hq, Nq, Dv) in the dtype of q, and log-sum-exp (B, Hq, Nq) where it is wanted: at least float32."""
    output, lse = empty(q, (*q.shape[:3], v.shape[3])), empty_lse(q) if want_lse else None
    launch = prepare_forward(call, q, k, v, bias)
    arrays = {"q": q, "k": k, "v": v, "o": output, "lse": lse, "bias": bias, "sinks": sinks}
    launch.run(**{name: address(x) for name, x in arrays.items()})
    return output, lse


def prepare_forward(call: Call, q: Any, k: Any, v: Any, bias: Any) -> PreparedLaunch:
    """The forward kernel for a call, and for all whose arrays lie as these do."""
    kernel, spec = kernel_file("forward"), spec_for("forward", q, k, v)
    rows, heads, nq, d = q.shape
    kept = plan_of(call, kernel.KEYS)
    fields = of_call(call, q, k, v, bias) | {"plan": kept.fields, "o_strides": packed((rows, heads, nq, v.shape[3]))}
    fields["tasks"] = rows * heads * kept.plan.rows
    return PreparedLaunch(FORWARD, spec, fields, threads_of(q), kernel.scratch(spec, d, v.shape[3]), keep=kept)


def backward(call: Call, q: Any, k: Any, v: Any, bias: Any, lse: Any, d_output: Any, delta: Any) -> tuple[Any, ...]:
    """dq, dk, dv and d bias (or None), in the dtype of ``lse``, from the output's gradient and delta = sum of dO * O (B, Hq, Nq)."""
    kernel, spec = kernel_file("backward"), spec_for("forward", q, k, v)
    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    kept, threads = plan_of(call, kernel.KEYS), threads_of(q)
    # One task owns a key/value head; where that leaves threads idle its queries are dealt out, each part with sums of its own.
    parts = min(1 if rows * kv_heads % threads == 0 or rows * kv_heads >= 4 * threads else threads, kept.plan.rows)
    if spec.rows == "pairs" and not _array(d_output).even:
        d_output = d_output.contiguous()
    dq = lse.new_empty((rows, heads, nq, d))
    dk, dv_sums = (lse.new_zeros((parts, rows, kv_heads, nk, kernel.padded(spec, size))) for size in (d, dv))
    d_bias = None
    if bias is not None and call.bias.requires_grad:
        d_bias = lse.new_zeros((parts, rows, heads, *bias.shape[2:]))
    fields = of_call(call, q, k, v, bias) | {"plan": kept.fields, "tasks": parts * rows * kv_heads, "parts": parts}
    fields |= {"d_output_strides": strides(d_output)}
    d_bias_strides = broadcast(d_bias, ("part", "b", "h", "q", "k"))
    launch = PreparedLaunch(
        BACKWARD, spec, fields | {"d_bias_strides": d_bias_strides}, threads, kernel.scratch(spec, d, dv), keep=kept
    )
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "lse": lse, "delta": delta, "d_output": d_output}
    arrays |= {"dq": dq, "dk": dk, "dv_sums": dv_sums, "d_bias": d_bias}
    launch.run(**{name: address(x) for name, x in arrays.items()})
    dk, d_values = dk.sum(0)[..., :d] * call.scale, dv_sums.sum(0)[..., :dv]
    return dq, dk, d_values, None if d_bias is None else d_bias.sum(0).sum_to_size(bias.shape)


@cache
def kernel_file(name: str) -> Any:
    """A file of the kernels: loaded late, since Numba is."""
    return importlib.import_module(f"lowtri.kernels.{name}")


def spec_for(family: str, q: Any, k: Any, v: Any) -> Any:
    """The spec of the kernel that reads these arrays, or None where none does."""
    return kernel_file("select").spec_of(family, dtype_name(q.dtype), _array(q), _array(k), _array(v))


def readable(q: Any, k: Any, v: Any) -> bool:
    """Whether a kernel reads these arrays as they are; else they are cast to float32."""
    return spec_for("forward", q, k, v) is not None


def _array(x: Any) -> Any:
    return kernel_file("select").Array(steps(x), x.shape[3])


def threads_of(q: Any) -> int:
    if isinstance(q, np.ndarray):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import torch

    return torch.get_num_threads()


def empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


def empty_lse(q: Any) -> Any:
    """Memory for the log-sum-exp (B, Hq, Nq): float32 for half types."""
    if dtype_name(q.dtype) not in ("float16", "bfloat16"):
        return empty(q, q.shape[:3])
    if isinstance(q, np.ndarray):
        return np.empty(q.shape[:3], np.float32)
    import torch

    return q.new_empty(q.shape[:3], dtype=torch.float32)
