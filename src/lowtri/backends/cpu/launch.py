"""The kernels, launched: room for their results, their descriptor, and the team of threads.

Each function takes the call and its arrays in the dtype that the kernel reads, and gives back what it wrote.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any

import numpy as np

from lowtri.backends.cpu.descriptor import Fields, Table, address, broadcast, of_call, of_plan, strided
from lowtri.masks.plan import Plan
from lowtri.ops.call import Call, dtype_name

__all__ = ["Launch", "backward", "empty", "forward", "in_pairs", "is_half", "kernel_file", "room_for_lse"]


def forward(call: Call, plan: Plan, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output (B, Hq, Nq, Dv) in the dtype of q, and log-sum-exp (B, Hq, Nq) where it is wanted: float32 beside bf16."""
    kernel, code, room = _forward(dtype_name(q.dtype))
    rows, heads, nq, d = q.shape
    output, lse = empty(q, (rows, heads, nq, v.shape[3])), room_for_lse(q) if want_lse else None
    fields = of_call(call, q, k, v, bias, sinks) | of_plan(plan) | strided("q", q) | strided("o", output, "bhn")
    fields["tasks"] = rows * heads * plan.rows
    fields["lse"] = 0 if lse is None else address(lse)
    Launch(code, kernel.FIELDS, fields, room(d, v.shape[3]), call.threads).run_once()
    return output, lse


def in_pairs(q: Any, k: Any, v: Any) -> bool:
    """Whether bf16 can be read in pairs: the CPU has the instruction, rows are packed, sizes whole vectors."""
    if not is_half(q):
        return False
    from lowtri.kernels.target import BF16

    sizes = q.shape[3] % 16 == 0 and q.shape[3] >= 32 and v.shape[3] % 16 == 0
    return BF16 and sizes and _even(q) and _even(k) and _even(v)


def _even(x: Any) -> bool:
    b, h, n, d = x.stride()
    return bool(d == 1 and (b | h | n) % 2 == 0)


def backward(
    call: Call, plan: Plan, q: Any, k: Any, v: Any, bias: Any, lse: Any, d_output: Any, delta: Any
) -> tuple[Any, ...]:
    """dq, dk, dv and d bias (or None), in the dtype of ``lse``, from the output's gradient and delta = sum of dO * O (B, Hq, Nq)."""
    kernel, code, room, padded = _backward(dtype_name(q.dtype))
    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    threads = call.threads
    # One task owns a key/value head; where that leaves threads idle its queries are dealt out, each part with sums of its own.
    parts = min(1 if rows * kv_heads % threads == 0 or rows * kv_heads >= 4 * threads else threads, plan.rows)
    if is_half(q) and not _even(d_output):
        d_output = d_output.contiguous()
    dq = lse.new_empty((rows, heads, nq, d))
    dk, dvalue = (lse.new_zeros((parts, rows, kv_heads, nk, padded(size))) for size in (d, dv))
    fields = of_call(call, q, k, v, bias) | of_plan(plan) | strided("q", q) | strided("do", d_output)
    fields |= {"tasks": parts * rows * kv_heads, "parts": parts, "lse": address(lse), "delta": address(delta)}
    fields |= {"dq": address(dq), "dk": address(dk), "dvalue": address(dvalue)}
    d_bias = None
    if call.bias is not None and call.bias.requires_grad:
        d_bias = lse.new_zeros((parts, rows, heads, *bias.shape[2:]))
        fields |= broadcast("dbias", d_bias, "pbhqk")
    Launch(code, kernel.FIELDS, fields, room(d, dv), threads).run_once()
    dk, dvalue = dk.sum(0)[..., :d] * call.scale, dvalue.sum(0)[..., :dv]
    return dq, dk, dvalue, None if d_bias is None else d_bias.sum(0).sum_to_size(bias.shape)


@cache
def _forward(dtype: str) -> tuple[Any, Any, Any]:
    """The table of fields, the kernel for a dtype, and what room it takes."""
    table = kernel_file("forward")
    if dtype == "float64":
        return table, kernel_file("double").forward_double, kernel_file("double").room
    return table, table.forward_half if dtype == "bfloat16" else table.forward, table.room


@cache
def _backward(dtype: str) -> tuple[Any, Any, Any, Any]:
    """The same for the gradients, and how long a row of dK or dV is."""
    table = kernel_file("backward")
    if dtype == "float64":
        double = kernel_file("double_backward")
        return table, double.backward_double, double.room, double.padded
    return table, table.backward_half if dtype == "bfloat16" else table.backward, table.room, table.padded


@cache
def kernel_file(name: str) -> Any:
    """A file of the kernels: loaded late, since Numba is."""
    return importlib.import_module(f"lowtri.kernels.{name}")


class Launch:
    """A kernel laid out to run: its descriptor, a room for each thread, and scratch for all together.

    Args:
        names: the kernel's fields, in order.  fields: their values, by name; the rest is 0.
        room: bytes for each thread.  scratch: bytes for all together, by field.
        zeros: the scratch that begins as 0, and that a run leaves so.
    """

    def __init__(
        self,
        kernel: Any,
        names: tuple[str, ...],
        fields: Fields,
        room: int,
        threads: int,
        scratch: dict[str, int] | None = None,
        zeros: str = "",
    ) -> None:
        self.kernel, self.threads, room = kernel, min(threads, fields["tasks"]), _whole(room)
        shared = {name: _whole(size) for name, size in (scratch or {}).items()}
        try:
            self.desk = _desks.pop()
        except IndexError:  # the first launch, or one beside another
            self.desk = _Desk()
        at = self.desk.reserve(self.threads * room + sum(shared.values()))
        fields["room"], fields["room_bytes"] = at, room
        at += self.threads * room
        for name, size in shared.items():
            fields[name] = at
            if name == zeros:
                ctypes.memset(at, 0, size)
            at += size
        self.values = self.desk.table.values(names, fields)

    def run(self) -> None:
        """Run it, from the first task on."""
        self.desk.table.write(self.values)
        kernel_file("workers").run_team(self.kernel, self.desk.table.address, self.threads)

    def run_once(self) -> None:
        """Run it and hand its memory on."""
        self.run()
        if self.desk.size <= _KEPT:
            _desks.append(self.desk)


class _Desk:
    """Memory that one launch works in and a later one can use again: the descriptor, and rooms."""

    def __init__(self) -> None:
        self.table, self.size = Table(), 0

    def reserve(self, size: int) -> int:
        """The address of at least ``size`` bytes, a multiple of 64."""
        if size > self.size:
            self._memory, self.size = np.empty(size + 64, np.uint8), size
            self._address = _whole(address(self._memory))
        return self._address


_KEPT = 2**24  # bytes of a desk that is worth keeping
_desks: list[_Desk] = []  # as many as ever worked at once; each is in one launch at a time


def _whole(size: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size // 64) * 64


def is_half(x: Any) -> bool:
    return dtype_name(x.dtype) == "bfloat16"


def empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


def room_for_lse(q: Any) -> Any:
    """Room for the log-sum-exp (B, Hq, Nq), float32 beside half types."""
    if not is_half(q):
        return empty(q, q.shape[:3])
    import torch

    return q.new_empty(q.shape[:3], dtype=torch.float32)
