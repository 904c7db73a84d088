"""The weights of a call, and what each key received, by a kernel of their own after that of the output."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtri.backends import LostSums
from lowtri.backends.cpu.launch import KernelArrays, tile_threads, to_dtype
from lowtri.kernels.abi import KEYS
from lowtri.masks.plan import Plan
from lowtri.ops.call import Inputs

_TASKS = 4  # for each thread: a run of key tiles has more or fewer visible pairs than others


# From these on, m * log(2) * log2(e), rounded, may differ from m by more than the logarithm of a number of keys. In float32 the two
# factors give m again, wherever it does not overflow.
_GREATEST_SUM = {4: 0.6 * float(np.finfo(np.float32).max), 8: 2.0**70}  # by the bytes of a number


def check_sums(sums: Any) -> None:
    """Raise :class:`LostSums` unless weights can be computed from these log-sum-exps, (lse_parts, B, Hq, Nq)."""
    lse = (sums if isinstance(sums, np.ndarray) else sums.detach().numpy())[0]  # torch takes several times as long
    limit = _GREATEST_SUM[lse.itemsize]
    if lse.min() > -limit and lse.max() < limit:  # else it is huge, or infinite since a query sees nothing
        return
    size = np.abs(lse)
    if np.any((size >= limit) & (size < np.inf)):
        raise LostSums


class CpuWeights:
    """The launch of the kernel for one call.

    Args:
        wide: weights are returned in the compute dtype.
    """

    def __init__(self, layout: KernelArrays, plan: Plan, *, wide: bool = False) -> None:
        self.layout, call = layout, layout.call
        sizes = call.sizes
        batch = sizes.batch
        heads = sizes.heads
        nk = sizes.nk
        threads = tile_threads("weights", call, plan)
        parts = 1 if threads == 1 else max(1, min(-(-_TASKS * threads // (batch * heads)), -(-nk // KEYS)))
        fields = layout.tile_fields(plan) | {"parts": parts, "wide": int(wide), "tasks": batch * heads * parts}
        self.launch = layout.launch("weights", fields, plan)
        dtype = layout.compute_dtype if wide else layout.dtype
        self.new_weights = layout.new((batch, heads, sizes.nq, nk), None, dtype) if call.return_weights else None
        self.new_received = layout.new_zeros((batch, heads, nk)) if call.return_received else None
        self.casts = layout.cast and not wide

    def run(self, inputs: Inputs, lse: int, lse_residual: int) -> tuple[Any, Any]:
        """The weights (B, Hq, Nq, Nk), and what each key received (B, Hq, Nk); None where the call does not return them.

        ``inputs`` are as the kernels read them, ``lse`` and ``lse_residual`` addresses.
        """
        layout = self.layout
        q = inputs.q
        bias = inputs.bias
        weights = None if self.new_weights is None else self.new_weights(q)
        received = None if self.new_received is None else self.new_received(q)
        address = layout.address
        self.launch.run_at(
            self.launch.prepared,
            address(q),
            address(inputs.k),
            lse,
            lse_residual,
            0 if bias is None else layout.bias_address(bias, layout.bias_strides),
            0 if weights is None else address(weights),
            0 if received is None else address(received),
        )
        if weights is not None and self.casts:
            weights = to_dtype(weights, layout.call.dtype)
        return weights, received
