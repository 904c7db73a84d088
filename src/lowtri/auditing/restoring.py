"""An audit leaves everything as it was: modes, buffers, plain attributes, generators of random numbers, hooks, gradient mode.

The same snapshot makes calls repeatable: in training mode each call begins with the same running statistics, and a model that
keeps state between calls is put back before each.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

_MOST = 50_000  # objects that are looked at; a model has a few dozen for each layer
_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    str,
    bytes,
    int,
    float,
)
_INTERNAL = ("torch._", "torch.fx", "torch.cuda", "threading", "logging", "_thread", "concurrent", "multiprocessing")


def owners(*functions: Any) -> list[Any]:
    """The objects that functions keep state in: themselves, what they are methods of, and what they close over."""
    found: list[Any] = []
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        found += [function, getattr(function, "__self__", None)]
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                found.append(cell.cell_contents)
    # A list or an array that a function closes over may be a record of its calls or a data set: these stay as they are.
    return [owner for owner in found if hasattr(owner, "__dict__") or _state(owner) is not None]


class Snapshot:
    """What objects hold now, and how it is put back: attributes, containers, tensors and arrays, and generators.

    Parameters are rebound, not copied: a call does not change weights.
    """

    def __init__(self, roots: list[Any]) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self.generators: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}
        waiting = list(roots)
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
                self._tensors.append((value, value.detach().clone()))
            return []
        if isinstance(value, np.ndarray):
            if value.flags.writeable and value.dtype != object:
                self._arrays.append((value, value.copy()))
            return []
        if _state(value) is not None:
            self.generators.append((value, _state(value)))
            return []
        if isinstance(value, (dict, list, set, collections.deque)):
            self._containers.append((value, value.copy()))
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
            kept = now.get("training") if not modes and "training" in before else None
            if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
                now.clear()
                now.update(before)
            if kept is not None:
                now["training"] = kept
        for container, content in self._containers:
            if len(container) != len(content) or not _same_items(container, content):
                container.clear()
                add = container.extend if isinstance(content, (list, collections.deque)) else container.update
                add(content)
        for array, value in self._arrays:
            array[...] = value
        for generator, state in self.generators:
            _set_state(generator, state)
        torch = sys.modules.get("torch")
        if torch is not None:
            with torch.no_grad():
                for tensor, value in self._tensors:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

    def seed(self, seed: int) -> None:
        """Start every generator that the objects hold at a seed."""
        for generator, _ in self.generators:
            if hasattr(generator, "manual_seed"):
                generator.manual_seed(seed)
            elif isinstance(generator, random.Random):
                generator.seed(seed)
            elif isinstance(generator, np.random.RandomState):
                generator.seed(seed % 2**32)
            else:
                generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _same_items(container: Any, content: Any) -> bool:
    if isinstance(content, dict):
        return all(key in container and container[key] is value for key, value in content.items())
    if isinstance(content, set):
        return bool(container == content)
    return all(one is other for one, other in zip(container, content, strict=True))


def _state(value: Any) -> Any:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, (random.Random, np.random.RandomState)):
        return value.getstate() if isinstance(value, random.Random) else value.get_state()
    torch = sys.modules.get("torch")
    return value.get_state() if torch is not None and isinstance(value, torch.Generator) else None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def without_gradients() -> contextlib.AbstractContextManager[Any]:
    """`torch.no_grad()`, where torch has been imported."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.no_grad()


@contextlib.contextmanager
def torch_settings_restored(threads: int | None = None) -> Iterator[None]:
    """The gradient mode, the default dtype and the number of threads as they were; meanwhile `threads`, where given."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    before = torch.get_num_threads()
    try:
        if threads is not None and threads != before:
            torch.set_num_threads(threads)
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


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
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state() if torch is not None else None
    on_devices = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        if torch is not None:
            # `torch.manual_seed` walks the stack for devices that may come later.
            torch.default_generator.manual_seed(seed)
            if on_devices is not None:
                torch.cuda.manual_seed_all(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)
            if on_devices is not None:
                torch.cuda.set_rng_state_all(on_devices)
