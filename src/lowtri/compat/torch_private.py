"""Private functions of torch, under plain names; ``tested`` lists the versions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Documented in "Extending PyTorch", without a public module.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from lowtri.compat.tested import tried_range
from lowtri.errors import EngineError


def _lacks(*paths: str) -> str | None:
    """Which of ``torch.<path>`` this torch lacks, in words; None if it has all."""
    for path in paths:
        try:
            attrgetter(path)(torch)
        except AttributeError:
            return f"torch {torch.__version__} has no torch.{path}, which lowtri was written for"
    return None


def _require(*paths: str) -> None:
    if reason := _lacks(*paths):
        raise EngineError(f"{reason}.\nFix: a version of torch that lowtri is tested with: {tried_range('torch')}.")


def _private(path: str, fallback: Any = None) -> Any:
    """``torch.<path>``, bound once; where this torch lacks it the fallback, or a function that raises an EngineError."""
    return fallback or (lambda *_, **__: _require(path)) if _lacks(path) else attrgetter(path)(torch)


# What torch would do on the way to a tensor's numbers. Public functions (is_conj, is_nested, ...) each answer for one of these things,
# none for the wrappers of torch.func, and asking them all takes longer than a small call of attention.

dispatch_keys = _private("_C._dispatch_keys")  # (tensor) -> the set of its dispatch keys; raw_repr() is an int
dispatch_mode_count = _private("_C._len_torch_dispatch_stack")  # () -> how many TorchDispatchModes are active
tracing_state = _private("_C._get_tracing_state")  # () -> None outside of torch.jit.trace
transform_stack = _private("_C._functorch.peek_interpreter_stack", lambda: None)  # () -> None outside of torch.func
# (True) -> None without torch.autograd.graph.saved_tensors_hooks; where this torch cannot tell, there may be some
saved_tensors_hooks = _private("_C._autograd._top_saved_tensors_default_hooks", lambda _: ())

# Why it cannot be told whether kernels may read a tensor's memory, so that they do not run; None where it can.
why_unreadable = _lacks(
    "_C._dispatch_keys",
    "_C.DispatchKeySet",
    "_C.DispatchKey.ADInplaceOrView",
    "_C._len_torch_dispatch_stack",
    "_C._get_tracing_state",
    "_C._functorch.peek_interpreter_stack",
    "autograd.forward_ad._current_level",
)


def dispatch_key_set(*names: str) -> int:
    """The ``raw_repr()`` of the dispatch keys of a CPU tensor, and these."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


# () -> the level of forward-mode differentiation, -1 outside of it; publicly only a dual tensor shows it
forward_level = partial(getattr, forward_ad, "_current_level", -1)

# (tensor) -> zeros without memory, as autograd makes them.
is_zero_tensor = _private("Tensor._is_zerotensor", lambda x: False)


def is_fake(x: Any) -> bool:
    """Whether x stands for a tensor while a program is recorded, and has no numbers. Their classes are private, and loaded late."""
    return type(x).__module__ in ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def functional_value(x: Tensor) -> Tensor:
    """The tensor in the wrapper that torch.export records with, with all its updates; any other tensor as it is."""
    if _lacks("_is_functional_tensor", "_sync", "_from_functional_tensor") or not torch._is_functional_tensor(x):
        return x
    torch._sync(x)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(x)


def apply_function(function: type[torch.autograd.Function]) -> Any:
    """The function's ``apply`` without Python's part of it, which looks for tensors of torch.func's transforms."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


# torch's own attention by a name that nobody replaces: torch.nn.functional's may be lowtri's by now.
scaled_dot_product_attention = _private(
    "_C._nn.scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention
)

# Gradients under is_grads_batched=True come as the batched tensors of the vmap before torch.func, which has no public functions.

is_batched = _private("_C._functorch.is_legacy_batchedtensor", lambda x: False)  # (tensor) -> bool
in_batch = _private("_add_batch_dim")  # (tensor, dimension, level) -> a batched tensor
# (batched, level, size, dimension) -> a tensor; the size is read for others only.
out_of_batch = _private("_remove_batch_dim")


def vmap_level() -> int:
    """The level of the vmap around."""
    _require("_C._vmapmode_increment_nesting", "_C._vmapmode_decrement_nesting")
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


# () -> a context in which operators run without their autograd.
below_autograd = _private("_C._AutoDispatchBelowAutograd")


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Autograd inside a custom operator, where torch switches it off for the thread below what ``enable_grad`` reaches."""
    _require("_C._dispatch_tls_local_exclude_set", "_C._dispatch_tls_local_include_set", "_C._ForceDispatchKeyGuard")
    key = torch._C.DispatchKey
    off = torch._C._dispatch_tls_local_exclude_set()
    for name in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        off = off.remove(name)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off), torch.enable_grad():
        yield


# Tensor subclasses. torch documents how they are written with these functions, and has no public names for them.

# (class, shape, dtype=, device=) -> a tensor without memory
make_wrapper = _private("Tensor._make_wrapper_subclass")
# A context in which __torch_function__ is not called.
without_torch_function = _private("_C.DisableTorchFunctionSubclass")
# The operator that x.to() becomes.
to_copy = _private("ops.aten._to_copy.default")


def mapped_indexing() -> AbstractContextManager[object]:
    """A context in which functions under torch.vmap may index tensors by a mapped position, as FlexAttention's may."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    except ImportError:
        return nullcontext()  # vmap then raises for such functions
    return TransformGetItemToIndex()


@cache
def operation_name(operation: Any) -> str | None:
    """The name of an operation in a dispatch mode, without its overload, as ``add``; None if it changes tensors or draws numbers."""
    if operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in operation.tags:
        return None
    return str(operation).removeprefix("aten.").split(".")[0]


def inside_compiled(module: Any) -> Any:
    """The module that torch.compile wrapped, or None for any other; torch has no public name for it."""
    return getattr(module, "_orig_mod", None)


# (bool tensor, message) -> None: a compiled program raises where it is False. torch.assert raises while the program is traced.
assert_in_graph = _private("_assert_async")


P = ParamSpec("P")
R = TypeVar("R")


def without_compiled_programs() -> AbstractContextManager[object]:
    """Calls of compiled modules run their own code, so that hooks and replaced functions are met.

    ``torch.compiler.set_stance`` loads the compiler, which takes a second; where nothing has loaded it, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def outside_graph(function: Callable[P, R], reason: str = "") -> Callable[P, R]:
    """The function, which torch.compile does not trace; with the reason, where this torch takes one (2.8 and later)."""
    options: dict[str, Any] = {}
    if reason and "reason" in inspect.signature(torch.compiler.disable).parameters:
        options["reason"] = reason
    outside: Callable[P, R] = torch.compiler.disable(function, **options)
    return outside
