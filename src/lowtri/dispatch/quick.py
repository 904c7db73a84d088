"""The short way of calls of three tensors that were made before: one lookup, then the kernel.

In a model, each layer's weights empty the caches of the core, and what Python reads on the way to the kernel comes from memory again.
So this way has few functions, objects and branches: all that a prepared call depends on is in one flat key, torch's modes included. A
call is stored only after it went the long way (:mod:`lowtri.dispatch.prepared`), where everything was checked, and an equal key passes
the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, get_num_threads, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from lowtri.backends import Prepared
from lowtri.compat.torch_private import (
    dispatch_keys,
    dispatch_mode_count,
    forward_level,
    tracing_state,
    transform_stack,
    why_unreadable,
)
from lowtri.dispatch.autograd import apply_to_dense
from lowtri.dispatch.prepared import MOST_KEPT, PREPARED, CachedCall, default_positions, may_be_cached
from lowtri.ops.call import CallOptions

Run: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_MOST = 64  # keys


class _Known:
    """What runs calls of one key.

    Attributes:
        newest: the shapes and strides of k and v in the newest call, and what runs it.
        any_keys: the call that is prepared for any number of keys, if there is one.
    """

    __slots__ = "any_keys", "newest"

    def __init__(self, newest: tuple[Any, Run], any_keys: CachedCall | None) -> None:
        self.newest, self.any_keys = newest, any_keys


def find(q: Any, k: Any, v: Any, *options: Any) -> Run | None:
    """What runs a call of three tensors at the default positions; None for a call that has to go the long way.

    Args:
        options: the mask, and scale, softcap, dropout, return_weights, return_lse and engine of :func:`lowtri.attention`.
    """
    if is_dynamo_compiling() or type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    try:
        known = PREPARED.quick.get(_key(q, k, v, options))
        if known is None:
            return None
        keys = k.shape, v.shape, k.stride(), v.stride()
    except (TypeError, RuntimeError):  # an argument without a hash, a tensor without strides
        return None
    newest, run = known.newest  # read once, since other threads replace it
    return run if newest == keys else _at_other_keys(known, keys)


def _key(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Hashable:
    """All that a prepared call depends on but for the shapes and the strides of k and v, which change from token to token."""
    return (
        options, q.shape, q.stride(), q.dtype, k.dtype, v.dtype,
        is_grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad),
        dispatch_keys(q).raw_repr(), dispatch_keys(k).raw_repr(), dispatch_keys(v).raw_repr(),
        get_num_threads(), is_autocast_enabled("cpu"),
        dispatch_mode_count(), tracing_state(), transform_stack(), forward_level(),
    )  # fmt: skip


def _at_other_keys(known: _Known, keys: Any) -> Run | None:
    """What runs the call where k and v are others than in the newest call."""
    ready = known.any_keys
    if ready is None:
        return None
    (of_k, of_v, *strides), call = keys, ready.call
    *heads, _, size = call.k.shape
    if (*of_k[:2], *of_k[3:]) != (*heads, size) or of_v != (*of_k[:3], call.v.shape[3]):
        return None
    positions = default_positions(call, of_k[2])
    prepared = None if positions is None else ready.prepared.at(positions, *strides)
    run = None if prepared is None else _plain(prepared)
    if run is not None:
        known.newest = keys, run
    return run


def _plain(prepared: Prepared) -> Run | None:
    """What runs a prepared call of three tensors, if it holds little memory."""
    return prepared.plain() if prepared.nbytes <= MOST_KEPT else None


def learn(ready: CachedCall, q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> None:
    """Store a call that went the long way, if equal ones may go the short way."""
    if why_unreadable is not None or not (type(q) is type(k) is type(v) is Tensor and may_be_cached(mask, options)):
        return
    call, prepared = ready.call, ready.prepared
    run = _plain(prepared)
    if run is None:
        return
    if ready.differentiates:
        run = partial(apply_to_dense, run, prepared, call)
    if len(PREPARED.quick) >= _MOST:
        PREPARED.quick.clear()
    given = mask, options.scale, options.softcap, options.dropout, False, False, options.engine
    keys = k.shape, v.shape, k.stride(), v.stride()
    PREPARED.quick[_key(q, k, v, given)] = _Known((keys, run), ready.any_keys)
