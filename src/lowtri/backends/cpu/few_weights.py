"""Few queries against many keys, with their weights or what each key received: the decode kernel, then the kernel of weights.

That one computes groups of 16 queries. So the queries of all heads that share a key/value head are stacked as its queries, where the
mask and the bias do not tell heads apart: the arrays lie in memory so. There are few weights then, and received ones are their sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.backends import GradientSource, Prepared
from lowtri.backends.cpu.decode import CpuDecode
from lowtri.backends.cpu.launch import KernelArrays, Selection, contiguous_strides, select_tiles, to_dtype
from lowtri.backends.cpu.weights import CpuWeights, check_sums
from lowtri.kernels.abi import KEYS
from lowtri.ops.call import ArrayInfo, Call, Inputs, Result


class CpuDecodeWithWeights(Prepared):
    """A call that needs no gradients and returns weights or received weights."""

    def __init__(self, call: Call, selection: Selection) -> None:
        self.call, self.decode = call, CpuDecode(call, selection)
        self.stacked = _stacked(call)
        self.layout = KernelArrays(self.stacked, select_tiles(self.stacked))
        plan = self.stacked.plan(KEYS)
        self.weights = CpuWeights(self.layout, plan, wide=True)
        self.nbytes = self.decode.nbytes + plan.nbytes

    def gradient_source(self) -> GradientSource:
        return self.decode.gradient_source()

    def checks_values(self) -> bool:
        return False

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        call, layout = self.call, self.layout
        result, q = self.decode.run(inputs), inputs.q
        rows = np.ascontiguousarray(q) if call.is_numpy else q.contiguous()
        arrays = layout.inputs(inputs._replace(q=rows.reshape(self.stacked.q.shape)))
        sums = result.state
        if inputs.bias is not None:
            check_sums(sums)
        lse = layout.address(sums)
        stacked, _ = self.weights.run(arrays, lse, lse + sums.nbytes // 2)
        weights: Any = stacked.reshape(*call.q.shape[:3], call.k.shape[2])
        received = weights.sum(2) if call.return_received else None
        weights = to_dtype(weights, call.dtype) if call.return_weights else None
        lse_of_call = result.lse if call.return_lse else None
        return Result(result.output, weights, lse_of_call, received=received)


def _stacked(call: Call) -> Call:
    """The call that returns weights whose queries are those of all heads of a group."""
    sizes = call.sizes
    positions = call.q_positions
    mask_batch = call.mask.batch
    joins = call.bias is None and (len(mask_batch) < 2 or mask_batch[1] == 1)
    stacked = (sizes.kv_heads, call.group * sizes.nq) if joins else (sizes.heads, sizes.nq)
    shape = (sizes.batch, *stacked, sizes.head_dim)
    return replace(
        call,
        q=ArrayInfo(shape, contiguous_strides(shape), call.dtype, False),
        q_positions=np.tile(positions, (1, call.group)) if joins else positions,
        positions_given=call.positions_given or joins,
        return_weights=True,
        return_received=False,
    )
