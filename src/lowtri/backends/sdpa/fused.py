"""The arguments of torch's fused attention other than the arrays, prepared before the arrays are known."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.backends.base import Prepared
from lowtri.compat.torch_private import (
    flash_attention,
    flash_attention_gradients,
    has_flash_attention,
    scaled_dot_product_attention,
)
from lowtri.ops.call import ArrayInfo, Call, Inputs, Result, seen_keys

_HUGE = {"float16": 1e36, "bfloat16": 1e36, "float32": 1e36, "float64": 1e306}
_FEW_QUERIES = (
    16  # below, the keys that they see may be few, and to cut the arrays to these saves most of the inspection
)


class _Arguments(NamedTuple):
    """The arrays that torch's function gets."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None  # bools, or the bias with -inf where hidden
    fully_masked_queries: Tensor | None  # the queries that see nothing


class Fused(Prepared):
    """A call of torch's function.

    It passes ``is_causal``, or no mask, or a table that is cut to the keys that any query sees. A query that sees nothing sees all
    for torch, and its output is set to 0 afterwards; keys that no query sees are set to 0 before, so that 0 * NaN never happens.
    """

    is_selective = True

    def __init__(self, call: Call, is_causal: bool, with_table: bool) -> None:
        self.scale, self.huge, self.dv = call.scale, _HUGE[call.dtype], call.v.shape[3]
        self.is_causal = is_causal
        self.computes_gradients = call.opaque is None and not call.dropout
        self.options: dict[str, Any] = {"scale": call.scale, "is_causal": is_causal}
        if call.dropout:
            self.options["dropout_p"] = call.dropout
        if call.group > 1:
            self.options["enable_gqa"] = True
        self.keys: slice | None = None
        self.fully_masked_queries: Tensor | None = None
        self.fully_masked_keys: Tensor | None = None
        self.table: Tensor | None = None
        if with_table:
            self._prepare_table(call)
        # Without mask arrays the inputs go to torch unchanged.
        self.direct = not with_table and call.bias is None
        self.flash = self.direct and has_flash_attention and _takes_flash(call)
        kept: list[Any] = [self.fully_masked_queries, self.fully_masked_keys, self.table]
        self.nbytes = 512 + sum(x.nbytes for x in kept if x is not None)

    def _prepare_table(self, call: Call) -> None:
        visible = call.visible()  # (B|1, Hq|1, Nq, Nk)
        self.keys = seen_keys(visible)
        visible = visible if self.keys is None else visible[..., self.keys]
        sees = visible.any(axis=3, keepdims=True)  # (B|1, Hq|1, Nq, 1)
        seen = _by_kv_head(visible.any(axis=2), call.group)[..., None]  # (B|1, Hkv|1, keys, 1)
        fully_masked_queries = np.logical_not(sees)
        self.fully_masked_queries = None if sees.all() else _tensor(fully_masked_queries, call)
        self.fully_masked_keys = None if seen.all() else _tensor(np.logical_not(seen), call)
        self.table = None if visible.all() else _tensor(np.logical_or(visible, fully_masked_queries), call)

    def run(self, inputs: Inputs) -> Result:
        if self.direct:
            return Result(scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, **self.options))
        q, k, v, table, fully_masked_queries = self._arguments(inputs)
        output = scaled_dot_product_attention(q, k, v, attn_mask=table, **self.options)
        return Result(output if fully_masked_queries is None else output.masked_fill(fully_masked_queries, 0))

    def record(self, inputs: Inputs) -> tuple[Result, Any]:
        """The output, and what the gradients need: the log-sum-exp, or the graph that torch records with its leaves."""
        if self.flash:
            output, lse = flash_attention(inputs.q, inputs.k, inputs.v, 0.0, self.is_causal, scale=self.scale)
            return Result(output), lse
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
            output = self.run(Inputs(*leaves)).output
        return Result(output.detach()), (output, leaves)

    def gradients(self, inputs: Inputs, result: Result, recorded: Any, d_result: Result, wide: bool = False) -> Inputs:
        recorded = self.record(inputs)[1] if recorded is None else recorded
        if self.flash:
            causal, scale = self.is_causal, self.scale
            saved = (*inputs[:3], result.output, recorded)
            dq, dk, dv = flash_attention_gradients(d_result.output, *saved, 0.0, causal, scale=scale)
            return Inputs(dq, dk, dv, None, None)
        output, leaves = recorded
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(output, wanted, d_result.output))
        return Inputs(*(None if x is None or not x.requires_grad else next(grads) for x in leaves))

    def accepts(self, inputs: Inputs, d_output: Any = None) -> bool:
        """Whether torch's function keeps to the mask for these numbers.

        Where q, k, v and their products are finite, a hidden pair counts for exactly 0. The output alone would not show it: torch
        may also drop a NaN that a query does see.
        """
        q, k, v, bias, _ = inputs
        if d_output is not None:
            most = self.dv * _magnitude(d_output)
            return most * _magnitude(v) < self.huge or most * _magnitude(self._arguments(inputs).v) < self.huge
        # Few queries may see little of a large cache: then only that is looked at.
        if q.shape[2] >= _FEW_QUERIES:
            tame = self._is_tame(q, k, v, bias)
            if tame or self.table is None:
                return tame
        arguments = self._arguments(inputs)  # without what no query sees
        return self._is_tame(*arguments[:3], None if bias is None else arguments.table)

    def _is_tame(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
        """Whether neither a number nor a product of these is NaN, infinite or near overflow (-inf in a bias hides)."""
        of_q, of_k, of_v = _magnitude(q), _magnitude(k), _magnitude(v)
        of_bias = 0.0 if bias is None or bias.numel() == 0 else max(bias.detach().amax().item(), 0.0)
        score = q.shape[3] * of_q * of_k * max(1.0, abs(self.scale))  # at most
        return bool(score + of_q + of_k + of_v + of_bias < self.huge)

    def _arguments(self, inputs: Inputs) -> _Arguments:
        q, k, v, bias, _ = inputs
        if self.keys is not None:  # a new token under a window, the tail of a cache
            k, v = k[:, :, self.keys], v[:, :, self.keys]
            bias = bias[..., self.keys] if bias is not None and bias.shape[3] > 1 else bias
        fully_masked_queries, table = self.fully_masked_queries, self.table
        if fully_masked_queries is not None:
            q = q.masked_fill(fully_masked_queries, 0)
        if self.fully_masked_keys is not None:
            k, v = k.masked_fill(self.fully_masked_keys, 0), v.masked_fill(self.fully_masked_keys, 0)
        if bias is not None:
            bias = bias.to(torch.promote_types(q.dtype, torch.float32))  # torch takes a float32 mask for half types too
            table = bias if table is None else torch.where(table, bias, -torch.inf)
            hidden = (table == -torch.inf).all(dim=3, keepdim=True)
            fully_masked_queries = hidden if fully_masked_queries is None else hidden | fully_masked_queries
            table = table.masked_fill(fully_masked_queries, 0)
        return _Arguments(q, k, v, table, fully_masked_queries)


def _takes_flash(call: Call) -> bool:
    """Whether torch's function would take its flash kernel on the CPU: no groups, one head size, rows without gaps, no dropout."""

    def has_rows(x: ArrayInfo) -> bool:
        return x.strides[3] == 1 and x.shape[3] == call.v.shape[3]

    return (
        call.device == "cpu" and call.group == 1 and not call.dropout and all(map(has_rows, (call.q, call.k, call.v)))
    )


def _magnitude(x: Tensor) -> float:
    """The greatest absolute value, NaN where there is a NaN. (torch's norm for it takes twenty times as long.)"""
    least, greatest = torch.aminmax(x.detach())
    return max(-least.item(), greatest.item())


def _tensor(table: Any, call: Call) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table)).to(call.device)


def _by_kv_head(seen: Any, group: int) -> Any:
    """(B|1, Hq|1, Nk) -> (B|1, Hkv|1, Nk): whether any head of the group sees the key."""
    if seen.shape[1] == 1:
        return seen
    return seen.reshape(seen.shape[0], -1, group, seen.shape[2]).any(axis=2)
