"""An audit leaves everything as it was: modes, buffers, plain attributes, generators of random numbers, hooks, gradient mode.

The same snapshot makes calls repeatable: in training mode each call begins with the same running statistics, and a model that
keeps state between calls is put back before each.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lowtri.auditing.adapter import owners

_MOST = 50_000  # objects that are looked at; a model has a few dozen for each layer
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_OPAQUE = (type, types.ModuleType, *_FUNCTIONS, str, bytes, int, float)
_INTERNAL = ("torch._", "torch.fx", "torch.cuda", "threading", "logging", "_thread", "concurrent", "multiprocessing")


class Snapshot:
    """What functions and the objects behind them hold now, and how it is put back: attributes, containers, tensors and arrays, and
    generators.

    Parameters are rebound, not copied: a call does not change weights. A list or an array that a function closes over may be a
    record of its calls or a data set: these stay as they are.
    """

    def __init__(self, *functions: Any) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._undo: list[Callable[[], Any]] = []  # for everything but attributes
        self._generators: list[Any] = []
        self._seen: dict[int, Any] = {}
        roots = [owner for function in functions for owner in owners(function)]
        waiting = [root for root in roots if hasattr(root, "__dict__") or _is_generator(root)]
        while waiting and len(self._seen) < _MOST:
            waiting += self._look(waiting.pop())

    def _look(self, value: Any) -> list[Any]:
        """Store what a value holds; return the values in it."""
        if value is None or isinstance(value, _OPAQUE) or id(value) in self._seen:
            return []
        self._seen[id(value)] = value  # kept, so that its id stays its own
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
                self._undo.append(partial(_restore_tensor, value, value.detach().clone()))
            return []
        if isinstance(value, np.ndarray):
            if value.flags.writeable and value.dtype != object:
                self._undo.append(partial(np.copyto, value, value.copy()))
            return []
        if _is_generator(value):
            self._generators.append(value)
            self._undo.append(_state_restorer(value))
            return []
        if isinstance(value, (dict, list, set, collections.deque)):
            self._undo.append(partial(_restore_container, value, value.copy()))
            return list(value.values()) if isinstance(value, dict) else list(value)
        if isinstance(value, tuple):
            return list(value)
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or type(value).__module__.startswith(_INTERNAL):
            return []
        self._attributes.append((attributes, dict(attributes)))
        return list(attributes.values())

    def restore(self, *, modes: bool = True) -> None:
        """Put everything back; `modes` says whether training flags are."""
        for now, before in self._attributes:
            if not modes and "training" in before:
                before = {**before, "training": now.get("training")}
            _restore_container(now, before)
        for undo in self._undo:
            undo()

    def seed(self, seed: int) -> None:
        """Start every generator that the objects hold at a seed."""
        for generator in self._generators:
            if hasattr(generator, "manual_seed"):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed % 2**32)


def _restore_container(container: Any, content: Any) -> None:
    now, before = ([*part, *(part.values() if isinstance(part, dict) else ())] for part in (container, content))
    if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
        return
    container.clear()
    add = container.extend if isinstance(content, (list, collections.deque)) else container.update
    add(content)


def _restore_tensor(tensor: Any, value: Any) -> None:
    torch = sys.modules["torch"]
    with torch.no_grad():
        if not torch.equal(tensor, value):
            tensor.copy_(value)


def _is_generator(value: Any) -> bool:
    torch = sys.modules.get("torch")
    own = isinstance(value, (np.random.Generator, random.Random, np.random.RandomState))
    return own or (torch is not None and isinstance(value, torch.Generator))


def _state_restorer(generator: Any) -> Callable[[], Any]:
    """What puts a generator of random numbers back into the state that it is in now."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())


def without_gradients() -> contextlib.AbstractContextManager[Any]:
    """`torch.no_grad()`, where torch has been imported."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.no_grad()


@contextlib.contextmanager
def torch_settings_restored(threads: int | None = None) -> Iterator[None]:
    """The gradient mode, the default dtype and the number of threads as they were; meanwhile `threads`, where given."""
    torch = sys.modules.get("torch")
    with contextlib.ExitStack() as undo:
        if torch is not None:
            undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            if threads is not None:
                torch.set_num_threads(threads)
        yield


@contextlib.contextmanager
def in_mode(module: Any, training: bool | None) -> Iterator[None]:
    """Set a module's training flags (None leaves them as they are), and restore every part's after it."""
    flags = [] if module is None else [(part, part.training) for part in module.modules()]
    try:
        if module is not None and training is not None:
            module.train(training)
        yield
    finally:
        for part, flag in flags:
            part.training = flag


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Every global source of random numbers at the same seed, and its state restored afterwards."""
    torch = sys.modules.get("torch")
    with contextlib.ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        if torch is not None:
            undo.callback(torch.set_rng_state, torch.get_rng_state())
            # `torch.manual_seed` walks the stack for devices that may come later.
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
                torch.cuda.manual_seed_all(seed)
        yield
