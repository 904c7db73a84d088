"""Few queries against a cache, launched; and launched again, where nothing but the arrays is new.

While a model writes text, its layers call attention one after another with the same mask, shapes and steps. What the first of them
checked and laid out serves the others: they write four addresses and run. Between two layers a model's weights go by, and then
each line of code that is not needed costs a wait for memory.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from lowtri.engines.descriptor import address, of_call
from lowtri.engines.launch import Launch, empty, is_half, kernel_file, room_for_lse, threads_of
from lowtri.engines.plans import all_seen, between
from lowtri.engines.worth import FEW_QUERIES, worth_a_kernel
from lowtri.masks.mask import Mask
from lowtri.ops.call import Call, dtype_name

__all__ = ["again", "decode", "is_decoding"]

Key: TypeAlias = tuple[Any, ...]


def is_decoding(q: Any, k: Any, v: Any) -> bool:
    """Whether there are so few queries that reading the cache is the work: and rows that can be read a vector at a time."""
    if dtype_name(q.dtype) == "float64":
        return False
    whole = 32 if is_half(q) else 16
    if q.shape[2] >= FEW_QUERIES or q.shape[3] % whole or v.shape[3] % whole:
        return False
    return bool(
        k.strides[3] == v.strides[3] == k.itemsize if isinstance(k, np.ndarray) else k.stride(3) == v.stride(3) == 1
    )


def decode(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any, want_lse: bool) -> tuple[Any, Any]:
    """Output and log-sum-exp as of ``forward``, for few queries; no plan: one question, or a table of few rows."""
    kernel = kernel_file("decode")
    everything = all_seen(call)
    visible = None if everything else call.visible()  # (B|1, Hq|1, Nq, Nk)
    if visible is not None:
        visible, k, v, bias = _between(visible, k, v, bias)
    if k.dtype != q.dtype:  # a half type that is not read as it is
        k, v = (x.astype(q.dtype) if isinstance(x, np.ndarray) else x.to(q.dtype) for x in (k, v))
    (rows, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    q = np.ascontiguousarray(q) if isinstance(q, np.ndarray) else q.contiguous()
    output, lse = empty(q, (rows, heads, nq, dv)), room_for_lse(q) if want_lse else None
    threads, groups, stacked = threads_of(q), rows * kv_heads, heads // kv_heads * nq
    parts = max(1, min(2 * threads // groups, -(-nk // kernel.KEYS)))
    fields = of_call(call, q, k, v, bias, sinks, "bhn")
    fields |= {"q": address(q), "o": address(output), "tasks": groups * parts, "parts": parts}
    if visible is not None:
        by_row, by_head, *_ = (step if n > 1 else 0 for n, step in zip(visible.shape, visible.strides, strict=True))
        fields |= {"visible": address(visible), "visible_b": by_row, "visible_h": by_head}
    scratch = {"joined": 8 * groups, "results": 4 * groups * parts * kernel.part_floats(stacked, dv)}
    if lse is None:  # the kernel writes it in any case
        scratch["lse"] = 4 * rows * heads * nq
    else:
        fields["lse"] = address(lse)
    code = kernel.decode_half if is_half(q) else kernel.decode
    launch = Launch(code, kernel.FIELDS, fields, kernel.room(stacked, d, dv), threads, scratch, zeros="joined")
    plain = (
        everything and bias is None and sinks is None and not (want_lse or call.return_weights or call.positions_given)
    )
    if plain and q is call.q and not call.is_numpy and launch.desk.size <= _SMALL:
        launch.run()
        _keep(call, launch)
    else:
        launch.run_once()
    return output, lse


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

    def __init__(self, call: Call, launch: Launch) -> None:
        self.launch, self.worth = launch, worth_a_kernel(call)
        self.shape = (*call.q.shape[:3], call.v.shape[3])
        names = kernel_file("decode").FIELDS
        self.places = [names.index(name) for name in "qkvo"]

    def run(self, *addresses: int) -> None:
        """Run it on other arrays: q, k, v and the output."""
        for place, where in zip(self.places, addresses, strict=True):
            self.launch.values[place] = where
        self.launch.run()


_PLAIN = (type(None), float)
_KEPT = 8  # the newest: a model has one kind of call a token, or a few
_SMALL = 2**22  # bytes that each may hold
_ready: dict[Key, _Ready] = {}


def _key(q: Any, k: Any, v: Any, mask: Mask, scale: Any, softcap: Any) -> Key:
    """Everything about a call but where its numbers lie."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    steps = (q.stride(), k.stride(), v.stride())
    return (mask, scale, softcap, q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape, *steps, threads_of(q))


def _keep(call: Call, launch: Launch) -> None:
    _ready[_key(call.q, call.k, call.v, call.mask, call.scale, call.softcap)] = _Ready(call, launch)
    while len(_ready) > _KEPT:
        _ready.pop(next(iter(_ready)), None)


def _between(visible: Any, k: Any, v: Any, bias: Any) -> tuple[Any, ...]:
    """Only the keys between the first and the last that anybody sees, and no table where all of these are seen: a window."""
    here = between(visible)
    if here is not None:
        visible, k, v = visible[..., here], k[:, :, here], v[:, :, here]
        bias = bias[..., here] if bias is not None and bias.shape[3] > 1 else bias
    return None if visible.all() else np.ascontiguousarray(visible), k, v, bias
