"""Few queries against many keys: a call that is prepared once, for any number of keys and at any positions.

Each token that is generated brings one key more and other positions. What does not depend on these (the kernel, sizes, options, the
layout of scratch memory) is kept from token to token; :meth:`CpuDecode.at` sets the rest: how many keys, where they lie, which of
them are visible, and into how many parts they are split.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends.base import Prepared
from lowtri.backends.cpu.launch import Launch, decode_threads, word
from lowtri.backends.cpu.layout import ArrayLayout, Selection, address, empty, packed, strides, to_dtype
from lowtri.kernels.abi import CACHE_KEYS, DECODE
from lowtri.ops.call import Call, Inputs, Keys, Result

_VARYING = ("nk", "first_key", "tasks", "visible")
_WORDS = [
    *(word(DECODE, name) for name in _VARYING),
    *(word(DECODE, "visible_strides", part) for part in "bh"),
    *(word(DECODE, f"{x}_strides", part) for x in "kv" for part in "bhnd"),
]


class CpuDecode(Prepared):
    """The decode kernel of a call that needs no gradients. It has no plan: a table says which keys are visible, if not all are."""

    from_output = True  # of the same call where gradients are recorded
    any_keys = True
    launch: Launch

    def __init__(self, call: Call, selection: Selection) -> None:
        self.call, self.reading, self.spec = call, ArrayLayout(call, selection), selection.spec
        self.input_bytes, self.in_pairs = self.spec.input_bytes, self.spec.per_word == 2
        self.output_shape = (*call.q.shape[:3], call.v.shape[3])
        self.output_strides, self.lse_strides = packed(self.output_shape), packed(self.output_shape[:3])
        self.nbytes = 8192
        exact = call.sinks is None or call.sinks.dtype == self.reading.compute_dtype
        self.as_it_is = exact and not (call.is_numpy or self.reading.cast or call.bias)
        self.as_it_is &= call.q.strides == packed(call.q.shape)
        batch, _, kv_heads, _, nk, d, dv = call.sizes
        self.groups, self.head_sizes = batch * kv_heads, (d, dv)
        self.division: tuple[int, int] | None = None  # threads, and parts of the keys
        given = call.positions_given
        q_positions, k_positions = call.q_positions if given else None, call.k_positions if given else None
        self._prepare(Keys(nk, call.k.strides, call.v.strides, q_positions, k_positions, call.bounds))
        # With the table and the positions: those of this call, and of the newest run.
        positions = sum(x.nbytes for x in (q_positions, k_positions) if x is not None)
        self.nbytes += 3 * (self.table_bytes + positions)

    def at(self, keys: Keys) -> CpuDecode | None:
        """This call for other keys and positions; None where the strides of the keys are for another kernel."""
        for new, old in ((keys.k_strides, self.keys.k_strides), (keys.v_strides, self.keys.v_strides)):
            if new[3] != old[3] or (self.in_pairs and (new[0] | new[1] | new[2]) % 2):
                return None
        other: CpuDecode = object.__new__(CpuDecode)
        other.__dict__.update(self.__dict__)
        other._prepare(keys)
        return other

    def run(self, inputs: Inputs) -> Result:
        call, reading = self.call, self.reading
        q, k, v, bias, sinks = inputs
        if self.as_it_is:
            output = q.new_empty_strided(self.output_shape, self.output_strides)
        else:
            q, k, v, bias, sinks = reading.inputs(inputs)
            output = empty(q, self.output_shape, self.output_strides, reading.dtype)
        lse: Any = None
        if call.return_lse:
            lse = empty(q, call.q.shape[:3], self.lse_strides, reading.compute_dtype)
        first = reading.bias_address(bias, reading.bias_strides) if bias is not None else 0
        if call.is_numpy:
            self.launch.run_at(*map(address, (q, k, v, output, lse)), first, address(sinks))
        else:
            sums, sink = 0 if lse is None else lse.data_ptr(), 0 if sinks is None else sinks.data_ptr()
            self.launch.run_at(q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr(), sums, first, sink)
        return Result(to_dtype(output, call.dtype) if reading.cast else output, None, lse)

    def _prepare(self, keys: Keys) -> None:
        """The launch for these keys: a copy of the one before it with other numbers, unless the work is divided otherwise."""
        self.keys, call = keys, self.call
        nk, visible, first_key = keys.nk, call.visible_of(keys), 0  # visible: (B|1, Hq|1, Nq, Nk)
        by_row = by_head = 0
        if visible is not None:  # under a window: only the keys from the first to the last visible one
            first_key, stop, is_full = _run_of_keys(visible)
            nk, visible = stop - first_key, None if is_full else np.ascontiguousarray(visible[..., first_key:stop])
        if visible is not None:
            (rows, heads, *_), (by_row, by_head, *_) = visible.shape, visible.strides
            by_row, by_head = by_row if rows > 1 else 0, by_head if heads > 1 else 0
        self.table_bytes = 0 if visible is None else visible.nbytes
        threads = decode_threads(call, nk, self.input_bytes)
        parts = max(1, min(2 * threads // self.groups, -(-nk // CACHE_KEYS)))
        k_strides, v_strides = keys.k_strides, keys.v_strides
        if self.reading.cast:  # to contiguous copies
            shape = (*call.k.shape[:2], keys.nk)
            k_strides, v_strides = (packed((*shape, size)) for size in self.head_sizes)
        varying = nk, first_key, self.groups * parts, 0 if visible is None else visible.ctypes.data
        numbers = *varying, by_row, by_head, *k_strides, *v_strides
        if self.division == (threads, parts):
            self.launch = self.launch.changed(_WORDS, numbers, visible)
            return
        self.division = threads, parts
        fields = self.reading.fields() | {"parts": parts, **dict(zip(_VARYING, varying, strict=True))}
        fields["visible_strides"] = {"b": by_row, "h": by_head}
        fields |= {"k_strides": strides(k_strides), "v_strides": strides(v_strides)}
        self.launch = Launch(DECODE, self.spec, fields, threads, visible)


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
