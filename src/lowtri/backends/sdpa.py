"""The backend ``sdpa``: torch's own fused attention, with ``is_causal`` or without a mask where that is equivalent, else with a table.

torch multiplies hidden values by a weight of 0, so a NaN that is hidden from *some* queries spreads to them; it may also drop a
NaN or an infinity that a query does see. Under ``engine="auto"`` the inputs are inspected; unless they are finite and moderate, the
next backend of the rules runs instead. Keys hidden from *every* query (padding, cache tails) are set to 0 before the call; queries that
see nothing give 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.backends import GradientSource, Prepared, PreparedForSomeValues, PreparedWithGradients
from lowtri.compat.torch_private import scaled_dot_product_attention
from lowtri.masks.formulas import causal
from lowtri.ops.call import Call, Inputs, Result

__all__ = ["name", "needs_table", "prepare", "supports"]

name = "sdpa"

_HUGE = {"float16": 1e36, "bfloat16": 1e36, "float32": 1e36, "float64": 1e306}
_WHOLE_FROM_QUERIES = 16  # fewer may see few keys: to cut the arrays to these saves most of the inspection


def supports(call: Call) -> str | None:
    """Reject what torch's function has no argument for."""
    missing = {
        f"{call.transformation}, which it does not have": call.transformation == "inside forward-mode differentiation",
        "it has no softcap": call.softcap is not None,
        "it has no sinks": call.sinks is not None,
        "it takes a bias of all pairs, not of distances": call.distance_low is not None,
        "it does not return weights": call.return_weights,
        "it does not return log-sum-exp": call.return_lse,
        "it does not return what keys received": call.return_received,
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def needs_table(call: Call) -> bool:
    """Whether no single argument of torch's function expresses the mask and the bias."""
    return call.bias is not None or not (call.shows_all or _is_torch_causal(call))


def prepare(call: Call) -> Prepared:
    return _Fused(call)


def _is_torch_causal(call: Call) -> bool:
    """Whether torch's is_causal (key index <= query index) is equivalent: queries and keys at the same positions."""
    return not call.positions_given and call.q.shape[2] == call.k.shape[2] and call.mask == causal()


class _Arguments(NamedTuple):
    """What torch's function gets, and which queries see nothing."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None  # bools, or the bias with -inf where hidden
    fully_masked_queries: Tensor | None


class _Fused(PreparedWithGradients, PreparedForSomeValues):
    """A call of torch's function.

    It passes ``is_causal``, or no mask, or a table that is cut to the keys that any query sees. A query that sees nothing sees all
    for torch, and its output is set to 0 afterwards; keys that no query sees are set to 0 before, so that 0 * NaN never happens.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.huge = call, _HUGE[call.dtype]
        with_table = needs_table(call)
        self.has_state = call.needs_grad and call.why_unreadable is None and not call.dropout
        self.options: dict[str, Any] = {"scale": call.scale, "is_causal": not with_table and _is_torch_causal(call)}
        if call.dropout:
            self.options["dropout_p"] = call.dropout
        if call.group > 1:
            self.options["enable_gqa"] = True
        self.keys: slice | None = None
        self.table: Tensor | None = None
        self.fully_masked_queries: Tensor | None = None
        self.fully_masked_keys: Tensor | None = None
        if with_table:
            self._prepare_table(call)
        kept: list[Any] = [self.fully_masked_queries, self.fully_masked_keys, self.table]
        self.nbytes = 512 + sum(x.nbytes for x in kept if x is not None)

    def gradient_source(self) -> GradientSource:
        return GradientSource.STATE if self.has_state else GradientSource.GRAPH

    def _prepare_table(self, call: Call) -> None:
        def tensor(table: Any) -> Tensor | None:
            return torch.from_numpy(np.ascontiguousarray(table)).to(call.device) if table.any() else None

        visible = call.visible()  # (B|1, Hq|1, Nq, Nk)
        some = np.flatnonzero(visible.any(axis=(0, 1, 2)))
        if 0 < len(some) < visible.shape[3]:
            self.keys = slice(int(some[0]), int(some[-1]) + 1)
            visible = visible[..., self.keys]
        hidden: Any = np.logical_not(visible)
        no_key = hidden.all(axis=3, keepdims=True)  # (B|1, Hq|1, Nq, 1)
        no_query = hidden.all(axis=2)  # (B|1, Hq|1, keys)
        if no_query.shape[1] > 1:  # in no head of the group
            no_query = no_query.reshape(len(no_query), -1, call.group, no_query.shape[2]).all(axis=2)
        self.fully_masked_queries, self.fully_masked_keys = tensor(no_key), tensor(no_query[..., None])
        self.table = None if visible.all() else torch.from_numpy(visible | no_key).to(call.device)

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        if seed is not None:  # torch's function draws from the generator of its device
            with torch.random.fork_rng([inputs.q.device] if inputs.q.is_cuda else []):
                torch.manual_seed(int(seed))
                return self.run(inputs)
        if not self.has_state:
            return Result(self._output(inputs))
        with torch.enable_grad():  # the gradients need the graph that torch records
            leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
            output = self._output(Inputs(*leaves))
        return Result(output.detach(), state=(output, leaves))

    def _output(self, inputs: Inputs) -> Tensor:
        given = self._arguments(inputs)
        output: Tensor = scaled_dot_product_attention(given.q, given.k, given.v, attn_mask=given.table, **self.options)
        sees_nothing = given.fully_masked_queries
        return output if sees_nothing is None else output.masked_fill(sees_nothing, 0)

    def gradients(self, inputs: Inputs, output: Any, state: Any, d_output: Any, d_lse: Any = None) -> Inputs:
        output, leaves = state
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(output, wanted, d_output))
        return Inputs(*(None if x is None or not x.requires_grad else next(grads) for x in leaves))

    def is_exact_for(self, inputs: Inputs, d_output: Any = None) -> bool:
        """Whether torch's function keeps to the mask for these numbers.

        Where q, k, v and their products are finite, a hidden pair counts for exactly 0. The output alone would not show it: torch
        may also drop a NaN that a query does see.
        """
        if d_output is not None:
            most = inputs.v.shape[3] * _magnitude(d_output)
            return most * _magnitude(inputs.v) < self.huge or most * _magnitude(self._arguments(inputs).v) < self.huge
        # Few queries may see little of a large cache: then only that is looked at.
        if inputs.q.shape[2] >= _WHOLE_FROM_QUERIES:
            tame = self._is_tame(inputs.q, inputs.k, inputs.v, inputs.bias)
            if tame or self.table is None:
                return tame
        given = self._arguments(inputs)  # without what no query sees
        return self._is_tame(given.q, given.k, given.v, None if inputs.bias is None else given.table)

    def _is_tame(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
        """Whether neither a number nor a product of these is NaN, infinite or near overflow (-inf in a bias hides)."""
        q_magnitude = _magnitude(q)
        k_magnitude = _magnitude(k)
        greatest_bias = 0.0 if bias is None or bias.numel() == 0 else max(bias.detach().amax().item(), 0.0)
        score = q.shape[3] * q_magnitude * k_magnitude * max(1.0, abs(self.call.scale))  # at most
        return bool(score + q_magnitude + k_magnitude + _magnitude(v) + greatest_bias < self.huge)

    def _arguments(self, inputs: Inputs) -> _Arguments:
        q, k, v = inputs[:3]
        bias = inputs.bias
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


def _magnitude(x: Tensor) -> float:
    """The greatest absolute value, NaN where there is a NaN. (torch's norm for it takes twenty times as long.)"""
    least, greatest = x.detach().aminmax()
    return max(-least.item(), greatest.item())
