"""lowtri's attention for JAX arrays on a CPU: eager, under ``jax.jit``, and with gradients by ``jax.grad``.

    from lowtri.integrations.jax import attention, dot_product_attention

    attention(q, k, v, "causal & window(256)")            # jax.Array in, jax.Array out
    dot_product_attention(query, key, value, mask=mask)   # jax.nn's function of this name

Outside of ``jax.jit``, kernels read and write the arrays' own memory through DLPack. Inside, the call is a host callback: XLA passes
copies, and ``jax.vmap`` calls it once for each example. ``attention`` has lowtri's arguments: (..., H, N, D), the mask required,
queries at the last positions; ``dot_product_attention`` has those of ``jax.nn``: (B, N, H, D), queries at the first ones.
Gradients are those of lowtri's backward, by ``jax.custom_vjp``: reverse mode, once. Needs the extra ``jax``
(``pip install 'lowtri[jax]'``).
"""

from __future__ import annotations

from lowtri.extras import require

require("lowtri.integrations.jax", "torch", "jax")

import operator
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lowtri.dispatch.attend import attention as attend
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import join, read_dense_mask
from lowtri.masks.array_masks import keys
from lowtri.masks.formulas import band, causal, full
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask
from lowtri.ops.arguments import describe
from lowtri.ops.call import CallOptions

if TYPE_CHECKING:
    import jax
    from numpy.typing import ArrayLike

__all__ = ["attention", "dot_product_attention"]

_NN = "dot_product_attention"
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_FLOATS = 5  # of the inputs: q, k, v, bias and sinks have gradients; what follows decides who sees whom


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
        TypeError: by JAX, in forward mode.

    Source: the documentation of JAX, "External callbacks" and "Custom derivative rules".
    """
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    for name, x in arrays.items():
        if x is not None or name not in ("bias", "sinks"):
            _check_array("attention", name, x)
    positions = {name: _positions(name, x) for name, x in (("q_positions", q_positions), ("k_positions", k_positions))}
    options = {"scale": scale, "softcap": softcap, "return_lse": return_lse, **positions}
    mask = as_mask(mask)
    _check_traced(mask, options, arrays)
    results = _operation()((mask, ("engine", engine), *options.items()), *arrays.values())
    return results if return_lse else results[0]


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


def _check_traced(mask: Mask, options: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Raise while a program is traced what its callback would raise when it runs."""
    import jax

    for name in ("scale", "softcap"):
        if isinstance(options[name], jax.core.Tracer):
            raise CallError(
                f"attention: {name} is traced, and it is a constant of a program. Fix: a Python number, or static_argnames."
            )
    shapes = [size for x in arrays.values() if x is not None for size in x.shape]
    if any(isinstance(x, jax.core.Tracer) for x in arrays.values()) and all(isinstance(n, int) for n in shapes):
        q, k, v, bias, sinks = (
            None if x is None else torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="meta")
            for x in arrays.values()
        )
        describe(q, k, v, mask, CallOptions(bias=bias, sinks=sinks, **_arguments(options.items())))


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """``jax.nn.dot_product_attention`` on a CPU, with jax's meanings of all arguments; eager, under ``jax.jit``, with gradients.

    >>> import jax
    >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
    >>> ours = dot_product_attention(x, x, x, is_causal=True, key_value_seq_lengths=jax.numpy.array([3, 5]))
    >>> theirs = jax.nn.dot_product_attention(x, x, x, is_causal=True, key_value_seq_lengths=jax.numpy.array([3, 5]))
    >>> bool(jax.numpy.allclose(ours, theirs, atol=1e-6))
    True

    Args:
        query: (B, T, N, H) or (T, N, H).  key, value: (B, S, K, H) or (S, K, H); N is a multiple of K.
        bias: floats added to the scores, with a gradient.  mask: bools, True = may see. Both broadcast to (B, N, T, S).
        scale: factor on the scores, a constant of a traced program; 1 / sqrt(H) by default.
        is_causal: query i sees keys 0 .. i, also where T and S differ.
        query_seq_lengths, key_value_seq_lengths: (B,), how many queries and keys of each row are real.
        local_window_size: how many keys a query sees before and after its own index; one number for both.
        implementation: None or "xla"; lowtri computes either way.
        return_residual: also return the log-sum-exp of each query's scores, (B, T, N) or (T, N), without gradient.

    Returns:
        the output, like query. One difference from jax: a query that sees no key gives 0 and a log-sum-exp of -inf, where jax
        gives the mean of all values.

    Raises:
        CallError: where jax raises a ValueError, which it is, too; for arrays on an accelerator, and a traced scale.

    Source: the documentation of jax.nn.dot_product_attention.
    """
    import jax
    import jax.numpy as jnp

    if implementation not in (None, "xla"):
        raise CallError(f'{_NN}: implementation is {implementation!r}. Fix: None or "xla", on a CPU.')
    if isinstance(scale, jax.core.Tracer):
        raise CallError(f"{_NN}: scale is traced. Fix: a Python number, or static_argnames.")
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    arrays = {name: None if x is None else _in_four(name, jnp.asarray(x)) for name, x in given.items()}
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    arrays |= {name: None if x is None else jnp.asarray(x) for name, x in lengths.items()}
    _check_nn(arrays)
    q, k, v, added, visible, q_lengths, k_lengths = arrays.values()
    scale = None if scale is None else float(scale)
    options = (_formula(local_window_size, bool(is_causal)), ("scale", scale), ("return_lse", return_residual))
    output, *residual = _operation()(options, q, k, v, added, None, visible, q_lengths, k_lengths)
    shape = jnp.shape(query)
    if not return_residual:
        return output.reshape(shape)
    return output.reshape(shape), jax.lax.stop_gradient(residual[0]).astype(output.dtype).reshape(shape[:-1])


def _in_four(name: str, x: Any) -> Any:
    least = 3 if name in ("query", "key", "value") else 0
    if not least <= x.ndim <= 4:
        raise CallError(f"{_NN}: {name} is {tuple(x.shape)}. Fix: four dimensions, or three without a batch.")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check_nn(arrays: dict[str, Any]) -> None:
    """Raise unless the arrays, in four dimensions, fit together."""
    q, k = arrays["query"], arrays["key"]
    (rows, _, kv_heads, size), whole = k.shape, (q.shape[0], q.shape[2], q.shape[1], k.shape[1])  # B, N, T, S
    for name in ("query", "key", "value", "bias"):
        if arrays[name] is not None:
            _check_array(_NN, name, arrays[name])
    if q.shape[::3] != (rows, size) or not kv_heads or q.shape[2] % kv_heads:
        raise CallError(
            f"{_NN}: query is {q.shape} and key {k.shape}. Fix: (B, T, N, H) and (B, S, K, H), N a multiple of K."
        )
    if arrays["value"].shape != k.shape:
        raise CallError(f"{_NN}: value is {arrays['value'].shape} and key {k.shape}. Fix: the same shape.")
    for name in ("key", "value"):
        if arrays[name].dtype != q.dtype:
            raise CallError(f"{_NN}: query is {q.dtype} and {name} {arrays[name].dtype}. Fix: one dtype.")
    for name in ("bias", "mask"):
        x = arrays[name]
        if x is not None and any(n not in (1, most) for n, most in zip(x.shape, whole, strict=True)):
            raise CallError(f"{_NN}: {name} is {x.shape}, which does not broadcast to (B, N, T, S) = {whole}.")
    if arrays["mask"] is not None and arrays["mask"].dtype != bool:
        raise CallError(
            f"{_NN}: mask is {arrays['mask'].dtype}. Fix: bools, True = may see; numbers to add go to bias=."
        )
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        x = arrays[name]
        if x is not None and (x.shape != (rows,) or x.dtype.kind not in "iu"):
            raise CallError(f"{_NN}: {name} is {x.dtype} {x.shape}. Fix: whole numbers, one for each row: ({rows},).")


def _formula(window: Any, is_causal: bool) -> Mask:
    """The mask that the numbers say, for queries and keys at positions from 0 on."""
    if window is None:
        return causal() if is_causal else full()
    try:
        before, after = (operator.index(n) for n in (window if isinstance(window, tuple | list) else (window, window)))
    except (TypeError, ValueError):
        before = after = -1
    if min(before, after) < 0:
        raise CallError(f"{_NN}: local_window_size is {window!r}. Fix: one or two numbers from 0: keys before, after.")
    return band(before, 0 if is_causal else after)


def _mask_nn(
    mask: Mask, visible: Tensor | None, q_lengths: Tensor | None, k_lengths: Tensor | None, nq: int, nk: int
) -> tuple[Mask, Any]:
    """The mask, and the positions of the queries: -1 past the end of a row."""
    first = 0
    if visible is not None:
        if visible.shape[1] > 1 or visible.shape[2] > 1:  # a table, whose last row is the last key's
            pairs = np.asarray(mask(np.arange(nq)[:, None], np.arange(nk)))
            visible, mask, first = visible & torch.from_numpy(pairs), full(), max(nk - nq, 0)
        mask = join(mask, read_dense_mask(visible, nq, nk, torch.float32, name=(_NN, "mask")).lazy.mask)
    if k_lengths is not None:
        mask = mask & keys(lengths=k_lengths.clamp(0, nk).numpy())
    index = np.arange(nq)
    if q_lengths is None:
        return mask, index + first
    return mask, np.where(index < q_lengths.numpy()[:, None], index + first, -1)


# Attention as an operation of JAX: eager where its arrays hold numbers, a host callback where they are traced; with gradients.


# The mask, then the names and values of what is not an array of JAX; hashable, so that programs are traced once for each.
Options = tuple[Any, ...]


def _arguments(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Options as arguments of a call, with arrays of positions, which are tuples."""
    return {name: x if x is None or "positions" not in name else np.array(x, np.int64) for name, x in options}


def _attend(
    options: Options, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, *masks: Any
) -> tuple[Tensor, ...]:
    """The results of a call of ``attention``; or of ``dot_product_attention``, which has its layout and three ``masks``."""
    mask, arguments = options[0], _arguments(options[1:])
    if masks:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, N, T, H)
        visible, q_lengths, k_lengths = masks
        mask, arguments["q_positions"] = _mask_nn(mask, visible, q_lengths, k_lengths, q.shape[2], k.shape[2])
    results: Any = attend(q, k, v, mask, bias=bias, sinks=sinks, **arguments)
    results = results if arguments["return_lse"] else (results,)
    return tuple(x.transpose(1, 2) for x in results) if masks else results


def _check_array(function: str, name: str, x: Any) -> None:
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
def _operation() -> Callable[..., tuple[Any, ...]]:
    """The operation ``(options, q, k, v, bias, sinks, *others)``, with its gradients, made when jax is first used."""
    import jax

    def results(options: Options, *inputs: Any) -> Any:
        return _call(_run, options, _like_results(options, *inputs), inputs)

    def forward(options: Options, *inputs: Any) -> Any:
        return made(options, *inputs), inputs

    def backward(options: Options, inputs: Any, d_results: Any) -> Any:
        like = tuple(None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:_FLOATS])
        grads = _call(_gradients, options, like, (*inputs, *d_results))
        return *grads, *(None for _ in inputs[_FLOATS:])

    made = jax.custom_vjp(results, nondiff_argnums=(0,))
    made.defvjp(forward, backward)
    return made


def _like_results(options: Options, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, ...]:
    import jax

    output = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jax.ShapeDtypeStruct(q.shape[:-1], np.float64 if q.dtype == np.float64 else np.float32)
    return (output, lse) if dict(options[1:])["return_lse"] else (output,)


def _call(function: Any, options: Options, like: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """The function's results. ``like`` has their shapes and dtypes, None where there are none."""
    import jax

    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        results = function(options, *(None if x is None else from_dlpack(x) for x in arrays))
        return tuple(None if x is None else jax.numpy.from_dlpack(x) for x in results)
    wanted = tuple(x for x in like if x is not None)
    results = iter(jax.pure_callback(partial(_on_host, function, options), wanted, *arrays, vmap_method="sequential"))
    return tuple(None if x is None else next(results) for x in like)


def _on_host(function: Any, options: Options, *arrays: Any) -> tuple[Any, ...]:
    """What XLA calls: arrays of the host in, NumPy arrays out."""
    results = function(options, *(None if x is None else _tensor(np.asarray(x)) for x in arrays))
    return tuple(_array(x) for x in results if x is not None)


def _run(options: Options, *inputs: Any) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(x.contiguous() for x in _attend(options, *inputs))


def _gradients(options: Options, *arrays: Any) -> tuple[Tensor | None, ...]:
    results_end = len(arrays) - (2 if dict(options[1:])["return_lse"] else 1)
    inputs, others, d_results = arrays[:_FLOATS], arrays[_FLOATS:results_end], arrays[results_end:]
    leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        results = _attend(options, *leaves, *others)
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
