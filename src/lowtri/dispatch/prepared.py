"""The cache of prepared calls: bounded in number and in bytes, shared by all threads, and clearable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

from lowtri.backends.base import Prepared
from lowtri.dispatch.choose import choose, load
from lowtri.dispatch.signature import may_be_cached, signature
from lowtri.ops.call import Call, CallOptions, Inputs, Result
from lowtri.ops.describe import arrange, describe

__all__ = ["PREPARED", "PreparedCall", "PreparedCalls", "prepare", "prepared_call"]


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call, the backend chosen for it, and the backend's preparation."""

    call: Call
    backend: str
    prepared: Prepared
    by_name: bool  # requested by name: inputs with NaN, inf or huge numbers are then not sent to another backend
    selective: bool
    differentiates: bool
    is_four: bool  # the user's q, k and v have four dimensions, and there is no other array

    def fallback(self, inputs: Inputs) -> PreparedCall | None:
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


def prepare(call: Call, engine: str) -> PreparedCall:
    """Choose the backend and prepare the call."""
    name = choose(call, engine)
    prepared = load(name).prepare(call)
    selective = call.opaque is None and prepared.is_selective  # opaque data is not inspected
    differentiates = call.needs_grad and (prepared.computes_gradients or prepared.formula_dtype is not None)
    is_four = call.rank == 4 and call.bias is None and call.sinks is None
    return PreparedCall(call, name, prepared, engine != "auto", selective, differentiates, is_four)


@cache
def _differentiable() -> Callable[..., Result]:
    """Loaded with torch."""
    from lowtri.dispatch.autograd import differentiable

    return differentiable


def prepared_call(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> tuple[PreparedCall, Inputs]:
    """The prepared call for these arguments: from the cache, or checked, prepared and cached."""
    key = signature(q, k, v, mask, options)
    if key is not None:
        try:
            ready = PREPARED.get(key)
        except TypeError:  # an unhashable argument, which is rejected below
            key = ready = None
        if ready is not None:
            if ready.is_four:
                return ready, Inputs(q, k, v, None, None)
            return ready, arrange(ready.call, q, k, v, options.bias, options.sinks)
    call, inputs = describe(q, k, v, mask, options)
    ready = prepare(call, options.engine)
    if key is not None and may_be_cached(mask, options):
        PREPARED.put(key, ready)
    return ready, inputs


class PreparedCalls:
    """The most recently used prepared calls by signature.

    Args:
        most: the number of calls kept.  most_bytes: the memory that they may hold together.
    """

    def __init__(self, most: int = 256, most_bytes: int = 64 * 2**20) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._calls: OrderedDict[Hashable, PreparedCall] = OrderedDict()
        self._newest: PreparedCall | None = None
        self._bytes = 0
        self._lock = Lock()

    def get(self, signature: Hashable) -> PreparedCall | None:
        call = self._calls.get(signature)
        if call is not None and call is not self._newest:  # the layers of a model repeat one call
            with self._lock:
                if signature in self._calls:  # no other thread has evicted it
                    self._calls.move_to_end(signature)
                    self._newest = call
        return call

    def put(self, signature: Hashable, call: PreparedCall) -> None:
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


PREPARED = PreparedCalls()
