"""An EvictingCache in a program that torch.compile traces: three operators, which run what the cache does outside of programs.

    lowtri::begin_in_cache     where the new tokens of a forward stand
    lowtri::attend_in_cache    append the keys and values of a layer, then attend; once for each layer
    lowtri::end_in_cache       the forward has ended

Which slots are evicted is decided from positions, by NumPy, when the program runs; the buffers are not part of the graph. So no shape
in the graph depends on the number of tokens or slots, and one program serves all tokens and all caches. Each operator declares that
it changes ``state``, int64 (2,): the number of the cache, by which the operator finds it, and how many tokens it had seen when the
forward began. A compiler therefore keeps the operators and their order.

:data:`TRACED` connects the parts of a layer while a program is traced: the forward's hook, ``cache.update`` and the attention function.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.compat.torch_private import outside_graph
from lowtri.errors import CallError
from lowtri.integrations.transformers.packing import TOLD, begins_anew_in_graph
from lowtri.ops.call import CallOptions

_numbers = count(1)
_caches: WeakValueDictionary[int, Any] = WeakValueDictionary()


class TracedForward:
    """The forward over an EvictingCache that a program traces, or that has begun around the program."""

    def __init__(self) -> None:
        self.model: Any = None  # which began the forward
        self.cache: Any = None
        self.layer: int | None = None  # the layer whose keys were appended last and have not been attended to
        self.keys: Tensor | None = None  # these keys

    def begin(self, model: Any, cache: Any) -> None:
        self.model = model
        self.cache = cache
        self.layer = None
        self.keys = None

    def end(self) -> None:
        self.model = None
        self.cache = None
        self.layer = None
        self.keys = None


TRACED = TracedForward()


def new_state(cache: Any) -> NDArray[np.int64]:
    """The state of a new cache, of which the operators take a tensor."""
    number = next(_numbers)
    _caches[number] = cache
    return np.array([number, 0])


def begin_forward(model: Any, cache: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Begin a forward while a program is traced; that of a model inside of another has begun.

    Args:
        args: the positional arguments.  named: those by name.
    """
    if TRACED.cache is cache and TRACED.model is not model:
        return
    if len(args) > 1:
        raise CallError(
            f"EvictingCache: got {len(args)} positional arguments in a compiled forward.\nFix: all but input_ids by name."
        )
    for name in TOLD:
        if named.get(name) is not None:
            raise packed_rows(name)
    if cache.mask is not model.lowtri_mask.mask:
        _check_mask(model, cache)
    padding = named.get("attention_mask")
    given = (*args, named.get("input_ids"), named.get("inputs_embeds"))
    tokens = next(x for x in given if x is not None)
    rows, n = tokens.shape[:2]
    TRACED.begin(model, cache)
    _begin(cache.state, rows, n, padding, named.get("position_ids") if n > 1 else None)


def packed_rows(told_by: str) -> CallError:
    """The error of a forward whose argument says that rows hold several documents."""
    return CallError(
        f"EvictingCache: got {told_by} of packed rows.\n"
        'Fix: use(model, mask=documents(lengths=[...], open_end=True, inner="causal")) before the cache is made.'
    )


def end_forward(model: Any) -> None:
    """End the forward that this model began."""
    cache = TRACED.cache
    if cache is None or TRACED.model is not model:
        return
    _require_attended()
    TRACED.end()
    _end(cache.state)


def append_keys(key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Of ``cache.update``: the new tokens themselves, which :func:`attend_traced` appends."""
    if TRACED.cache is None:
        raise CallError(
            "EvictingCache: a compiled layer appends outside of a forward of a switched model.\n"
            "Fix: torch.compile(model) or model.forward = torch.compile(model.forward)."
        )
    _require_attended()
    TRACED.layer = layer
    TRACED.keys = key
    return key, value


def attend_traced(query: Tensor, key: Tensor, value: Tensor, options: CallOptions) -> Tensor:
    """The attention of a layer, (B, Hq, N, Dv), over what the cache holds and the new tokens."""
    layer = TRACED.layer
    if layer is None or key is not TRACED.keys:
        raise CallError(
            "EvictingCache: a compiled layer attends to other keys than it has appended.\nFix: transformers.DynamicCache."
        )
    TRACED.layer = None
    TRACED.keys = None
    output: Tensor = _attend(
        TRACED.cache.state, query, key, value, layer, options.scale, options.softcap, options.sinks, options.engine
    )
    return output


def _require_attended() -> None:
    if TRACED.layer is not None:
        raise CallError(
            f"EvictingCache: layer {TRACED.layer} did not attend through lowtri.\nFix: transformers.DynamicCache for this model."
        )


def _check_same_mask(model: Any, cache: Any) -> None:
    cache.check_mask(model.lowtri_mask.mask)


_check_mask = outside_graph(_check_same_mask, "EvictingCache: the mask of the model was set after the cache was made")


# The operators. They find the cache in a table, since an operator takes tensors and numbers only.

_LIBRARY = torch.library.Library("lowtri", "FRAGMENT")
_LIBRARY.define(
    "begin_in_cache(Tensor(a!) state, SymInt rows, SymInt n, Tensor? attention_mask, Tensor? position_ids) -> ()"
)
_LIBRARY.define(
    "attend_in_cache(Tensor(a!) state, Tensor q, Tensor k, Tensor v, int layer, float? scale, float? softcap, Tensor? sinks, "
    "str engine) -> Tensor"
)
_LIBRARY.define("end_in_cache(Tensor(a!) state) -> ()")


def _cache_of(state: Tensor) -> Any:
    number, _ = state.tolist()
    return _caches[number]


def _run_begin(state: Tensor, rows: int, n: int, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
    cache = _cache_of(state)
    if position_ids is not None:
        begins_anew = begins_anew_in_graph(position_ids, attention_mask)
        if not cache.get_seq_length() and bool(begins_anew):  # tokens after the first call continue its document
            raise packed_rows("position_ids")
    cache.begin(rows, n, attention_mask)
    state[1] = cache.get_seq_length()


def _run_attend(state: Tensor, q: Tensor, k: Tensor, v: Tensor, layer: int, *options: Any) -> Tensor:
    cache = _cache_of(state)
    k, v = cache.update(k, v, layer)
    names = ("scale", "softcap", "sinks", "engine")
    call_options = CallOptions(**dict(zip(names, options, strict=True)))
    # The number of tokens stays until the next forward begins: inductor may read it again after this operator.
    return cache.attend(None, q, k, v, None, call_options).contiguous()


def _run_end(state: Tensor) -> None:
    _cache_of(state).end()


def _shape_of_attend(state: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _nothing(*arguments: Any) -> None:
    return None


for _name, _implementation, _shapes in (
    ("begin_in_cache", _run_begin, _nothing),
    ("attend_in_cache", _run_attend, _shape_of_attend),
    ("end_in_cache", _run_end, _nothing),
):
    # Where a program was broken off, the compiler looks at every function that then runs, these included.
    _LIBRARY.impl(_name, outside_graph(_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowtri::{_name}", _shapes, lib=_LIBRARY)
_begin: Any = torch.ops.lowtri.begin_in_cache.default
_attend: Any = torch.ops.lowtri.attend_in_cache.default
_end: Any = torch.ops.lowtri.end_in_cache.default
