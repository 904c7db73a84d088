"""Private functions of transformers, under plain names; ``tested`` lists the versions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any

from lowtri.compat import constant_while_traced, tracer
from lowtri.errors import EngineError
from lowtri.forks import after_fork


def known_mask_function(name: str, *arguments: Any) -> Callable[..., Any] | None:
    """``masking_utils.<name>``, called if there are arguments; None in versions without it.

    Which variables these functions close over is documented nowhere; :mod:`lowtri.integrations.transformers.masks` compares what it
    reads from them with their values.
    """
    from transformers import masking_utils

    function: Callable[..., Any] | None = getattr(masking_utils, name, None)
    return function(*arguments) if function is not None and arguments else function


def collects_attentions() -> bool:
    """Whether the model that runs collects its layers' attention weights: it no longer tells the layers.

    True in versions that do not collect: layers then return the weights always, as eager attention does.
    """
    module = sys.modules.get("transformers.utils.output_capturing")  # an import takes longer, and every layer asks
    if module is None:
        try:
            module = importlib.import_module("transformers.utils.output_capturing")
        except ImportError:
            return True
    collector = module._active_collector
    if tracer() and not getattr(collector, "compiling", True):  # no forward that collects is part of the program
        return _collected_names() == "attentions"
    collected = collector.get()
    return collected is not None and any("attentions" in name for name in collected)


@constant_while_traced  # a program cannot read a context variable
def _collected_names() -> str:
    """ "attentions" if a forward around the program collects them while it is traced."""
    collected = sys.modules["transformers.utils.output_capturing"]._active_collector.get()
    return "attentions" if collected is not None and any("attentions" in name for name in collected) else ""


def has_interface(model: Any) -> bool:
    """Whether a part of a model calls the attention that is registered; True if this version does not say."""
    return bool(getattr(model, "_can_set_attn_implementation", lambda: True)())


def attention_name(model: Any) -> str | None:
    """The attention implementation that a model has, which ``set_attn_implementation`` changes; None for other models."""
    name: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name


def set_attention_name(model: Any, name: str) -> None:
    """Set the attention implementation of a model whose class does not let ``set_attn_implementation`` do so: Falcon."""
    model.config._attn_implementation = name


def split_heads(layer: Any, fused: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values (B, N, H, D) of a layer of Falcon, from the output of its joint projection.

    Their order in that output depends on three fields of the configuration.
    """
    parts: tuple[Any, Any, Any] = layer._split_heads(fused)
    return parts


def is_stateful(model: Any) -> bool:
    """Whether a model's cache cannot go back: recurrent and hybrid models."""
    return bool(getattr(model, "_is_stateful", False))


def model_inside(module: Any) -> Any:
    """The outermost model of transformers in a module, which may be the module itself; None if there is none.

    transformers is not loaded for the answer: without it there is none.
    """
    library = sys.modules.get("transformers.modeling_utils")
    parts = getattr(module, "modules", None)
    if library is None or not callable(parts) or isinstance(module, type):
        return None
    return next((part for part in parts() if isinstance(part, library.PreTrainedModel)), None)


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention that a layer asked the interface for: its arguments, and what it returned."""

    module: Any
    query: Any  # (B, Hq, Nq, D)
    key: Any  # (B, Hkv, Nk, D)
    value: Any  # (B, Hkv, Nk, Dv)
    mask: Any  # what the implementation's mask function made, or None
    options: dict[str, Any]  # the others, by name: scaling, softcap, ...
    implementation: str | None  # the name that was asked for
    result: Any  # (output, weights)

    @property
    def layer(self) -> int | None:
        """The index that the module says it has; None if it says none."""
        index = getattr(self.module, "layer_idx", None)
        return index if isinstance(index, int) else None

    def without_arrays(self) -> AttentionCall:
        """This call without what needs memory."""
        return AttentionCall(self.module, None, None, None, None, {}, self.implementation, None)


_recorder: ContextVar[Callable[[AttentionCall], None] | None] = ContextVar("lowtri_attention_recorder", default=None)
_recording = 0  # how many recordings run, in all threads
_recording_lock = Lock()
_own_get_interface: Any = None


@contextmanager
def recorded_attention(record: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Pass every call of the attention interface in this thread to ``record``, whatever the implementation.

    A model asks ``AttentionInterface.get_interface`` in every layer and every forward. Registering another implementation would
    not show what the model's own does, and would change its configuration; so the method is replaced while a recording runs.

    Raises:
        EngineError: if this version has no such method.
    """
    global _recording, _own_get_interface
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    if not hasattr(interface, "get_interface"):
        raise EngineError(
            "explain: this transformers has no AttentionInterface.get_interface, by which explain reads a model's attention.\n"
            "Fix: pip install -U transformers."
        )
    with _recording_lock:
        if interface.get_interface is not _get_recorded_interface:
            _own_get_interface = interface.get_interface
            interface.get_interface = _get_recorded_interface
        _recording += 1
    token = _recorder.set(record)
    try:
        yield
    finally:
        _recorder.reset(token)
        with _recording_lock:
            _recording -= 1
            if not _recording:
                interface.get_interface = _own_get_interface


def _renew_lock() -> None:
    """In a forked child, where only the thread that forked lives on: another thread's recording never ends."""
    global _recording, _recording_lock
    _recording_lock = Lock()
    _recording = 0 if _recorder.get() is None else 1


after_fork(_renew_lock)


def _get_recorded_interface(interface: Any, implementation: str | None, *others: Any, **options: Any) -> Any:
    """Of ``AttentionInterface.get_interface``: the same function, which passes its calls on in a thread that records."""
    function = _own_get_interface(interface, implementation, *others, **options)
    record = _recorder.get()
    if record is None:
        return function

    @wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        record(_described_call(args, kwargs, implementation, result))
        return result

    return recorded


_ARGUMENTS = ("module", "query", "key", "value", "attention_mask", "dropout", "scaling")  # of every attention function


def _described_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], implementation: str | None, result: Any
) -> AttentionCall:
    options = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    return AttentionCall(
        module=options.pop("module", None),
        query=options.pop("query", None),
        key=options.pop("key", None),
        value=options.pop("value", None),
        mask=options.pop("attention_mask", None),
        options=options,
        implementation=implementation,
        result=result,
    )
