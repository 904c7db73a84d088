"""A call of torch's compiled FlexAttention: the BlockMask, the score function of softcap and bias, and the sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.backends.base import Prepared
from lowtri.backends.flex.block_mask import block_mask_of
from lowtri.masks.plan import Plan, keys_seen, queries_that_see
from lowtri.ops.call import Call, Inputs, Result

_BLOCK = 128  # queries and keys: what the kernels take


class Compiled(Prepared):
    """A prepared call. torch differentiates it.

    Queries that see no key and keys that no query sees are set to 0 before the call: the kernels multiply hidden numbers by 0, and a
    NaN would stay.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        plan = call.plan(_BLOCK)
        device = call.device
        self.block_mask = None if call.shows_all else block_mask_of(plan, _BLOCK, device)
        fully_masked_queries, fully_masked_keys = (None, None) if call.shows_all else _unused(plan, call.group)
        self.fully_masked_queries, self.fully_masked_keys = (
            None if x is None else torch.from_numpy(x).to(device) for x in (fully_masked_queries, fully_masked_keys)
        )
        lists = () if self.block_mask is None else self.block_mask.as_tuple()
        self.nbytes = 4096 + sum(
            x.nbytes for x in (*lists, self.fully_masked_queries, self.fully_masked_keys) if isinstance(x, Tensor)
        )

    def run(self, inputs: Inputs) -> Result:
        call, (q, k, v, bias, sinks) = self.call, inputs
        if self.fully_masked_queries is not None:
            q = q.masked_fill(self.fully_masked_queries, 0)
        if self.fully_masked_keys is not None:
            k, v = k.masked_fill(self.fully_masked_keys, 0), v.masked_fill(self.fully_masked_keys, 0)
        output, lse = attend(
            q,
            k,
            v,
            score_mod=score_mod_of(call.softcap, bias),
            block_mask=self.block_mask,
            scale=call.scale,
            group=call.group,
            want_lse=call.return_lse or sinks is not None,
        )
        if sinks is not None:
            output, lse = with_sinks(output, lse, sinks)
        return Result(output, None, lse)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float,
    group: int,
    want_lse: bool,
) -> tuple[Tensor, Any]:
    """The output, and the log-sum-exp or None, by compiled FlexAttention."""
    function, request = _compiled(q.is_cpu)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": group > 1}
    if not want_lse:
        return function(q, k, v, score_mod, block_mask, **options), None
    if request is None:
        output, lse = function(q, k, v, score_mod, block_mask, return_lse=True, **options)
        return output, lse
    output, auxiliary = function(q, k, v, score_mod, block_mask, return_aux=request(lse=True), **options)
    return output, auxiliary.lse


@cache
def _compiled(on_cpu: bool) -> tuple[Callable[..., Any], Any]:
    """torch's function, compiled, and its class of auxiliary results (None in versions that have ``return_lse`` only).

    torch's C++ code for CPUs, which tests run, does not compile with sizes that vary; on a GPU they save compilations.
    """
    from torch.nn.attention import flex_attention as module

    return torch.compile(module.flex_attention, dynamic=False if on_cpu else None), getattr(module, "AuxRequest", None)


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (B, Hq, Nq) with one more score in each softmax, (Hq,), which has no value."""
    together = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (output * torch.exp(lse - together)[..., None]).to(output.dtype), together


def score_mod_of(softcap: float | None, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """The cap and the bias (B|1, H|1, Nq|1, Nk|1) as a score_mod, or None without them."""
    if bias is None:
        if softcap is None:
            return None
        return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
    # A factor of 0 broadcasts: every index is a tensor, also where the bias has one entry.
    by_b, by_h, by_q, by_k = (int(n > 1) for n in bias.shape)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score + bias[b * by_b, h * by_h, q * by_q, k * by_k]

    return score_mod


def _unused(plan: Plan, group: int) -> tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None]:
    """The queries that see no key, and the keys that no query of the group sees, each None if there are none.

    The shapes are (B|1, H|1, Nq, 1) and (B|1, Hkv|1, Nk, 1).
    """
    sees = queries_that_see(plan)[plan.mask_index]  # (B|1, H|1, Nq)
    seen: NDArray[np.bool_] = keys_seen(plan)[plan.mask_index]  # (B|1, H|1, Nk)
    if seen.shape[1] > 1:
        seen = np.any(seen.reshape(len(seen), -1, group, seen.shape[2]), axis=2)
    return (
        None if sees.all() else np.logical_not(sees[..., None]),
        None if seen.all() else np.logical_not(seen[..., None]),
    )
