"""A call in eager mode: found in the cache of prepared calls or prepared, and run.

A call that was made before is looked up before anything is checked: equal signatures (:mod:`lowtri.dispatch.signature`) pass the same
checks, and run on the same prepared call. In a model, each layer's weights empty the caches of the core, and what Python reads on the
way to the kernel comes from memory again, so this way has few functions, objects and branches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from threading import Lock
from typing import Any, TypeAlias, cast

import numpy as np

from lowtri.backends import GradientSource, LostSums, Prepared, PreparedForAnyKeys, PreparedForSomeValues
from lowtri.compat import constant_while_traced
from lowtri.dispatch.choose import choose, load
from lowtri.dispatch.signature import array_signature, positions_at, with_positions
from lowtri.errors import EngineError
from lowtri.forks import after_fork
from lowtri.masks.arrays import why_not_plain
from lowtri.masks.mask import Mask
from lowtri.ops.arguments import arrange, describe
from lowtri.ops.call import Call, CallOptions, Inputs, Result

Run: TypeAlias = Callable[..., Any]  # (q, k, v) or (q, k, v, bias, sinks) -> what the call returns

_UNCHANGED = nullcontext()
_MOST_KEPT = 2**20  # bytes of a table of visible keys that is kept from one run to the next
_clock = count()


@constant_while_traced
def is_traced() -> bool:
    """Whether torch.compile or torch.export is tracing this call."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def find(
    q: Any, k: Any, v: Any, bias: Any, sinks: Any, positions: Any, *options: Any
) -> tuple[CachedCall | None, Hashable]:
    """The prepared call for these arguments, if an equal call was made before; and the signature, None if such calls are not kept.

    Not while torch traces a program, which would keep what it finds.

    Args:
        positions: None for the default, (q_positions, k_positions) of a user, or the checked positions of a cache, of which k and v
            are the buffers.
        options: the mask, and scale, softcap, dropout, return_weights, return_lse, engine and return_received of
            :func:`lowtri.attention`.
    """
    try:
        if type(q) is np.ndarray:
            signature = array_signature(q, k, v, bias, sinks, options)
        else:
            signature = _tensor_signature(q, k, v, bias, sinks, options)
        if signature is not None and positions is not None:
            signature = with_positions(signature, positions)
        if signature is None:
            return None, None
        decode_key, keys, is_decode = signature
        calls = PREPARED.calls
        known = calls.get(decode_key) if is_decode else None
        if known is not None:
            known.last_use = next(_clock)
            last_keys, ready = known.last  # read once, since other threads replace it
            if last_keys != keys:
                ready = known.repeated(keys)
            if ready is not None:
                return ready, signature
        known = calls.get(signature)
    except (TypeError, RuntimeError):
        return None, None  # an argument without a hash, a tensor without strides: the checks of the call say what it is
    if known is not None:
        known.last_use = next(_clock)
    return known, signature


def _load_tensor_signature(*arguments: Any) -> Any:
    """:func:`lowtri.ops.tensors.signature`, which takes this function's place once torch is loaded."""
    global _tensor_signature
    if sys.modules.get("torch") is None:
        return None
    from lowtri.ops.tensors import signature

    _tensor_signature = signature
    return signature(*arguments)


_tensor_signature: Callable[..., Any] = _load_tensor_signature


def run_eagerly(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Any:
    """:func:`lowtri.attention` outside of a trace."""
    device, arrays = cast_for_autocast(q, k, v)
    q, k, v = arrays
    with without_autocast(device):
        ready, inputs = prepared_call(q, k, v, mask, options)
        return ready.call.returned(ready.run(inputs))


def without_autocast(device: str | None) -> AbstractContextManager[object]:
    """A context in which autocast does not cast what a backend computes in float32; ``device`` is where autocast is enabled."""
    if device is None:
        return _UNCHANGED
    import torch

    return torch.autocast(device, enabled=False)


def cast_for_autocast(q: Any, k: Any, v: Any) -> tuple[str | None, tuple[Any, ...]]:
    """The type of q's device if torch.autocast is enabled for it, else None; and q, k, v, cast as for torch's own attention."""
    device = autocast_device(q)
    if device is None:
        return None, (q, k, v)
    import torch

    dtype = torch.get_autocast_dtype(device)
    return device, tuple(as_autocast(x, dtype) if isinstance(x, torch.Tensor) else x for x in (q, k, v))


def as_autocast(x: Any, dtype: Any) -> Any:
    """A tensor in the dtype of autocast, which casts all floats but those of float64."""
    return x.to(dtype) if x.is_floating_point() and x.dtype.itemsize < 8 else x


def autocast_device(q: Any) -> str | None:
    """The type of q's device if torch.autocast is enabled for it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return None
    if type(q) is not torch.Tensor and why_not_plain("q", q):  # the check of the call raises
        return None
    if q.is_cpu:  # asked before each call of a cache
        return "cpu" if torch.is_autocast_enabled("cpu") else None
    kind = q.device.type
    return kind if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) else None


@dataclass(eq=False, slots=True)
class CachedCall:
    """A call, the backend chosen for it, and the backend's preparation.

    Attributes:
        engine_was_named: the backend was requested by name: inputs with NaN, inf or huge numbers are then not sent to another one.
        checks_values: whether the inputs are looked at before each run.
        differentiates: whether gradients are recorded and not torch's own of what the backend computes.
        plain: a function of the tensors q, k and v that gives what the user gets, if nothing else is read or returned.
        last: where the call serves any keys, those of the last run, and the call at these.
        for_any_keys: the call whose ``last`` this one has been.
        with_lse: the same call with its log-sum-exp, once a program has asked for it.
        last_use: when it was last looked up; the cache evicts the call that has waited longest.
    """

    call: Call
    backend: str
    prepared: Prepared
    engine_was_named: bool
    checks_values: bool
    differentiates: bool
    plain: Run | None
    last: Any = None
    for_any_keys: CachedCall | None = None
    with_lse: CachedCall | None = None
    last_use: int = 0

    @property
    def serves_any_keys(self) -> bool:
        """Whether it may be kept for any number of keys. The others read the keys' sizes in ``call``, which are those of the first."""
        any_keys = isinstance(self.prepared, PreparedForAnyKeys)
        return any_keys and not self.checks_values and not self.differentiates

    def repeated(self, keys: Any) -> CachedCall | None:
        """This call at other keys; None if the arguments must be checked in full. The layers of a model repeat all, so it is kept."""
        k_shape, v_shape = keys[:2]
        k_strides, v_strides, given = keys[2:]
        call = self.call
        first_k, first_v, *_ = self.last[0]
        if k_shape[:-2] != first_k[:-2] or k_shape[-1] != first_k[-1] or v_shape[-1] != first_v[-1]:
            return None  # other heads
        positions = positions_at(call, k_shape[-2], given) if k_shape[:-1] == v_shape[:-1] else None
        if positions is None:
            return None
        if call.is_numpy:
            size = np.dtype(call.dtype).itemsize
            k_strides, v_strides = (tuple(step // size for step in steps) for steps in (k_strides, v_strides))
        if len(k_strides) == 3:  # one row, however far from others
            k_strides, v_strides = (0, *k_strides), (0, *v_strides)
        any_keys: Any = self.prepared
        prepared = any_keys.with_keys(positions, k_strides, v_strides)
        if prepared is None:
            return None
        run = None if self.plain is None else prepared.plain()
        now = CachedCall(call, self.backend, prepared, self.engine_was_named, False, False, run, None, self)
        if prepared.nbytes <= _MOST_KEPT:  # a larger table of visible keys is made again
            self.last = keys, now
        return now

    def arrange(self, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Inputs:
        """The arrays of a call with an equal signature, in four dimensions."""
        if self.call.rank == 4 and bias is None and sinks is None:
            return Inputs(q, k, v)
        return arrange(self.call, q, k, v, bias, sinks)

    def fallback(self, inputs: Inputs) -> CachedCall | None:
        """The next backend by the rules, prepared, if the inputs rule this one out; else None."""
        if self.engine_was_named or not self.checks_values:
            return None
        if cast(PreparedForSomeValues, self.prepared).is_exact_for(inputs):
            return None
        return prepare(self.call, choose(self.call, "auto", exclude=self.backend))

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        """The result, in four dimensions; ``seed``: of the dropout, which is else drawn."""
        if self.checks_values:
            other = self.fallback(inputs)
            if other is not None:
                return other.run(inputs, seed)
        try:
            if self.differentiates:
                result: Result = _autograd().differentiable(self.prepared, self.call, inputs, seed)
                return result
            return self.prepared.run(inputs, seed)
        except LostSums:
            if self.engine_was_named:
                raise EngineError(
                    f'attention: engine "{self.backend}" cannot return weights under this bias: all that a query sees has a bias '
                    "near the greatest or the lowest number.\n"
                    f'Fix: drop engine="{self.backend}", or a smaller bias, as -1e9.'
                ) from None
        return prepare(self.call, choose(self.call, "auto", exclude=self.backend)).run(inputs, seed)

    def __call__(self, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        """What the user gets of these arrays."""
        return self.call.returned(self.run(self.arrange(q, k, v, bias, sinks)))


@cache
def _autograd() -> Any:
    """Loaded with torch."""
    from lowtri.dispatch import autograd

    return autograd


def prepare(call: Call, engine: str) -> CachedCall:
    """Choose the backend and prepare the call."""
    name = choose(call, engine)
    return _cached_call(call, name, load(name).prepare(call), engine != "auto")


def _cached_call(call: Call, backend: str, prepared: Prepared, engine_was_named: bool) -> CachedCall:
    # Data that cannot be read is not looked at.
    checks_values = call.why_unreadable is None and prepared.checks_values()
    differentiates = call.needs_grad and prepared.gradient_source() is not GradientSource.GRAPH
    run = None
    if call.is_plain and not checks_values:
        run = prepared.plain()
    if run is not None and differentiates:
        run = partial(_autograd().apply_to_dense, run, prepared, call)
    return CachedCall(call, backend, prepared, engine_was_named, checks_values, differentiates, run)


def prepared_call(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> tuple[CachedCall, Inputs]:
    """The prepared call for these arguments, from the cache, or checked, prepared and kept; and its arrays in four dimensions."""
    bias, sinks = options.bias, options.sinks
    positions = None
    if options.q_positions is not None or options.k_positions is not None:
        positions = options.q_positions, options.k_positions
    ready, signature = find(
        q, k, v, bias, sinks, positions, mask, options.scale, options.softcap, options.dropout, *options[7:]
    )  # fmt: skip
    if ready is not None:
        return ready, ready.arrange(q, k, v, bias, sinks)
    call, inputs = describe(q, k, v, mask, options)
    ready = prepare(call, options.engine)
    if signature is not None and _may_be_kept(call, mask, options):
        _keep(signature, ready)
    return ready, inputs


def _may_be_kept(call: Call, mask: Any, options: CallOptions) -> bool:
    """Whether calls of an equal signature are equal calls: numbers are plain, and nothing of torch looks at each operation."""
    numbers = options.scale, options.softcap, options.dropout
    flags = options.return_weights, options.return_lse, options.return_received
    return (
        call.why_unreadable is None
        and all(type(x) in (float, int, type(None)) for x in numbers)
        and all(type(x) is bool for x in flags)
        and type(options.engine) is str
        and (type(mask) is str or isinstance(mask, Mask))
    )


def _keep(signature: Any, ready: CachedCall) -> None:
    decode_key, keys, is_decode = signature
    if is_decode and ready.serves_any_keys and decode_key not in PREPARED.calls:
        ready.last = keys, _cached_call(ready.call, ready.backend, ready.prepared, ready.engine_was_named)
        PREPARED.put(decode_key, ready)
    else:
        PREPARED.put(signature, ready)


class CallCache:
    """The most recently used prepared calls by signature.

    Args:
        most: the number of calls kept.  most_bytes: the memory that they may hold together.
    """

    def __init__(self, most: int = 256, most_bytes: int = 64 * 2**20) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.calls: dict[Hashable, CachedCall] = {}  # :func:`find` reads it without the lock
        self._bytes = 0
        self._lock = Lock()

    def put(self, signature: Hashable, ready: CachedCall) -> None:
        size = ready.prepared.nbytes
        if size > self.most_bytes:
            return
        with self._lock:
            if signature in self.calls:  # another thread prepared it first
                return
            ready.last_use = next(_clock)
            self.calls[signature] = ready
            self._bytes += size
            while len(self.calls) > self.most or self._bytes > self.most_bytes:
                oldest = min(self.calls, key=self._last_use)
                self._bytes -= self.calls.pop(oldest).prepared.nbytes

    def _last_use(self, signature: Hashable) -> int:
        return self.calls[signature].last_use

    def clear(self) -> None:
        with self._lock:
            self.calls.clear()
            self._bytes = 0

    def after_fork(self) -> None:
        """Begin anew in a child process: a thread of the parent may have stood inside of a change, with the lock."""
        self._lock = Lock()
        self.clear()

    def __len__(self) -> int:
        return len(self.calls)


PREPARED = CallCache()
after_fork(PREPARED.after_fork)
