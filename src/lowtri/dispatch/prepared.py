"""A call in eager mode: cast under torch.autocast, found in the cache of prepared calls or prepared, and run.

The cache is bounded in number and in bytes, shared by all threads, and clearable."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends.base import Prepared
from lowtri.dispatch.choose import choose, load
from lowtri.masks.arrays import why_not_plain
from lowtri.masks.mask import Mask
from lowtri.masks.tile import POSITION_MAX
from lowtri.ops.arguments import whole_strides
from lowtri.ops.call import FEW_QUERIES, Call, CallOptions, Inputs, Keys, Result
from lowtri.ops.describe import arrange, describe
from lowtri.ops.distance_bias import DistanceBias
from lowtri.ops.threads import thread_count

_UNCHANGED = nullcontext()
_KINDS: set[type] = {np.ndarray}  # of arrays whose attributes may be read without a check; torch's tensors join them
_NUMBERS = (float, int, type(None))
_MOST_KEPT = 2**20  # bytes of a table of visible keys that the newest call keeps


def run_eagerly(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Any:
    """:func:`lowtri.attention` outside of a trace."""
    device = autocast_device(q)
    if device is not None:
        _, q, k, v = cast_for_autocast(q, k, v)
    ready, inputs = prepared_call(q, k, v, mask, options)
    if device is None:
        result = ready.run(inputs)
    else:
        with without_autocast(device):
            result = ready.run(inputs)
    restore = ready.call.restore
    if not (options.return_weights or options.return_lse):
        return restore(result.output)
    extra = [result.weights] * options.return_weights + [result.lse] * options.return_lse
    return tuple(restore(x) for x in (result.output, *extra))


def without_autocast(device: str | None) -> AbstractContextManager[object]:
    """A context in which autocast does not cast what a backend computes in float32; ``device`` is where autocast is enabled."""
    if device is None:
        return _UNCHANGED
    import torch

    return torch.autocast(device, enabled=False)


def cast_for_autocast(q: Any, k: Any, v: Any) -> tuple[str | None, Any, Any, Any]:
    """The type of q's device if torch.autocast is enabled for it, else None; and q, k, v, cast as for torch's own attention."""
    device = autocast_device(q)
    if device is None:
        return None, q, k, v
    import torch

    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in (q, k, v))
    return device, q, k, v


def autocast_device(q: Any) -> str | None:
    """The type of q's device if torch.autocast is enabled for it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return None
    if type(q) is not torch.Tensor and why_not_plain("q", q):  # the check of the call raises
        return None
    if q.is_cpu:  # the fast path of decoding
        return "cpu" if torch.is_autocast_enabled("cpu") else None
    kind = q.device.type
    return kind if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) else None


@dataclass(eq=False)
class CachedCall:
    """A call, the backend chosen for it, and the backend's preparation."""

    call: Call
    backend: str
    prepared: Prepared
    by_name: bool  # requested by name: inputs with NaN, inf or huge numbers are then not sent to another backend
    selective: bool
    differentiates: bool
    is_4d_qkv: bool  # the user's q, k and v have four dimensions, and there is no other array
    newest: tuple[Hashable, CachedCall] | None = (
        None  # where any keys are served: those of the last run, and the call at these
    )

    def fallback(self, inputs: Inputs) -> CachedCall | None:
        """The next backend by the rules, prepared, if the inputs rule this one out; else None."""
        if self.by_name or not self.selective or self.prepared.accepts(inputs):
            return None
        return prepare(self.call, choose(self.call, "auto", exclude=self.backend))

    def run(self, inputs: Inputs) -> Result:
        if self.selective:
            other = self.fallback(inputs)
            if other is not None:
                return other.run(inputs)
        if self.differentiates:
            return _differentiable()(self.prepared, self.call, inputs)
        return self.prepared.run(inputs)


def prepare(call: Call, engine: str) -> CachedCall:
    """Choose the backend and prepare the call."""
    name = choose(call, engine)
    prepared = load(name).prepare(call)
    selective = call.opaque is None and prepared.is_selective  # opaque data is not inspected
    differentiates = call.needs_grad and (prepared.computes_gradients or prepared.formula_dtype is not None)
    is_4d_qkv = call.rank == 4 and call.bias is None and call.sinks is None
    return CachedCall(call, name, prepared, engine != "auto", selective, differentiates, is_4d_qkv)


@cache
def _differentiable() -> Callable[..., Result]:
    """Loaded with torch."""
    from lowtri.dispatch.autograd import differentiable

    return differentiable


def prepared_call(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> tuple[CachedCall, Inputs]:
    """The prepared call for these arguments: from the cache, or checked, prepared and cached."""
    few = None
    try:
        has_few = (type(q) in _KINDS or _is_ordinary(q)) and len(shape := q.shape) > 2 and shape[-2] < FEW_QUERIES
    except RuntimeError:  # a nested tensor has no shape
        has_few = False
    if has_few:
        few = _signature_of_few_queries(q, k, v, mask, options)
    if few is not None:
        try:
            ready = PREPARED.get(few)
        except TypeError:
            ready = None
        if ready is not None:
            inputs = Inputs(q, k, v, None, options.sinks)
            if q.ndim == 3:
                inputs = Inputs(q[None], k[None], v[None], None, options.sinks)
            same = _at_these_keys(ready, inputs, options)
            if same is not None:
                return same, inputs
            few = None  # that call serves other keys than these, which are stored with all of their signature
    key = _signature(q, k, v, mask, options)
    try:
        ready = None if key is None else PREPARED.get(key)
    except TypeError:  # an unhashable argument, which the checks of the call reject
        ready = None
    if ready is not None:
        if ready.is_4d_qkv:
            return ready, Inputs(q, k, v, None, None)
        return ready, arrange(ready.call, q, k, v, options.bias, options.sinks)
    call, inputs = describe(q, k, v, mask, options)
    ready = prepare(call, options.engine)
    if key is not None and may_be_cached(mask, options):
        PREPARED.put(few if few is not None and ready.prepared.any_keys else key, ready)
    return ready, inputs


# Calls that are prepared for any number of keys.


def _at_these_keys(ready: CachedCall, inputs: Inputs, options: CallOptions) -> CachedCall | None:
    """The prepared call for so many keys, with these strides, at these positions; None if the arguments must be checked in full.

    The layers of a model repeat all of it, so that the newest is kept.
    """
    k, v, nk = inputs.k, inputs.v, inputs.k.shape[2]
    strides = (k.strides, v.strides) if ready.call.is_numpy else (k.stride(), v.stride())
    q_given, k_given = _of_positions(options.q_positions), _of_positions(options.k_positions)
    keys = nk, strides, q_given, k_given
    newest = ready.newest
    if newest is not None and newest[0] == keys:
        return newest[1]
    call = ready.call
    rows, nq = call.q.shape[0], call.q.shape[2]
    if nk == 0 or (options.q_positions is None and nq > nk and call.mask.depends_on_query) or call.mask.row_lengths:
        return None
    q_positions, k_positions, start = None, None, max(nk - nq, 0)
    q_low, q_high, k_low, k_high = start, start + nq - 1, 0, nk - 1
    if options.k_positions is not None:
        checked = _checked(k_given, rows, nk)
        if checked is None:
            return None
        k_positions, k_low, k_high = checked
        if call.mask.depends_on_query:
            q_low, q_high = k_low, k_high
    if options.q_positions is not None:
        checked = _checked(q_given, rows, nq)
        if checked is None:
            return None
        q_positions, q_low, q_high = checked
    k_strides, v_strides = strides
    if ready.call.is_numpy:
        k_strides, v_strides = (tuple(n // x.itemsize for n in x.strides) for x in (k, v))
    bounds = q_low, q_high, k_low, k_high
    last = ready if newest is None else newest[1]
    prepared = last.prepared.at(Keys(nk, k_strides, v_strides, q_positions, k_positions, bounds))
    if prepared is None:
        return None
    now: CachedCall = object.__new__(CachedCall)  # a copy; dataclasses.replace takes several times as long
    now.__dict__.update(ready.__dict__, prepared=prepared)
    if prepared.table_bytes <= _MOST_KEPT:  # a larger table of visible keys is made again
        ready.newest = keys, now
    return now


def _checked(given: Any, rows: int, n: int) -> tuple[NDArray[np.int64], int, int] | None:
    """Positions as a read-only array, (1, N) or (B, N), with the least and the greatest; None if they need a conversion or an error."""
    if given is None or given[1] != np.int64 or given[0] not in ((n,), (1, n), (rows, n)):
        return None
    positions = np.frombuffer(given[2], np.int64).reshape(-1, n)
    if positions.size == 1:
        low = high = positions.item()
    else:
        numbers = positions.ravel()  # argmin takes half the time of min
        low, high = numbers.item(numbers.argmin()), numbers.item(numbers.argmax())
    return (positions, low, high) if low >= -1 and high < POSITION_MAX else None


def _signature_of_few_queries(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Hashable | None:
    """A signature without the number of keys, their strides and all positions; None for calls that cannot do without these."""
    if options.bias is not None:
        return None
    of_arrays = _numpy_key_of_few_queries if isinstance(q, np.ndarray) else _tensors_keys()[1]
    arrays = of_arrays(q, k, v, options.sinks)
    if arrays is None:
        return None
    given = options.q_positions is not None, options.k_positions is not None
    if options.sinks is None and True not in given:
        return arrays, mask, given, options
    return arrays, mask, given, options._replace(sinks=None, q_positions=None, k_positions=None)


def _numpy_key_of_few_queries(q: Any, k: Any, v: Any, sinks: Any) -> Hashable | None:
    if any(x is not None and (type(x) is not np.ndarray or not whole_strides(x)) for x in (q, k, v, sinks)):
        return None
    rank = q.ndim
    if not 3 <= rank <= 4 or q.shape[-2] >= FEW_QUERIES or k.ndim != rank or v.ndim != rank:
        return None
    if k.shape[-2] != v.shape[-2] or (sinks is not None and sinks.strides != (sinks.itemsize,)):
        return None
    of_sinks = None if sinks is None else (sinks.shape, sinks.dtype)
    shapes = q.shape, k.shape[:-2], k.shape[-1], v.shape[:-2], v.shape[-1]
    return thread_count(is_numpy=True), shapes, q.strides, q.dtype, k.dtype, v.dtype, of_sinks


# All other calls.


def _signature(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Hashable | None:
    """A signature, or None for a call with unusual arrays or positions.

    Its hash may raise a TypeError, and it may be cached only if the other arguments are usual, too (:func:`may_be_cached`): small
    calls take microseconds, so what a call that was found in the cache needs no check of is checked for the others alone.
    """
    bias, sinks, q_positions, k_positions = options.bias, options.sinks, options.q_positions, options.k_positions
    by_distance = None
    if isinstance(bias, DistanceBias):
        bias, by_distance = bias.values, bias.kind
    of_arrays = _numpy_key if isinstance(q, np.ndarray) else _tensors_keys()[0]
    arrays = of_arrays(q, k, v, bias, sinks)
    if arrays is None:
        return None
    if bias is None and sinks is None and q_positions is None and k_positions is None:
        return arrays, mask, options
    positions = None
    if q_positions is not None or k_positions is not None:
        positions = _of_positions(q_positions), _of_positions(k_positions)
        if None in positions:
            return None
    others = options._replace(bias=by_distance, sinks=None, q_positions=None, k_positions=None)
    return arrays, mask, positions, others


def may_be_cached(mask: Any, options: CallOptions) -> bool:
    """Whether the mask is one, and the options are plain numbers: equal ones then mean equal calls."""
    numbers = options.scale, options.softcap, options.dropout
    flags = options.return_weights, options.return_lse
    return (
        all(type(x) in _NUMBERS for x in numbers)
        and all(type(x) is bool for x in flags)
        and type(options.engine) is str
        and (type(mask) is str or isinstance(mask, Mask))
    )


def _numpy_key(*arrays: Any) -> Hashable | None:
    if any(x is not None and (type(x) is not np.ndarray or not whole_strides(x)) for x in arrays):
        return None
    return thread_count(is_numpy=True), *(None if x is None else (x.shape, x.strides, x.dtype) for x in arrays)


def _is_ordinary(q: Any) -> bool:
    """Whether q is of a kind whose attributes may be read; once torch is loaded, its tensors are."""
    _tensors_keys()
    return type(q) in _KINDS


def _tensors_keys() -> tuple[Callable[..., Hashable | None], Callable[..., Hashable | None]]:
    return _loaded_tensors_keys() if "torch" in sys.modules else (_no_key, _no_key)


@cache
def _loaded_tensors_keys() -> tuple[Callable[..., Hashable | None], Callable[..., Hashable | None]]:
    from lowtri.ops.guards import tensors_key, tensors_key_of_few_queries

    _KINDS.add(sys.modules["torch"].Tensor)
    return tensors_key, tensors_key_of_few_queries


def _no_key(*arrays: Any) -> None:
    return None


def _of_positions(x: Any) -> Hashable | None:
    """Positions by their content; () where none were given."""
    if x is None:
        return ()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from lowtri.ops.guards import is_plain

        if not is_plain(x) or x.is_floating_point() or x.is_complex():
            return None
        x = x.numpy()
    elif isinstance(x, (list, range)):
        try:
            x = np.asarray(x)
        except ValueError:  # rows of different lengths
            return None
    return (x.shape, x.dtype, x.tobytes()) if type(x) is np.ndarray and x.dtype.kind in "iu" else None


class CallCache:
    """The most recently used prepared calls by signature.

    Args:
        most: the number of calls kept.  most_bytes: the memory that they may hold together.
    """

    def __init__(self, most: int = 256, most_bytes: int = 64 * 2**20) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._calls: OrderedDict[Hashable, CachedCall] = OrderedDict()
        self._newest: CachedCall | None = None
        self._bytes = 0
        self._lock = Lock()

    def get(self, signature: Hashable) -> CachedCall | None:
        call = self._calls.get(signature)
        if call is not None and call is not self._newest:  # the layers of a model repeat one call
            with self._lock:
                if signature in self._calls:  # no other thread has evicted it
                    self._calls.move_to_end(signature)
                    self._newest = call
        return call

    def put(self, signature: Hashable, call: CachedCall) -> None:
        size = call.prepared.nbytes
        if size > self.most_bytes:
            return
        with self._lock:
            if signature in self._calls:  # another thread prepared it first
                return
            self._calls[signature] = self._newest = call
            self._bytes += size
            while len(self._calls) > self.most or self._bytes > self.most_bytes:
                _, oldest = self._calls.popitem(last=False)
                self._bytes -= oldest.prepared.nbytes

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()
            self._newest, self._bytes = None, 0

    def __len__(self) -> int:
        return len(self._calls)


PREPARED = CallCache()
