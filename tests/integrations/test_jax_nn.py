"""lowtri.integrations.jax.dot_product_attention against jax.nn's function of this name: arguments, outputs, gradients, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowtri.errors import CallError
from lowtri.integrations.jax import dot_product_attention as ours

STATIC = ("scale", "is_causal", "local_window_size", "implementation", "return_residual")
theirs = jax.jit(jax.nn.dot_product_attention, static_argnames=STATIC)  # each operation alone would be compiled, too
NUMBERS = np.random.default_rng(0)


def numbers(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(NUMBERS.standard_normal(shape), dtype)


def qkv(b: int, t: int, s: int, n: int, k: int, h: int = 8, dtype: Any = jnp.float32) -> list[jax.Array]:
    return [numbers(*shape, dtype=dtype) for shape in ((b, t, n, h), (b, s, k, h), (b, s, k, h))]


def bools(*shape: int) -> jax.Array:
    """A mask that shows each query its first key."""
    return jnp.asarray(NUMBERS.random(shape) < 0.6).at[..., 0].set(True)


BOTH = {"query_seq_lengths": jnp.array([3, 6]), "key_value_seq_lengths": jnp.array([2, 6])}
SIZES = {
    "heads": (2, 6, 6, 4, 4),
    "groups": (2, 6, 6, 4, 2),
    "few queries": (2, 4, 6, 4, 1),
    "few keys": (2, 6, 4, 2, 2),
}
OPTIONS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "a mask, causal": lambda t, s, n: {"mask": bools(1, 1, t, s), "is_causal": True},
    "a mask of heads and queries": lambda t, s, n: {"mask": bools(n, t, 1)},
    "lengths": lambda t, s, n: {"is_causal": True, **BOTH},
    "a window": lambda t, s, n: {"local_window_size": 2, "key_value_seq_lengths": jnp.array([5, 9])},
    "everything": lambda t, s, n: {
        "bias": numbers(1, n, t, s), "mask": bools(2, n, t, s), "local_window_size": (5, 2), "return_residual": True, **BOTH
    },
}  # fmt: skip


def close(found: Any, expected: Any, dtype: Any = jnp.float32) -> None:
    """Equal to rounding: sums of at most 8 features, 6 keys and 24 queries of all heads of a group, forward and backward."""
    limit = 2 * 24 * float(jnp.finfo(dtype).eps)

    def one(a: Any, b: Any) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        x, y = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(x, y, rtol=0, atol=limit * max(1.0, np.abs(y).max()))

    jax.tree.map(one, found, expected)


# Each option with one of the sizes; all pairs in the sweep, since most of the time is JAX's compiler.
CASES = [
    pytest.param(name, sizes, marks=[] if i % 4 == j else pytest.mark.sweep, id=f"{name}-{sizes}")
    for i, name in enumerate(OPTIONS)
    for j, sizes in enumerate(SIZES)
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_outputs_and_gradients_are_those_of_jax(name: str, sizes: str) -> None:
    arrays, (_, t, s, n, _) = qkv(*SIZES[sizes]), SIZES[sizes]
    options = OPTIONS[name](t, s, n)
    traced = {key: options.pop(key) for key in ("bias", "mask", *BOTH) if key in options}

    def loss(function: Callable[..., Any]) -> Callable[..., Any]:
        def of(arrays: Any, bias: Any, others: Any) -> Any:
            results = function(*arrays, **({} if bias is None else {"bias": bias}), **others, **options)
            return jnp.square(results[0] if options.get("return_residual") else results).sum(), results

        return jax.value_and_grad(of, argnums=(0, 1) if "bias" in traced else 0, has_aux=True)

    given = arrays, traced.pop("bias", None), traced
    (_, expected), expected_grads = jax.jit(loss(theirs))(*given)
    for run in (loss(ours), jax.jit(loss(ours))):
        (_, results), grads = run(*given)
        if (
            "lengths" in name or name == "everything"
        ):  # jax gives a mean to a query that sees no key, lowtri -inf as its lse
            results, expected = (jax.tree.map(lambda x: jnp.where(x < -1e30, 0.0, x), x) for x in (results, expected))
        close(results, expected)
        close(grads, expected_grads)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str) -> None:
    arrays = qkv(2, 6, 6, 4, 2, dtype=dtype)
    for options in ({"bias": numbers(1, 4, 6, 6)}, {"bias": numbers(1, 4, 6, 6, dtype=dtype), "return_residual": True}):
        close(ours(*arrays, **options), jax.nn.dot_product_attention(*arrays, **options), dtype)  # no float16 in jit


def test_without_a_batch_and_with_arrays_of_numpy() -> None:
    q, k, v = (np.asarray(x[0]) for x in qkv(1, 6, 6, 4, 2))
    mask = np.tri(6, dtype=bool)
    close(ours(q, k, v, None, mask, return_residual=True), theirs(q, k, v, None, mask, return_residual=True))
    close(ours(q, k, v, mask=mask[None]), theirs(q, k, v, is_causal=True))


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    arrays = qkv(2, 6, 6, 4, 2)
    output, lse = ours(*arrays, mask=jnp.zeros((2, 1, 6, 6), bool).at[:, :, 1:].set(True), return_residual=True)
    assert not output[:, 0].any() and output[:, 1:].all() and bool(jnp.isneginf(lse[:, 0]).all())
    grads = jax.grad(lambda *x: ours(*x, key_value_seq_lengths=jnp.array([0, 6])).sum(), (0, 1, 2))(*arrays)
    assert all(not x[0].any() and jnp.isfinite(x).all() for x in grads)


def test_lengths_may_differ_between_calls_of_one_program() -> None:
    traces, arrays = [], qkv(2, 6, 6, 4, 2)

    @jax.jit
    def step(lengths: jax.Array, mask: jax.Array) -> jax.Array:
        traces.append(1)
        output: jax.Array = ours(*arrays, mask=mask, key_value_seq_lengths=lengths)
        return output

    for lengths in ([1, 6], [4, 2]):
        mask = bools(2, 1, 6, 6)
        close(step(jnp.array(lengths), mask), theirs(*arrays, mask=mask, key_value_seq_lengths=jnp.array(lengths)))
    assert len(traces) == 1


def test_the_signature_is_that_of_jax() -> None:
    def shape(function: Any) -> list[Any]:
        return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]

    expected = shape(jax.nn.dot_product_attention)
    assert [x for x in shape(ours) if x in expected or x[0] != "return_residual"] == expected  # which older jax has not


X, KV = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 8))
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "head sizes": ((X, KV[..., :4], KV[..., :4]), {}, "query is .* and key .*Fix: .*a multiple of K"),
    "heads": ((X[:, :, :3], KV, KV), {}, "query is .*N a multiple of K"),
    "rows": ((X, KV[:1], KV[:1]), {}, "query is .* and key"),
    "values": ((X, KV, KV[:, :4]), {}, r"value is \(2, 4, 2, 8\) and key .*Fix: the same shape"),
    "dtypes": ((X, KV.astype(jnp.bfloat16), KV), {}, "query is float32 and key bfloat16. Fix: one dtype"),
    "two dimensions": ((X[0, 0], KV, KV), {}, r"query is \(4, 8\). Fix: four dimensions"),
    "numbers as mask": ((X, KV, KV), {"mask": jnp.ones((1, 1, 3, 5))}, "mask is float32. Fix: bools.*go to bias="),
    "size of mask": ((X, KV, KV), {"mask": jnp.ones((1, 1, 3, 4), bool)}, r"mask is .* \(B, N, T, S\) = \(2, 4, 3, 5\)"),
    "size of bias": ((X, KV, KV), {"bias": jnp.ones((1, 3, 3, 5))}, "bias is .*, which does not broadcast"),
    "lengths": ((X, KV, KV), {"query_seq_lengths": jnp.ones(3, int)}, r"query_seq_lengths is .*Fix: whole numbers.*\(2,\)"),
    "half lengths": ((X, KV, KV), {"key_value_seq_lengths": jnp.ones(2)}, "key_value_seq_lengths is float32"),
    "implementation": ((X, KV, KV), {"implementation": "fast"}, "implementation is 'fast'. Fix: None or \"xla\""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_as_in_jax(name: str) -> None:
    arrays, options, words = WRONG[name]
    with pytest.raises(CallError, match="dot_product_attention: " + words):
        ours(*arrays, **options)
    with pytest.raises((ValueError, TypeError, AssertionError)):
        jax.nn.dot_product_attention(*arrays, **options)


def test_what_only_lowtri_rejects_is_named() -> None:
    with pytest.raises(CallError, match=r"local_window_size is \(-1, 2\)\. Fix: one or two numbers"):
        ours(X, KV, KV, local_window_size=(-1, 2))
    with pytest.raises(CallError, match=r"scale is traced\. Fix: a Python number"):
        jax.jit(lambda scale: ours(X, KV, KV, scale=scale))(1.0)
    with pytest.raises(CallError, match=r"query is int32.*astype\(jnp\.float32\)"):
        ours(X.astype(int), KV, KV)
