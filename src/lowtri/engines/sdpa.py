"""The engine ``sdpa``: torch's own fused attention, told the mask by ``is_causal`` where that says exactly the same.

torch multiplies hidden pairs by a weight of 0, so a NaN that is hidden from *some* queries spreads to them; where it is hidden
from *everyone* (pads, cache tails) it is set to 0 before the call. Queries that see nothing give 0 here, whatever torch does.
torch may also swallow a NaN or an infinity that a query does see. ``spreads`` tells such calls apart, for ``engine="auto"``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from lowtri.engines.batched import one_by_one
from lowtri.engines.differentiable import by_formula, needs_formula
from lowtri.engines.memory import transformed, why_not_now
from lowtri.engines.plans import all_seen, asked, between
from lowtri.engines.worth import FEW_QUERIES
from lowtri.masks.atoms import causal
from lowtri.ops.call import Call, Result

__all__ = ["name", "run", "spreads", "why_not"]

name = "sdpa"


def why_not(call: Call) -> str | None:
    """What torch's function has no argument for."""
    if call.is_numpy:
        return "the arrays are NumPy's"
    missing = {
        "it has no softcap": call.softcap is not None,
        "it has no sinks": call.sinks is not None,
        "it does not return weights": call.return_weights,
        "it does not return log-sum-exp": call.return_lse,
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
        "inside forward-mode differentiation, which it does not have": forward_ad._current_level >= 0,
        "an input is zeros without memory": any(x._is_zerotensor() for x in (call.q, call.k, call.v)),
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def spreads(call: Call) -> str | None:
    """Whether torch's function could leave a trace of what is hidden, or swallow what is seen: one look at the numbers.

    Where q, k, v and their products are finite, a hidden pair comes out as exactly 0. A NaN in a row of q may come out as 0, too,
    so that a look at the output would not do. What this cannot see: a NaN in the output's gradient, with dropout (``_Recorded`` can,
    but the formula would drop other weights).
    """
    if why_not_now() is not None:  # the numbers are not there to be looked at
        return transformed()
    if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    # Few queries may see little of a large cache: then only that is looked at.
    if call.q.shape[2] >= FEW_QUERIES and _are_tame(call.scale, call.q, call.k, call.v, call.bias):
        return None
    q, k, v, table, _ = _prepared(call)  # without what nobody sees
    bias = table if call.bias is not None else None
    return None if _are_tame(call.scale, q, k, v, bias) else _WORDS


def _are_tame(scale: float, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> bool:
    """Whether no product of these overflows, nor any of them is NaN or infinite (-inf in a bias hides)."""
    ends = [end for x in (q, k, v) for end in torch.aminmax(x.detach())]
    if bias is not None:
        ends.append(bias.detach().amax().clamp(min=0))
    wide = torch.promote_types(q.dtype, torch.float32)
    numbers = [abs(x) for x in torch.stack([x.to(wide) for x in ends]).tolist()]
    of_q, of_k, of_v = (sum(numbers[i : i + 2]) for i in (0, 2, 4))
    score = q.shape[3] * of_q * of_k * max(1.0, abs(scale))  # at most
    return score + of_q + of_k + of_v + sum(numbers[6:]) < _HUGE[wide]


_WORDS = "an input holds NaN, infinity or huge numbers, which torch's function may spread to other queries, or swallow"
_HUGE = {torch.float32: 1e36, torch.float64: 1e306}


def run(call: Call) -> Result:
    """Run torch's function; the mask is a table of bools unless it is exactly causal or full."""
    if call.needs_grad and not call.dropout and why_not_now() is None:
        return Result(_Recorded.apply(call, call.q, call.k, call.v, call.bias))
    return Result(_attend(call))


def _attend(call: Call) -> Tensor:
    q, k, v, table, nothing = _prepared(call)
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout, "enable_gqa": call.group > 1}
    is_causal = table is None and _is_torch_causal(call)
    output = scaled_dot_product_attention(q, k, v, attn_mask=table, is_causal=is_causal, **options)
    return output if nothing is None else output.masked_fill(nothing, 0)


def _prepared(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k and v without what nobody sees, the table for torch's function, and the queries that see nothing (B|1, Hq|1, Nq, 1)."""
    q, k, v, bias = call.q, call.k, call.v, call.bias
    if bias is None and (_is_torch_causal(call) or (not call.positions_given and all_seen(call))):
        return q, k, v, None, None
    seen = _seen(call)
    if seen.between is not None:  # a new token under a window, the tail of a cache
        k, v = k[:, :, seen.between], v[:, :, seen.between]
        bias = bias[..., seen.between] if bias is not None and bias.shape[3] > 1 else bias
    if bias is None and seen.all:
        return q, k, v, None, None
    # Hidden from everyone: set to 0, so that 0 * NaN never happens. A query that sees nothing looks at all, and is set to 0 after.
    nothing = None if seen.nothing is None else torch.from_numpy(seen.nothing).to(q.device)
    if nothing is not None:
        q = q.masked_fill(nothing, 0)
    if seen.unseen is not None:
        unseen = torch.from_numpy(seen.unseen).to(q.device)
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    table = torch.from_numpy(seen.table).to(q.device)
    if bias is not None:
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))  # torch takes float32 beside half types too
        table = torch.where(table, bias, -torch.inf)
        hidden = (table == -torch.inf).all(dim=3, keepdim=True)
        nothing = hidden if nothing is None else hidden | nothing
        table = table.masked_fill(nothing, 0)
    return q, k, v, table, nothing


class _Recorded(torch.autograd.Function):
    """The output with the gradients that torch knows for it; of gradients, or of a d_output that would spread, the formula's."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        ctx.graphs = [_graph(call, inputs)]
        return ctx.graphs[0][0].detach()

    @staticmethod
    @one_by_one
    def backward(ctx: Any, d_output: Tensor) -> Any:
        inputs, wanted, call = ctx.saved_tensors, ctx.needs_input_grad[1:], ctx.call
        if needs_formula() or not _keeps(call, d_output):
            return (None, *by_formula(call, (*inputs, None), (d_output,), (*wanted, False))[:4])
        # The first backward takes the graph, so that its memory is free after it; a second one records it again.
        output, leaves = ctx.graphs.pop() if ctx.graphs else _graph(call, inputs)
        found = iter(torch.autograd.grad(output, [x for x in leaves if x is not None and x.requires_grad], d_output))
        return (None, *(next(found) if want else None for want in wanted))


def _keeps(call: Call, d_output: Tensor) -> bool:
    """Whether no product of d_output with the values overflows, nor is NaN: with those that are seen, if not with all."""
    return any(_are_tame(1, d_output, v(), d_output) for v in (lambda: call.v, lambda: _prepared(call)[2]))


def _graph(call: Call, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, list[Tensor | None]]:
    """The output as torch records it, and the inputs that it begins with."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
        q, k, v, bias = leaves
        return _attend(replace(call, q=q, k=k, v=v, bias=bias)), leaves


class _Seen(NamedTuple):
    """What the call's mask says, as torch's function is told it."""

    table: NDArray[np.bool_]  # (B|1, Hq|1, Nq, keys); a query that sees nothing sees all
    nothing: NDArray[np.bool_] | None  # (B|1, Hq|1, Nq, 1), the queries that see nothing
    unseen: NDArray[np.bool_] | None  # (B|1, Hkv|1, keys, 1), the keys that nobody sees
    between: slice | None  # the keys of the table, where it leaves some out at the ends
    all: bool  # whether everybody sees everything between


_newest: OrderedDict[Any, _Seen] = OrderedDict()  # the layers of a model ask for the same one
_KEPT = 2  # of at most 16 MB each
_lock = Lock()


def _seen(call: Call) -> _Seen:
    """What the mask says, from the newest where the same mask and positions came before."""
    key = (asked(call), call.group)
    with _lock:
        if key in _newest:
            _newest.move_to_end(key)
            return _newest[key]
    found = _look(call)
    if found.table.nbytes <= 2**24:
        with _lock:
            _newest[key] = found
            while len(_newest) > _KEPT:
                _newest.popitem(last=False)
    return found


def _look(call: Call) -> _Seen:
    visible = call.visible()  # (B|1, Hq|1, Nq, Nk)
    here = between(visible)
    if here is not None:
        visible = visible[..., here]
    sees = visible.any(axis=3, keepdims=True)  # (B|1, Hq|1, Nq, 1)
    seen = _by_kv_head(call, visible.any(axis=2))[..., None]  # (B|1, Hkv|1, keys, 1)
    everything = bool(visible.all())
    nothing = None if sees.all() else np.logical_not(sees)
    unseen = None if seen.all() else np.logical_not(seen)
    return _Seen(visible if nothing is None else np.logical_or(visible, nothing), nothing, unseen, here, everything)


def _is_torch_causal(call: Call) -> bool:
    """torch's is_causal means key index <= query index: ours, when both stand at the same places."""
    same = not call.positions_given and call.q.shape[2] == call.k.shape[2]
    return same and call.mask == causal()


def _by_kv_head(call: Call, seen: Any) -> Any:
    """(B|1, Hq|1, Nk) -> (B|1, Hkv|1, Nk): whether any head of the group sees the key."""
    if seen.shape[1] == 1:
        return seen
    return np.any(seen.reshape(seen.shape[0], -1, call.group, seen.shape[2]), axis=2)
