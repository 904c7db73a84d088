"""lowtri's attention for JAX arrays on a CPU: eager, under ``jax.jit``, and with gradients by ``jax.grad``.

    from lowtri.integrations.jax import attention

    attention(q, k, v, "causal & window(256)")     # jax.Array in, jax.Array out

Outside of ``jax.jit``, kernels read and write the arrays' own memory through DLPack. Inside, the call is a host callback: XLA passes
copies, and ``jax.vmap`` calls it once for each example. The arguments are lowtri's: (..., H, N, D), the mask required, queries at the
last positions; ``jax.nn`` has (B, N, H, D), and aligns ``is_causal`` with the first key. Gradients are those of lowtri's backward, by
``jax.custom_vjp``: reverse mode, once. Needs the extra ``jax`` (``pip install 'lowtri[jax]'``).
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lowtri.dispatch.attend import attention as attend
from lowtri.errors import CallError, EngineError
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask
from lowtri.ops.call import CallOptions
from lowtri.ops.describe import describe

if TYPE_CHECKING:
    import jax
    from numpy.typing import ArrayLike

__all__ = ["attention"]

_DTYPES = ("float32", "float64", "bfloat16", "float16")


class _Options(NamedTuple):
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


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask | str,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
    q_positions: ArrayLike | None = None,
    k_positions: ArrayLike | None = None,
    return_lse: bool = False,
    engine: str = "auto",
) -> Any:
    """:func:`lowtri.attention` for JAX arrays on a CPU.

    >>> import jax, numpy as np
    >>> x = jax.numpy.eye(3)
    >>> np.asarray(attention(x, x, x, "causal")).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.36, 0.64, 0.  ],
           [0.26, 0.26, 0.47]], dtype=float32)
    >>> jax.grad(lambda x: attention(x, x, x, "causal").sum())(x).shape
    (3, 3)

    Args:
        q: (..., Hq, Nq, D), or (H, N, D), or (N, D), on a CPU.
        k: (..., Hkv, Nk, D).  v: (..., Hkv, Nk, Dv).
        mask: a mask or its text. It is a constant of a traced program.
        scale, softcap, return_lse, engine: as in :func:`lowtri.attention`.
        bias: added to the scores; with a gradient.  sinks: (Hq,), with a gradient.
        q_positions, k_positions: (N,) or (B, N), constants of a traced program.

    Returns:
        the output (..., Hq, Nq, Dv); or the output and the log-sum-exp (..., Hq, Nq) in float32 (float64 for float64).

    Raises:
        CallError: for arrays on an accelerator, other dtypes, and positions that are traced; and as :func:`lowtri.attention`.
        EngineError: if jax is not installed.
        TypeError: by JAX, in forward mode.

    Source: the documentation of JAX, "External callbacks" and "Custom derivative rules".
    """
    try:
        import jax  # noqa: F401
    except ImportError:
        raise EngineError("attention: jax is not installed. Fix: pip install 'lowtri[jax]'.") from None
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    for name, x in arrays.items():
        _check(name, x, optional=name in ("bias", "sinks"))
    options = _Options(
        as_mask(mask), scale, softcap, _positions("q_positions", q_positions), _positions("k_positions", k_positions),
        return_lse, engine,
    )  # fmt: skip
    _check_traced(options, arrays)
    results = _operation()(options, q, k, v, bias, sinks)
    return results if return_lse else results[0]


def _check(name: str, x: Any, optional: bool) -> None:
    import jax

    if x is None and optional:
        return
    if not isinstance(x, jax.Array):
        raise CallError(f"attention: {name} is {type(x).__name__}, but it takes a jax.Array. Fix: jnp.asarray({name}).")
    if str(x.dtype) not in _DTYPES:
        raise CallError(
            f"attention: {name} is {x.dtype}; expected one of {', '.join(_DTYPES)}. Fix: {name}.astype(jnp.float32)."
        )
    if not isinstance(x, jax.core.Tracer) and {device.platform for device in x.devices()} != {"cpu"}:
        raise CallError(f'attention: {name} is on {x.devices()}. Fix: jax.device_put({name}, jax.devices("cpu")[0]).')


def _positions(name: str, x: Any) -> tuple[Any, ...] | None:
    """Positions as nested tuples, which are hashable."""
    import jax

    if x is None:
        return None
    if isinstance(x, jax.core.Tracer):
        raise CallError(f"attention: {name} is traced, and positions are constants of a program. Fix: a NumPy array.")
    try:
        array = np.asarray(x)
    except ValueError:
        raise CallError(f"attention: {name} has rows of different lengths; expected (N,) or (B, N).") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise CallError(f"attention: {name} is {array.dtype} {array.shape}; expected whole numbers, (N,) or (B, N).")
    return tuple(array.tolist()) if array.ndim == 1 else tuple(map(tuple, array.tolist()))


def _check_traced(options: _Options, arrays: dict[str, Any]) -> None:
    """Raise while a program is traced what its callback would raise when it runs."""
    import jax

    for name in ("scale", "softcap"):
        if isinstance(getattr(options, name), jax.core.Tracer):
            raise CallError(
                f"attention: {name} is traced, and it is a constant of a program. Fix: a Python number, or static_argnames."
            )
    shapes = [size for x in arrays.values() if x is not None for size in x.shape]
    if not any(isinstance(x, jax.core.Tracer) for x in arrays.values()) or not all(isinstance(n, int) for n in shapes):
        return
    like = {
        name: None if x is None else torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="meta")
        for name, x in arrays.items()
    }
    q, k, v, bias, sinks = like.values()
    given = options.arguments()
    del given["engine"]
    describe(q, k, v, options.mask, CallOptions(bias=bias, sinks=sinks, **given))


# The operation: eager where its arrays hold numbers, a callback where they are traced.


@cache
def _operation() -> Any:
    """The operation with its gradients, made when jax is first used."""
    import jax

    def results(options: _Options, *inputs: Any) -> Any:
        return _call(_run, options, _like_results(options, *inputs), inputs)

    def forward(options: _Options, *inputs: Any) -> Any:
        return operation(options, *inputs), inputs

    def backward(options: _Options, inputs: Any, d_results: Any) -> Any:
        like = tuple(None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
        return _call(_gradients, options, like, (*inputs, *d_results))

    operation = jax.custom_vjp(results, nondiff_argnums=(0,))
    operation.defvjp(forward, backward)
    return operation


def _like_results(options: _Options, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, ...]:
    import jax

    output = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:-1], np.float64 if q.dtype == np.float64 else np.float32)
    return (output, lse) if options.return_lse else (output,)


def _call(function: Any, options: _Options, like: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """The function's results. ``like`` has their shapes and dtypes, None where there are none."""
    import jax

    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        results = function(options, *(None if x is None else from_dlpack(x) for x in arrays))
        return tuple(None if x is None else jax.numpy.from_dlpack(x) for x in results)
    wanted = tuple(x for x in like if x is not None)
    found = iter(jax.pure_callback(partial(_on_host, function, options), wanted, *arrays, vmap_method="sequential"))
    return tuple(None if x is None else next(found) for x in like)


def _on_host(function: Any, options: _Options, *arrays: Any) -> tuple[Any, ...]:
    """What XLA calls: arrays of the host in, NumPy arrays out."""
    results = function(options, *(None if x is None else _tensor(np.asarray(x)) for x in arrays))
    return tuple(_array(x) for x in results if x is not None)


def _run(options: _Options, *inputs: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(x.contiguous() for x in _attend(options, *inputs))


def _attend(options: _Options, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[Tensor, ...]:
    results = attend(q, k, v, options.mask, bias=bias, sinks=sinks, **options.arguments())
    return results if options.return_lse else (results,)


def _gradients(options: _Options, *arrays: Any) -> tuple[Tensor | None, ...]:
    inputs, d_results = arrays[:5], arrays[5:]
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        results = _attend(options, *leaves)
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
