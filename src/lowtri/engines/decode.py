"""Launches the decode kernel; repeated calls with the same signature reuse the prepared launch.

While a model writes text, its layers call attention one after another with the same mask, shapes and strides. What the first of them
checked and laid out serves the others: they write four addresses and run.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from lowtri.engines.descriptor import address, of_call
from lowtri.engines.launch import PreparedLaunch, empty, empty_lse, kernel_file, spec_for, threads_of
from lowtri.engines.plans import all_seen, between
from lowtri.engines.worth import FEW_QUERIES, worth_a_kernel
from lowtri.kernels.abi import DECODE
from lowtri.masks.mask import Mask
from lowtri.ops.call import Call

__all__ = ["again", "decode", "is_decoding"]

Key: TypeAlias = tuple[Any, ...]


def is_decoding(q: Any, k: Any, v: Any) -> bool:
    """Whether there are so few queries that reading the cache is the work, and its rows can be read a vector at a time."""
    return q.shape[2] < FEW_QUERIES and spec_for("decode", _packed(q), k, v) is not None


def decode(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output and log-sum-exp as of ``forward``, for few queries."""
    q = _packed(q)
    output, lse = empty(q, (*q.shape[:3], v.shape[3])), empty_lse(q) if want_lse else None
    launch = prepare_decode(call, q, k, v, bias)
    arrays = {"q": q, "k": k, "v": v, "o": output, "lse": lse, "bias": bias, "sinks": sinks}
    launch.run(**{name: address(x) for name, x in arrays.items()})
    plain = bias is None and sinks is None and not (want_lse or call.return_weights or call.positions_given)
    if plain and q is call.q and not call.is_numpy and all_seen(call):
        _keep(call, launch)
    return output, lse


def prepare_decode(call: Call, q: Any, k: Any, v: Any, bias: Any) -> PreparedLaunch:
    """The decode kernel for a call, and for all whose arrays lie as these do; no plan: one question, or a table of few rows."""
    kernel, spec = kernel_file("decode"), spec_for("decode", q, k, v)
    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    visible, first_key = None, 0
    if not all_seen(call):
        visible = call.visible()  # (B|1, Hq|1, Nq, Nk)
        seen = between(visible)  # only the keys between the first and the last that any query sees: a window
        if seen is not None:
            visible, first_key, nk = visible[..., seen], seen.start, seen.stop - seen.start
        visible = None if visible.all() else np.ascontiguousarray(visible)
    threads, groups, queries = threads_of(q), rows * kv_heads, heads // kv_heads * nq
    parts = max(1, min(2 * threads // groups, -(-nk // kernel.KEYS)))
    fields = of_call(call, q, k, v, bias) | {"nk": nk, "first_key": first_key, "tasks": groups * parts, "parts": parts}
    fields |= {"visible": address(visible), "visible_strides": {"b": 0, "h": 0}}
    if visible is not None:
        by_row, by_head, *_ = (step if n > 1 else 0 for n, step in zip(visible.shape, visible.strides, strict=True))
        fields["visible_strides"] = {"b": by_row, "h": by_head}
    scratch, shared = kernel.scratch(spec, queries, d, dv), kernel.shared_scratch(groups, parts, queries, dv)
    return PreparedLaunch(DECODE, spec, fields, threads, scratch, shared, zeros="joined", keep=visible)


def _packed(q: Any) -> Any:
    """Queries without gaps; they are few."""
    return np.ascontiguousarray(q) if isinstance(q, np.ndarray) else q.contiguous()


def again(q: Any, k: Any, v: Any, mask: Any, scale: Any, softcap: Any, engine: str) -> Any:
    """The output (B, Hq, Nq, Dv) of a call that only its arrays tell from one before, or None where there is none like it."""
    plain = type(scale) in _PLAIN and type(softcap) in _PLAIN and isinstance(mask, Mask)
    if not _ready or not plain:
        return None
    import torch

    from lowtri.engines.memory import is_plain, why_not_now

    if not (is_plain(q) and is_plain(k) and is_plain(v) and q.ndim == 4 and q.shape[3]) or why_not_now() is not None:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    key = _key(q, k, v, mask, scale, softcap)
    found = _ready.pop(key, None)  # in one thread at a time
    if found is None:
        return None
    output = None
    if engine == "cpu" or (engine == "auto" and found.worth):
        output = torch.empty_like(q) if q.shape == found.shape else q.new_empty(found.shape)
        found.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr())
    _ready[key] = found
    return output


class _Ready:
    """A launch that ran, and may again."""

    def __init__(self, call: Call, launch: PreparedLaunch) -> None:
        self.launch, self.worth = launch, worth_a_kernel(call)
        self.shape = (*call.q.shape[:3], call.v.shape[3])

    def run(self, q: int, k: int, v: int, output: int) -> None:
        """Run it on other arrays at these addresses."""
        self.launch.run(q=q, k=k, v=v, o=output, lse=0, bias=0, sinks=0)


_PLAIN = (type(None), float)
_KEPT = 8  # the newest: a model has one kind of call a token, or a few
_ready: dict[Key, _Ready] = {}


def _key(q: Any, k: Any, v: Any, mask: Mask, scale: Any, softcap: Any) -> Key:
    """Everything about a call but where its numbers lie."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    steps = (q.stride(), k.stride(), v.stride())
    return (mask, scale, softcap, q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape, *steps, threads_of(q))


def _keep(call: Call, launch: PreparedLaunch) -> None:
    _ready[_key(call.q, call.k, call.v, call.mask, call.scale, call.softcap)] = _Ready(call, launch)
    while len(_ready) > _KEPT:
        _ready.pop(next(iter(_ready)), None)
