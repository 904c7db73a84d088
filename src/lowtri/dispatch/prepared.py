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

from lowtri.backends import GradientSource, Prepared
from lowtri.dispatch.choose import choose, load
from lowtri.masks.arrays import why_not_plain
from lowtri.masks.mask import Mask
from lowtri.masks.tile import POSITION_MAX
from lowtri.ops.arguments import arrange, available_threads, describe, whole_strides
from lowtri.ops.call import FEW_QUERIES, Call, CallOptions, Inputs, Positions, Result
from lowtri.ops.distance_bias import DistanceBias
from lowtri.system import after_fork

_UNCHANGED = nullcontext()
MOST_KEPT = 2**20  # bytes of a table of visible keys that the newest call keeps


def run_eagerly(
    q: Any, k: Any, v: Any, mask: Any, options: CallOptions, learn: Callable[..., None] | None = None
) -> Any:
    """:func:`lowtri.attention` outside of a trace; ``learn`` is told of prepared calls of three tensors at the default positions."""
    device = autocast_device(q)
    if device is not None:
        _, q, k, v = cast_for_autocast(q, k, v)
    ready, inputs = prepared_call(q, k, v, mask, options)
    if device is None:
        result = ready.run(inputs)
        if learn is not None and ready.is_short and options.q_positions is None and options.k_positions is None:
            learn(ready, q, k, v, mask, options)
    else:
        with without_autocast(device):
            result = ready.run(inputs)
    restore = ready.call.restore
    if not (options.return_weights or options.return_lse or options.return_received):
        return restore(result.output)
    asked = (
        (True, result.output),
        (options.return_weights, result.weights),
        (options.return_lse, result.lse),
        (options.return_received, result.received),
    )
    return tuple(restore(x) for is_asked, x in asked if is_asked)


def run_over_cache(q: Any, k: Any, v: Any, mask: Mask, options: CallOptions, positions: Positions) -> Any:
    """The output of :func:`lowtri.dispatch.attend.attention_over_cache` if the call is prepared for any keys, else None."""
    arrays = None if autocast_device(q) else _array_keys(q, k, v, None, options.sinks)
    others = options if options.sinks is None else options._replace(sinks=None)
    few = None if arrays is None else _key_for_any_keys(arrays, mask, positions.q is None, positions.k is None, others)
    try:
        ready = None if few is None else PREPARED.get(few)
    except TypeError:  # an unhashable argument, which the checks of the call reject
        return None
    if ready is None:
        return None
    inputs = _few_inputs(q, k, v, options.sinks)
    keys = _strides(ready.call, inputs), positions
    at_keys = ready.at(keys) or _prepare_at(ready, inputs, keys, positions)
    return None if at_keys is None else at_keys.call.restore(at_keys.run(inputs).output)


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
    is_short: bool  # and these are dense tensors, and the output is all that is returned
    any_keys: CachedCall | None = None  # this call, or the one it comes from, if that serves any number of keys
    newest: tuple[Hashable, CachedCall] | None = (
        None  # where any keys are served: those of the last run, and the call at these
    )

    def at(self, signature: Hashable) -> CachedCall | None:
        """The call of the last run, if it was at these keys."""
        newest = self.newest  # read once, since other threads replace it
        return newest[1] if newest is not None and newest[0] == signature else None

    @property
    def serves_any_keys(self) -> bool:
        """Whether it may be kept for any number of keys. The others read the keys' sizes in ``call``, which are those of the first."""
        return self.prepared.any_keys and not self.selective and not self.differentiates

    def with_keys(self, prepared: Prepared) -> CachedCall:
        """This call where it is prepared for other keys. All else is as it is here."""
        return CachedCall(
            self.call,
            self.backend,
            prepared,
            self.by_name,
            self.selective,
            self.differentiates,
            self.is_4d_qkv,
            self.is_short,
            self.any_keys,
        )

    def fallback(self, inputs: Inputs) -> CachedCall | None:
        """The next backend by the rules, prepared, if the inputs rule this one out; else None."""
        if self.by_name or not self.selective or self.prepared.is_exact_for(inputs):
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


@cache
def _differentiable() -> Callable[..., Result]:
    """Loaded with torch."""
    from lowtri.dispatch.autograd import differentiable

    return differentiable


def prepare(call: Call, engine: str) -> CachedCall:
    """Choose the backend and prepare the call."""
    name = choose(call, engine)
    prepared = load(name).prepare(call)
    selective = call.opaque is None and prepared.checks_values()  # opaque data is not inspected
    differentiates = call.needs_grad and prepared.gradient_source() is not GradientSource.GRAPH
    is_4d_qkv = call.rank == 4 and call.bias is None and call.sinks is None
    returns_more = call.return_weights or call.return_lse or call.return_received
    is_short = is_4d_qkv and not (call.is_numpy or call.opaque or selective or returns_more)
    ready = CachedCall(call, name, prepared, engine != "auto", selective, differentiates, is_4d_qkv, is_short)
    ready.any_keys = ready if prepared.any_keys else None
    return ready


def prepared_call(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> tuple[CachedCall, Inputs]:
    """The prepared call for these arguments: from the cache, or checked, prepared and cached.

    Signatures are made of arguments that are not checked yet: their hash may raise a TypeError, and they may be cached only if the
    arguments are usual (:func:`may_be_cached`). None stands for arrays or positions that have none.
    """
    bias, sinks, engine = options.bias, options.sinks, options.engine
    of_bias = bias.values if isinstance(bias, DistanceBias) else bias
    arrays = _array_keys(q, k, v, of_bias, sinks)
    if arrays is None:
        call, inputs = describe(q, k, v, mask, options)
        return prepare(call, engine), inputs
    q_positions, k_positions = _content(options.q_positions), _content(options.k_positions)
    others: Any = options
    if of_bias is not None or sinks is not None or q_positions or k_positions:
        kind = bias.kind if isinstance(bias, DistanceBias) else None
        others = options._replace(bias=kind, sinks=None, q_positions=None, k_positions=None)
    try:
        few = _key_for_any_keys(arrays, mask, options.q_positions is None, options.k_positions is None, others)
        if few is not None:
            ready = PREPARED.get(few)
            if ready is not None:
                inputs = _few_inputs(q, k, v, sinks)
                at_keys = _at_these_keys(ready, inputs, options, q_positions, k_positions)
                if at_keys is not None:
                    return at_keys, inputs
                few = None  # that call serves other keys than these, which are stored with all of their signature
        key = None if q_positions is None or k_positions is None else (arrays, mask, q_positions, k_positions, others)
        ready = None if key is None else PREPARED.get(key)
    except TypeError:  # an unhashable argument, which the checks of the call reject
        key = few = ready = None
    if ready is not None:
        if ready.is_4d_qkv:
            return ready, Inputs(q, k, v, None, None)
        return ready, arrange(ready.call, q, k, v, bias, sinks)
    call, inputs = describe(q, k, v, mask, options)
    ready = prepare(call, engine)
    if may_be_cached(mask, options):
        if few is not None and ready.serves_any_keys:
            PREPARED.put(few, ready)
        elif key is not None:
            PREPARED.put(key, ready)
    return ready, inputs


def _array_keys(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
    """What a prepared call depends on of its arrays: settings, and for each array a key, None where there is no such array.

    A key has the shape, the dtype, the dispatch keys of a tensor, the strides, and whether gradients are required. The result is None
    if the memory of an array does not hold its numbers as they are. Written without a loop, since every call runs it.
    """
    if type(q) is np.ndarray:
        settings: Any = available_threads()
        key = _numpy_key
    elif "torch" in sys.modules:
        module = _tensors()
        settings, key = module.settings(), module.tensor_key
        if settings is None:
            return None
    else:
        return None
    of_q, of_k, of_v = key(q), key(k), key(v)
    if of_q is None or of_k is None or of_v is None:
        return None
    if bias is None and sinks is None:
        return settings, of_q, of_k, of_v, None, None
    others = [None if x is None else key(x) or () for x in (bias, sinks)]
    return None if () in others else (settings, of_q, of_k, of_v, *others)


def _numpy_key(x: Any) -> Any:
    return (x.shape, x.dtype, x.strides, False) if type(x) is np.ndarray and whole_strides(x) else None


@cache
def _tensors() -> Any:
    """Loaded with torch."""
    from lowtri.ops import tensors

    return tensors


# Calls of few queries, prepared for any number of keys.


def _key_for_any_keys(arrays: Any, mask: Any, default_q: bool, default_k: bool, others: Any) -> Hashable | None:
    """The signature without the number of keys, their strides, whether gradients are recorded, and positions that are given.

    None unless few queries without gradients read keys, so that one prepared call may serve any number of these.
    """
    settings, q, k, v, bias, sinks = arrays
    rank, is_numpy = len(q[0]), type(settings) is int
    if bias is not None or not 2 < rank < 5 or q[0][-2] >= FEW_QUERIES or not rank == len(k[0]) == len(v[0]):
        return None
    threads, records = (settings, False) if is_numpy else settings
    if records and (q[-1] or k[-1] or v[-1] or (sinks is not None and sinks[-1])):
        return None
    (*of_k, nk, d), (*of_v, nv, dv) = k[0], v[0]
    # Kernels read contiguous sinks.
    if nk != nv or (sinks is not None and sinks[-2] != (sinks[1].itemsize if is_numpy else 1,)):
        return None
    of_arrays = threads, q[:-1], *of_k, d, k[1:-2], *of_v, dv, v[1:-2], sinks and sinks[:-1]
    return of_arrays, mask, default_q, default_k, others


def _few_inputs(q: Any, k: Any, v: Any, sinks: Any) -> Inputs:
    """The arrays of a call that :func:`_key_for_any_keys` has seen, in four dimensions."""
    return Inputs(q, k, v, None, sinks) if q.ndim == 4 else Inputs(q[None], k[None], v[None], None, sinks)


def _at_these_keys(
    ready: CachedCall, inputs: Inputs, options: CallOptions, q_given: Any, k_given: Any
) -> CachedCall | None:
    """The prepared call for so many keys, with these strides, at these positions; None if the arguments must be checked in full."""
    nk, call = inputs.k.shape[2], ready.call
    keys = _strides(call, inputs), nk, q_given, k_given
    known = ready.at(keys)
    if known is not None:
        return known
    rows, nq = call.q.shape[0], call.q.shape[2]
    default = default_positions(call, nk, options.q_positions is not None)
    if default is None:
        return None
    q_positions, k_positions, (q_low, q_high, k_low, k_high) = None, None, default.bounds
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
    return _prepare_at(ready, inputs, keys, Positions(nk, q_positions, k_positions, (q_low, q_high, k_low, k_high)))


def default_positions(call: Call, nk: int, q_given: bool = False) -> Positions | None:
    """The positions of a call of so many keys, where none are given; None if the arguments must be checked in full."""
    nq = call.q.shape[2]
    if nk == 0 or (nq > nk and call.mask.depends_on_query and not q_given) or call.mask.row_lengths:
        return None
    start = max(nk - nq, 0)
    return Positions(nk, None, None, (start, start + nq - 1, 0, nk - 1))


def _strides(call: Call, inputs: Inputs) -> Any:
    """Of keys and values, in bytes or elements."""
    return (inputs.k.strides, inputs.v.strides) if call.is_numpy else (inputs.k.stride(), inputs.v.stride())


def _prepare_at(ready: CachedCall, inputs: Inputs, keys: tuple[Any, ...], positions: Positions) -> CachedCall | None:
    """The prepared call at other positions; ``keys`` has the strides, and stands for the positions. None if it cannot run them.

    The layers of a model repeat all of it, so the newest is kept.
    """
    call, strides = ready.call, keys[0]
    if call.is_numpy:
        strides = [tuple(n // x.itemsize for n in x.strides) for x in inputs[1:3]]
    prepared = ready.prepared.at(positions, *strides)
    if prepared is None:
        return None
    now = ready.with_keys(prepared)
    if prepared.nbytes <= MOST_KEPT:  # a larger table of visible keys is made again
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


def _content(positions: Any) -> Hashable | None:
    """Positions by their content; () where none were given, None for unusual ones."""
    if positions is None:
        return ()
    x = positions
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if not _tensors().is_dense_cpu(x) or x.is_floating_point() or x.is_complex():
            return None
        x = x.numpy()
    elif isinstance(x, (list, range)):
        try:
            x = np.asarray(x)
        except ValueError:  # rows of different lengths
            return None
    return (x.shape, x.dtype, x.tobytes()) if type(x) is np.ndarray and x.dtype.kind in "iu" else None


def may_be_cached(mask: Any, options: CallOptions) -> bool:
    """Whether the mask is one, and the options are plain numbers: equal ones then mean equal calls."""
    numbers = options.scale, options.softcap, options.dropout
    flags = options.return_weights, options.return_lse, options.return_received
    return (
        all(type(x) in (float, int, type(None)) for x in numbers)
        and all(type(x) is bool for x in flags)
        and type(options.engine) is str
        and (type(mask) is str or isinstance(mask, Mask))
    )


class CallCache:
    """The most recently used prepared calls by signature.

    Args:
        most: the number of calls kept.  most_bytes: the memory that they may hold together.
    """

    def __init__(self, most: int = 256, most_bytes: int = 64 * 2**20) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._calls: OrderedDict[Hashable, CachedCall] = OrderedDict()
        self.quick: dict[Hashable, Any] = {}  # of lowtri.dispatch.quick: what runs these calls
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
                self.quick.clear()

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()
            self.quick.clear()
            self._newest, self._bytes = None, 0

    def after_fork(self) -> None:
        """Begin anew in a child process: a thread of the parent may have stood inside of a change, with the lock."""
        self._lock = Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self._calls)


PREPARED = CallCache()
after_fork(PREPARED.after_fork)
