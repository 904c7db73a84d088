"""Attention as an operation of JAX: eager where its arrays hold numbers, a host callback where they are traced; with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lowtri.errors import CallError, EngineError
from lowtri.masks.mask import Mask

__all__ = ["Attend", "JaxOptions", "check_array", "check_installed", "operation"]

# From the options and the inputs of a call, as tensors, to its results: the output, and the log-sum-exp if it is returned.
Attend = Callable[..., tuple[Tensor, ...]]

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_FLOATS = 5  # of the inputs: q, k, v, bias and sinks have gradients; what follows decides who sees whom


class JaxOptions(NamedTuple):
    """Everything that is no array of JAX; hashable, so that programs are traced once for each."""

    mask: Mask
    scale: float | None
    softcap: float | None
    q_positions: tuple[Any, ...] | None
    k_positions: tuple[Any, ...] | None
    return_lse: bool
    engine: str

    def arguments(self) -> dict[str, Any]:
        positions = {name: getattr(self, name) for name in ("q_positions", "k_positions")}
        arrays = {name: None if x is None else np.array(x, np.int64) for name, x in positions.items()}
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "return_lse": self.return_lse,
            "engine": self.engine,
            **arrays,
        }


def check_installed(function: str) -> None:
    try:
        import jax  # noqa: F401
    except ImportError:
        raise EngineError(f"{function}: jax is not installed. Fix: pip install 'lowtri[jax]'.") from None


def check_array(function: str, name: str, x: Any) -> None:
    """Raise unless an argument is an array of floats on a CPU."""
    import jax

    if not isinstance(x, jax.Array):
        raise CallError(
            f"{function}: {name} is {type(x).__name__}, but it takes a jax.Array. Fix: jnp.asarray({name})."
        )
    if str(x.dtype) not in _DTYPES:
        raise CallError(
            f"{function}: {name} is {x.dtype}; expected one of {', '.join(_DTYPES)}. Fix: {name}.astype(jnp.float32)."
        )
    if not isinstance(x, jax.core.Tracer) and {device.platform for device in x.devices()} != {"cpu"}:
        raise CallError(f'{function}: {name} is on {x.devices()}. Fix: jax.device_put({name}, jax.devices("cpu")[0]).')


@cache
def operation(attend: Attend) -> Callable[..., tuple[Any, ...]]:
    """The operation ``(options, q, k, v, bias, sinks, *others)``, with its gradients, made when jax is first used."""
    import jax

    run, gradients = partial(_run, attend), partial(_gradients, attend)

    def results(options: JaxOptions, *inputs: Any) -> Any:
        return _call(run, options, _like_results(options, *inputs), inputs)

    def forward(options: JaxOptions, *inputs: Any) -> Any:
        return made(options, *inputs), inputs

    def backward(options: JaxOptions, inputs: Any, d_results: Any) -> Any:
        like = tuple(None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:_FLOATS])
        grads = _call(gradients, options, like, (*inputs, *d_results))
        return *grads, *(None for _ in inputs[_FLOATS:])

    made = jax.custom_vjp(results, nondiff_argnums=(0,))
    made.defvjp(forward, backward)
    return made


def _like_results(options: JaxOptions, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, ...]:
    import jax

    output = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:-1], np.float64 if q.dtype == np.float64 else np.float32)
    return (output, lse) if options.return_lse else (output,)


def _call(function: Any, options: JaxOptions, like: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """The function's results. ``like`` has their shapes and dtypes, None where there are none."""
    import jax

    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        results = function(options, *(None if x is None else from_dlpack(x) for x in arrays))
        return tuple(None if x is None else jax.numpy.from_dlpack(x) for x in results)
    wanted = tuple(x for x in like if x is not None)
    found = iter(jax.pure_callback(partial(_on_host, function, options), wanted, *arrays, vmap_method="sequential"))
    return tuple(None if x is None else next(found) for x in like)


def _on_host(function: Any, options: JaxOptions, *arrays: Any) -> tuple[Any, ...]:
    """What XLA calls: arrays of the host in, NumPy arrays out."""
    results = function(options, *(None if x is None else _tensor(np.asarray(x)) for x in arrays))
    return tuple(_array(x) for x in results if x is not None)


def _run(attend: Attend, options: JaxOptions, *inputs: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(x.contiguous() for x in attend(options, *inputs))


def _gradients(attend: Attend, options: JaxOptions, *arrays: Any) -> tuple[Tensor | None, ...]:
    results_end = len(arrays) - (2 if options.return_lse else 1)
    inputs, others, d_results = arrays[:_FLOATS], arrays[_FLOATS:results_end], arrays[results_end:]
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        results = attend(options, *leaves, *others)
    wanted = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad(results, wanted, d_results, materialize_grads=True))
    return tuple(None if x is None else next(grads).contiguous() for x in leaves)


# NumPy has no bfloat16 of its own: its bits travel as int16.


def _tensor(x: Any) -> Tensor:
    x = np.ascontiguousarray(x)
    x = x if x.flags.writeable else x.copy()
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == _bfloat16() else torch.from_numpy(x)


def _array(x: Tensor) -> Any:
    return x.view(torch.int16).numpy().view(_bfloat16()) if x.dtype == torch.bfloat16 else x.numpy()


@cache
def _bfloat16() -> Any:
    import jax

    return np.dtype(jax.numpy.bfloat16)
