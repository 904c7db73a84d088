"""lowtri's attention on JAX arrays: what jax.nn.dot_product_attention gives, eager and under jit, with gradients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import lowtri
from lowtri.errors import CallError, EngineError, MaskError
from lowtri.integrations import jax as module
from lowtri.integrations.jax import attention

N = 9


def qkv(heads: int = 4, kv_heads: int = 2, queries: int = N, dtype: Any = jnp.float32) -> list[jax.Array]:
    shapes = ((2, heads, queries, 8), (2, kv_heads, N, 8), (2, kv_heads, N, 8))
    return [
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    ]


def theirs(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """jax.nn's attention in lowtri's layout; compiled, because each operation alone would be compiled too."""
    return jax.jit(partial(_theirs, **options))(q, k, v)


def _theirs(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    return jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), **options).swapaxes(1, 2)


def close(found: Any, expected: Any, terms: int = 2 * N + 16) -> None:
    """Equal to rounding: two heads share a key, a head has 8 features, and each sum's terms may be as large as its result."""

    def one(a: Any, b: Any) -> None:
        limit = terms * float(jnp.finfo(b.dtype).eps) * max(1.0, float(np.abs(np.asarray(b)).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=limit)

    jax.tree.map(one, found, expected)


BIAS = jax.random.normal(jax.random.key(1), (2, 4, N, N))


@pytest.mark.parametrize("jit", [False, True])
def test_biases_and_sinks_have_gradients(jit: bool) -> None:
    compiled = jax.jit if jit else lambda fn: fn
    q, k, v = qkv(kv_heads=4)
    sinks = jax.random.normal(jax.random.key(2), (4,))

    def formula(bias: jax.Array, sinks: jax.Array) -> Any:
        scores = jnp.where(np.tri(N, dtype=bool), q @ k.swapaxes(2, 3) / 8**0.5 + bias, -jnp.inf)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (2, 4, N, 1))], -1)
        return jax.nn.softmax(scores)[..., :-1] @ v, jax.nn.logsumexp(scores, -1)

    def ours(bias: jax.Array, sinks: jax.Array) -> Any:
        return attention(q, k, v, "causal", bias=bias, sinks=sinks, return_lse=True)

    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: sum((x**2).sum() for x in fn(*arrays))

    close(compiled(ours)(BIAS, sinks), jax.jit(formula)(BIAS, sinks))
    close(
        compiled(jax.grad(both(ours), (0, 1)))(BIAS, sinks),
        jax.jit(jax.grad(both(formula), (0, 1)))(BIAS, sinks),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("jit", [False, True])
def test_dtypes(dtype: str, jit: bool) -> None:
    call = (jax.jit if jit else lambda fn: fn)(lambda *arrays: attention(*arrays, "causal", return_lse=True))
    output, lse = call(*qkv(dtype=dtype))
    assert (str(output.dtype), str(lse.dtype)) == (dtype, "float32")
    q, k, v = (np.asarray(x, np.float64) for x in qkv(dtype=dtype))
    exact, weights = lowtri.attention(q, k, v, "causal", return_weights=True)
    rounded = np.asarray(weights.astype(jnp.dtype(dtype)), np.float64)  # as the plain formula rounds them
    plain = (rounded @ np.repeat(v, 2, 1)).astype(jnp.dtype(dtype)).astype(np.float64)
    allowed = 2 * np.abs(plain - exact).max() + 2 * float(jnp.finfo(dtype).eps) * np.abs(v).max()
    assert np.abs(np.asarray(output, np.float64) - exact).max() <= allowed


@pytest.mark.sweep
def test_float64() -> None:
    """Against NumPy: jax.nn computes its scores in float32."""
    enable = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64  # versions before 0.8
    with enable(True):
        arrays = qkv(dtype=jnp.float64)
        expected = lowtri.attention(*map(np.asarray, arrays), "causal")
        for call in (attention, jax.jit(attention, static_argnums=3)):
            close(call(*arrays, "causal"), expected)


def test_memory_is_shared_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    run = module._run

    def watched(*arguments: Any) -> Any:
        results, inputs = run(*arguments), arguments[1:]
        seen.extend(x.data_ptr() for x in (*inputs[:3], *results))
        return results

    monkeypatch.setattr(module, "_run", watched)
    arrays = [jax.random.normal(jax.random.key(i), (4, 64, 16)) for i in range(3)]
    output = module._operation.__wrapped__()(options("causal"), *arrays, None, None)[0]
    assert seen == [x.unsafe_buffer_pointer() for x in (*arrays, output)]


def options(mask: str) -> Any:
    return (lowtri.mask(mask), ("return_lse", False))


def test_a_query_that_sees_nothing_gives_zeros_where_jax_gives_a_mean() -> None:
    table = np.tri(N, k=-1, dtype=bool)  # query 0 sees nothing
    ours, gradient = jax.value_and_grad(lambda *arrays: attention(*arrays, lowtri.table(table)).sum())(*qkv())
    assert np.isfinite(ours) and not gradient[:, :, 0].any() and np.isfinite(gradient).all()
    assert not attention(*qkv(), lowtri.table(table))[:, :, 0].any()
    other = theirs(*qkv(4, 4), mask=jnp.asarray(table)[None, None])
    close(other[:, :, 0], qkv(4, 4)[2].mean(2))


def test_fewer_queries_are_the_last_ones_where_jax_takes_the_first() -> None:
    q, k, v = qkv(queries=3)
    close(attention(q, k, v, "causal", q_positions=range(3)), theirs(q, k, v, is_causal=True))
    close(attention(q, k, v, "causal", q_positions=np.arange(6, 9)), attention(q, k, v, "causal"))


def test_vmap_calls_it_for_each_example() -> None:
    close(jax.vmap(lambda *arrays: attention(*arrays, "causal"))(*qkv()), attention(*qkv(), "causal"))


def test_programs_are_traced_once_for_a_mask() -> None:
    traces = []

    @jax.jit
    def step(*arrays: jax.Array) -> jax.Array:
        traces.append(1)
        return attention(*arrays, "causal & window(3)")

    for _ in range(3):
        step(*qkv())
    assert len(traces) == 1


def test_large_arrays_pass_through_a_callback() -> None:
    arrays = [jax.random.normal(jax.random.key(i), (1, 4, 1024, 64)) for i in range(3)]
    found = jax.jit(lambda *arrays: attention(*arrays, "causal", engine="sdpa"))(*arrays)
    close(found, theirs(*arrays, is_causal=True))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no mask": (lambda: attention(*qkv(), None), MaskError, "expected a mask. Fix: lowtri.full"),
    "a table": (lambda: attention(*qkv(), jnp.ones((N, N), bool)), MaskError, r"write lowtri\.table\(m\)"),
    "NumPy": (lambda: attention(np.zeros((3, 4)), *qkv()[1:], "full"), CallError, r"q is ndarray.*Fix: jnp\.asarray\(q\)"),
    "integers": (lambda: attention(*(x.astype(int) for x in qkv()), "full"), CallError, r"q is int32.*astype\(jnp\.float32\)"),
    "sizes": (lambda: attention(qkv()[0][..., :4], *qkv()[1:], "full"), CallError, "differ in head size D"),
    "an engine": (lambda: attention(*qkv(), "full", engine="gpu"), EngineError, "gpu"),
    "positions": (
        lambda: jax.jit(lambda p: attention(*qkv(), "causal", q_positions=p))(jnp.arange(N)),
        CallError,
        r"q_positions is traced.*Fix: a NumPy array",
    ),
    "half positions": (lambda: attention(*qkv(), "causal", k_positions=[0.5] * N), CallError, "k_positions is float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call()


TRACED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "softcap": (lambda x: attention(x, x, x, "causal", softcap=-1.0), CallError, "softcap is -1.0"),
    "head size": (lambda x: attention(x, x[..., :2], x, "causal"), CallError, "q and k differ in head size D"),
    "more queries": (
        lambda x: attention(x, x[:, :, :2], x[:, :, :2], "causal"),
        MaskError,
        "Fix: pass their positions",
    ),
    "bias": (lambda x: attention(x, x, x, "causal", bias=x[0, 0, :, :1, None]), CallError, "bias is"),
    "scale": (
        lambda x: attention(x, x, x, "causal", scale=x[0, 0, 0, 0]),
        CallError,
        "scale is traced.*static_argnames",
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_wrong_arguments_are_named_while_a_program_is_traced(name: str) -> None:
    """Raised by the callback, an error would reach the caller as an internal error of XLA, with the message cut off."""
    call, kind, words = TRACED[name]
    with pytest.raises(kind, match=words):
        jax.jit(call)(jnp.ones((1, 2, 3, 4)))


def test_positions_of_unequal_length_are_named() -> None:
    x = jnp.ones((2, 1, 2, 4))
    with pytest.raises(CallError, match="q_positions has rows of different lengths"):
        attention(x, x, x, "causal", q_positions=[[0], [0, 1]])


def test_jax_is_loaded_when_it_is_used() -> None:
    code = "import sys; from lowtri.integrations.jax import attention; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
