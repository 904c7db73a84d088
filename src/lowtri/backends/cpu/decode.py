"""Few queries against many keys: a call that is prepared once, for any number of keys and at any positions.

Each token that is generated brings one key more and other positions. What does not depend on these (the kernel, sizes, options, the
layout of scratch memory) is prepared once; :meth:`CpuDecode.with_keys` adds the rest: how many keys, where they lie, which of them are
visible, and into how many parts they are split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends import GradientSource, Prepared, PreparedForAnyKeys
from lowtri.backends.cpu.launch import (
    KernelArrays,
    Launch,
    Selection,
    Strides,
    contiguous_strides,
    decode_work,
    threads_for,
    to_dtype,
)
from lowtri.kernels.abi import CACHE_KEYS, DECODE
from lowtri.ops.call import Call, Inputs, Placement, Result

# The fields of the record that depend on the keys.
_VARYING = ("nk", "first_key", "tasks", "visible", "visible_strides", "k_strides", "v_strides")


class CpuDecode(PreparedForAnyKeys):
    """The decode kernel of a call that needs no gradients. It has no plan: a table says which keys are visible, if not all are."""

    def __init__(self, call: Call, selection: Selection) -> None:
        layout = KernelArrays(call, selection)
        self.call, self.layout = call, layout
        sizes = call.sizes
        self.head_sizes = (sizes.head_dim, sizes.value_dim)
        self.shape = shape = (*call.q.shape[:3], call.v.shape[3])
        self.new_output = layout.new(shape, None, layout.dtype)
        self.plain_shape = call.of_user_rank(shape)
        self.plain_strides = contiguous_strides(self.plain_shape)
        # Of the log-sum-exp, and of what it loses to rounding.
        self.lse_parts = 2 if call.return_weights or call.return_received else int(bool(call.return_lse))
        self.new_lse = layout.new((self.lse_parts, *shape[:3])) if self.lse_parts else None
        self.groups = sizes.batch * sizes.kv_heads
        self.work_per_key = decode_work(call, layout.spec.input_bytes)
        self.launches: dict[tuple[int, int], Launch] = {}  # by threads, and parts of the keys
        given = call.positions_given
        q_positions, k_positions = call.q_positions if given else None, call.k_positions if given else None
        self.own = self._with_keys(
            Placement(sizes.nk, q_positions, k_positions, call.bounds), call.k.strides, call.v.strides
        )
        # With the table and the positions: those of this call, and of the newest run.
        positions = sum(x.nbytes for x in (q_positions, k_positions) if x is not None)
        self.nbytes = 8192 + 3 * (self.own.nbytes + positions)

    def gradient_source(self) -> GradientSource:
        return GradientSource.LSE

    def checks_values(self) -> bool:
        return False

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        return self.own.run(inputs)

    def plain(self) -> Callable[[Any, Any, Any], Any] | None:
        return self.own.plain()

    def with_keys(self, placement: Placement, k_strides: Strides, v_strides: Strides) -> Prepared | None:
        """This call for other keys and positions; None where the strides of the keys are for another kernel."""
        for new, old in ((k_strides, self.call.k.strides), (v_strides, self.call.v.strides)):
            if new[3] != old[3] or (self.layout.spec.packs_bf16 and (new[0] | new[1] | new[2]) % 2):
                return None
        return self._with_keys(placement, k_strides, v_strides)

    def _with_keys(self, placement: Placement, k_strides: Strides, v_strides: Strides) -> _AtKeys:
        nk = placement.nk
        visible = self.call.visible_at(placement)  # (B|1, Hq|1, Nq, Nk)
        first_key = 0
        by_row = by_head = 0
        if visible is not None:  # under a window: only the keys from the first to the last visible one
            first_key, stop, is_full = _run_of_keys(visible)
            nk, visible = stop - first_key, None if is_full else np.ascontiguousarray(visible[..., first_key:stop])
        if visible is not None:
            by_row = visible.strides[0] if visible.shape[0] > 1 else 0
            by_head = visible.strides[1] if visible.shape[1] > 1 else 0
        threads = threads_for(nk * self.work_per_key, self.call.threads, self.call.is_numpy)
        parts = max(1, min(2 * threads // self.groups, -(-nk // CACHE_KEYS)))
        if self.layout.cast:  # to contiguous copies
            k_strides, v_strides = (
                contiguous_strides((*self.call.k.shape[:2], placement.nk, size)) for size in self.head_sizes
            )
        launch = self.launches.get((threads, parts)) or self._prepare(threads, parts)
        table = 0 if visible is None else visible.ctypes.data
        numbers = nk, first_key, self.groups * parts, table, by_row, by_head, *k_strides, *v_strides
        return _AtKeys(self, launch, launch.fields_with(numbers), visible, placement.nk)

    def _prepare(self, threads: int, parts: int) -> Launch:
        """The launch for this division of the work; what each run writes is 0 here."""
        fields = self.layout.fields() | {"tasks": self.groups * parts, "parts": parts, "first_key": 0, "visible": 0}
        fields["visible_strides"] = {"b": 0, "h": 0}
        launch = Launch(DECODE, self.layout.spec, fields, threads, varying=_VARYING)
        return self.launches.setdefault((threads, parts), launch)


class _AtKeys(Prepared):
    """A call for certain keys: the fields of the record that depend on them, and the table that one of these is the address of."""

    def __init__(
        self, decode: CpuDecode, launch: Launch, prepared: bytes, visible: NDArray[np.bool_] | None, nk: int
    ) -> None:
        self.decode = decode
        self.launch = launch
        self.prepared = prepared
        self.visible = visible
        self.nk = nk
        self.nbytes = 0 if visible is None else visible.nbytes

    def gradient_source(self) -> GradientSource:
        return self.decode.gradient_source()

    def checks_values(self) -> bool:
        return self.decode.checks_values()

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        decode = self.decode
        layout, address = decode.layout, decode.layout.address
        if layout.cast and inputs.k.shape[2] > self.nk:  # buffers of a cache
            inputs = inputs._replace(k=inputs.k[:, :, : self.nk], v=inputs.v[:, :, : self.nk])
        arrays = inputs if layout.unchanged else layout.inputs(inputs)
        output, sums = decode.new_output(arrays.q), None
        lse = lse_residual = 0
        if decode.new_lse is not None:
            sums = decode.new_lse(arrays.q)
            lse = address(sums)
            lse_residual = lse + sums.nbytes // 2 if decode.lse_parts == 2 else 0
        self.launch.run_at(
            self.prepared,
            address(arrays.q),
            address(arrays.k),
            address(arrays.v),
            address(output),
            lse,
            lse_residual,
            0 if arrays.bias is None else layout.bias_address(arrays.bias, layout.bias_strides),
            0 if arrays.sinks is None else address(arrays.sinks),
        )
        output = to_dtype(output, decode.call.dtype) if layout.cast else output
        return Result(output, None, None if sums is None else sums[0], sums)

    def plain(self) -> Callable[[Any, Any, Any], Any] | None:
        if self.decode.new_lse is not None or not self.decode.layout.is_plain:
            return None
        decode = self.decode
        return self.launch.on_three_tensors(self.prepared, decode.plain_shape, decode.plain_strides, keep=self.visible)


def _run_of_keys(visible: NDArray[np.bool_]) -> tuple[int, int, bool]:
    """The keys that anybody sees in a table (B|1, Hq|1, Nq, Nk), from the first to before the last one's end; and whether everybody
    sees all of these. Where nobody sees a key, these are all keys."""
    nk = visible.shape[3]
    alone = visible.size == nk
    some = (visible.reshape(nk) if alone else visible.any(axis=(0, 1, 2))).nonzero()[0]
    if len(some) == 0:
        return 0, nk, False
    start, stop = int(some[0]), int(some[-1]) + 1
    return start, stop, len(some) == stop - start and (alone or bool(visible[..., start:stop].all()))
