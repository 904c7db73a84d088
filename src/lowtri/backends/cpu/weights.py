"""The weights of a call, and what each key received, by a kernel of their own after that of the output."""

from __future__ import annotations

from typing import Any

from lowtri.backends.cpu.launch import ArrayLayout, tile_threads, to_dtype
from lowtri.kernels.abi import KEYS
from lowtri.masks.plan import Plan
from lowtri.ops.call import Inputs

_TASKS = 4  # for each thread: a run of key tiles has more or fewer visible pairs than others


class CpuWeights:
    """The launch of the kernel for one call. Both results begin at 0: it writes the tiles that the mask does not hide."""

    def __init__(self, layout: ArrayLayout, plan: Plan) -> None:
        self.layout, call = layout, layout.call
        batch, heads, _, nq, nk, _, _ = call.sizes
        threads = tile_threads("weights", call, plan)
        parts = 1 if threads == 1 else max(1, min(-(-_TASKS * threads // (batch * heads)), -(-nk // KEYS)))
        fields = layout.tile_fields(plan) | {"parts": parts, "tasks": batch * heads * parts}
        self.launch = layout.launch("weights", fields, plan)
        shapes = (batch, heads, nq, nk), (batch, heads, nk)
        self.new_weights = layout.new_zeros(shapes[0], layout.dtype) if call.return_weights else None
        self.new_received = layout.new_zeros(shapes[1], layout.compute_dtype) if call.return_received else None

    def run(self, inputs: Inputs, lse: int, lse_low: int) -> tuple[Any, Any]:
        """The weights (B, Hq, Nq, Nk), and what each key received (B, Hq, Nk); None where the call does not return them.

        ``inputs`` are as the kernels read them, ``lse`` and ``lse_low`` addresses.
        """
        layout, (q, k, _, bias, _) = self.layout, inputs
        weights = None if self.new_weights is None else self.new_weights(q)
        received = None if self.new_received is None else self.new_received(q)
        address = layout.address
        self.launch.run_at(
            self.launch.prepared,
            address(q),
            address(k),
            lse,
            lse_low,
            0 if bias is None else layout.bias_address(bias, layout.bias_strides),
            0 if weights is None else address(weights),
            0 if received is None else address(received),
        )
        if weights is not None and layout.cast:
            weights = to_dtype(weights, layout.call.dtype)
        return weights, received
