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

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lowtri.dispatch.attend import attention as attend
from lowtri.errors import CallError
from lowtri.integrations.jax_nn import dot_product_attention
from lowtri.integrations.jax_operation import JaxOptions, check_array, check_installed, operation
from lowtri.masks.mask import Mask
from lowtri.masks.text import as_mask
from lowtri.ops.call import CallOptions
from lowtri.ops.describe import describe

if TYPE_CHECKING:
    import jax
    from numpy.typing import ArrayLike

__all__ = ["attention", "dot_product_attention"]


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
    check_installed("attention")
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    for name, x in arrays.items():
        if x is not None or name not in ("bias", "sinks"):
            check_array("attention", name, x)
    options = JaxOptions(
        as_mask(mask), scale, softcap, _positions("q_positions", q_positions), _positions("k_positions", k_positions),
        return_lse, engine,
    )  # fmt: skip
    _check_traced(options, arrays)
    results = operation(_attend)(options, q, k, v, bias, sinks)
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


def _check_traced(options: JaxOptions, arrays: dict[str, Any]) -> None:
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


def _attend(options: JaxOptions, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any) -> tuple[Tensor, ...]:
    results = attend(q, k, v, options.mask, bias=bias, sinks=sinks, **options.arguments())
    return results if options.return_lse else (results,)
