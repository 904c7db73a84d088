"""Gradients of compiled calls, at the first, second and third call: later calls find what the first one prepared.

Calls of few queries are prepared for any number of keys, so one to sixteen queries and one more are compared, for every entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import DTYPES, EPS, draw
from programs import compiled, same_to_rounding

import lowtri
from lowtri.dispatch.prepared import PREPARED
from lowtri.integrations.flex import flex_attention
from lowtri.integrations.torch import switch

pytestmark = [
    pytest.mark.not_emulated,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks at every tensor it meets
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # inductor imports it
]

QUERIES = (1, 4, 16, 17)
CALLS = 3

Function = Callable[..., torch.Tensor]

FUNCTIONS: dict[str, Function] = {
    "attention": lambda q, k, v: lowtri.attention(q, k, v, "causal & window(9)"),
    "attention, an option of each kind": lambda q, k, v: lowtri.attention(
        q, k, v, "causal", softcap=3.0, scale=0.5, return_lse=True
    )[0],
    "attention by the formula": lambda q, k, v: lowtri.attention(q, k, v, "causal", engine="formula"),
    "attention by torch": lambda q, k, v: lowtri.attention(q, k, v, "causal", engine="sdpa"),
    "scaled_dot_product_attention": lambda q, k, v: lowtri.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "flex_attention": lambda q, k, v: flex_attention(q, k, v, enable_gqa=True),
}


def gradients(function: Function, inputs: tuple[torch.Tensor, ...], seed: int) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(torch.autograd.grad(output, leaves, d_output.to(output.dtype)))


def check(function: Function, nq: int, dtype: str, backend: str = "aot_eager") -> None:
    """The gradients of each call are those of eager code to rounding, and lie near the exact ones."""
    torch._dynamo.reset()
    PREPARED.clear()
    program = torch.compile(function, backend=backend, fullgraph=function is not FUNCTIONS["flex_attention"])
    for call in range(CALLS):
        inputs = draw(nq=nq, nk=40, d=16, dv=16, seed=call, dtype=dtype)
        compiled, eager = (gradients(f, inputs, call) for f in (program, function))
        exact = gradients(function, tuple(x.double() for x in inputs), call)
        for name, found, right, true in zip("qkv", compiled, eager, exact, strict=True):
            most = true.abs().max().item()
            own = (right.double() - true).abs().max().item()  # the error of eager code
            off = (found.double() - true).abs().max().item()
            assert off <= 2 * own + 16 * EPS[dtype] * most, (name, nq, dtype, call + 1, off, own, most)


@pytest.mark.parametrize("nq", QUERIES)
def test_calls_of_few_queries(nq: int) -> None:
    check(FUNCTIONS["attention"], nq, "float32")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "attention"])
def test_every_function(name: str) -> None:
    check(FUNCTIONS[name], 4, "float32")


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
def test_every_dtype(dtype: str) -> None:
    check(FUNCTIONS["attention"], 4, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nq", QUERIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_dtype_and_number_of_queries(name: str, nq: int, dtype: str) -> None:
    check(FUNCTIONS[name], nq, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("nq", QUERIES)
def test_inductor(nq: int) -> None:
    check(FUNCTIONS["attention"], nq, "float32", backend="inductor")


@pytest.mark.parametrize("has_bias", [False, True])
def test_sinks_and_biases(has_bias: bool) -> None:
    """With sinks a call is prepared for any keys, with a bias it is not; both have gradients of their own."""

    def function(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        return lowtri.attention(q, k, v, "causal", sinks=sinks, bias=bias if has_bias else None)

    PREPARED.clear()
    program = compiled(function)
    for call in range(CALLS):
        q, k, v = draw(nq=4, nk=40, d=16, dv=16, seed=call)
        source = torch.Generator().manual_seed(call)
        sinks, bias = torch.randn(4, generator=source), torch.randn(1, 1, 4, 40, generator=source)
        inputs = (q, k, v, sinks, bias) if has_bias else (q, k, v, sinks)
        found, right = (
            gradients(lambda *x, f=f: f(*x) if has_bias else f(*x, None), inputs, call) for f in (program, function)
        )
        assert same_to_rounding(found, right)


class Torchs(torch.nn.Module):
    """A switched module of torch, for cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = switch(torch.nn.MultiheadAttention(32, 2, batch_first=True))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.inner(x, memory, memory, need_weights=False)[0]


class Ours(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = lowtri.nn.MultiHeadAttention(32, 4, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Transformers(torch.nn.Module):
    """A switched Llama; every token is a query."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        from lowtri.integrations.transformers import switch as switch_model

        config = transformers.LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.inner = switch_model(transformers.LlamaModel(config))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs_embeds=x).last_hidden_state


@pytest.mark.parametrize("make", [Torchs, Ours, Transformers])
@pytest.mark.parametrize("nq", [4, *[pytest.param(nq, marks=pytest.mark.sweep) for nq in (1, 16, 17)]])
def test_modules(make: type[torch.nn.Module], nq: int) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    PREPARED.clear()
    module = make()
    weights = [x for x in module.parameters() if x.requires_grad]
    program = torch.compile(module, backend="aot_eager")
    for call in range(CALLS):
        x, memory = torch.randn(2, nq, 32), torch.randn(2, 40, 32)
        found, right = (
            torch.autograd.grad(f(x, memory).square().sum(), weights, allow_unused=True) for f in (program, module)
        )
        for a, b in zip(found, right, strict=True):
            assert (a is None) == (b is None)
            assert a is None or same_to_rounding([a], [b], 64), call + 1


def test_a_log_sum_exp_that_nobody_computed_is_never_used() -> None:
    """The forward's backend may compute none where the backward's would read one: the backward then runs the call again."""
    q, k, v = draw(nq=4, nk=9)
    operator, backward = torch.ops.lowtri.attention_for_gradients, torch.ops.lowtri.attention_backward
    output, lse = operator(q, k, v, "engine=sdpa; mask=causal", None, None, None)
    assert lse.isposinf().all()
    d_results = [torch.ones_like(output), None, None]
    found = backward(d_results, output, lse, [True] * 3, q, k, v, "engine=cpu; mask=causal", None, None, None)
    right = gradients_of_ones(q, k, v)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


def gradients_of_ones(*inputs: torch.Tensor) -> Any:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = lowtri.attention(*leaves, "causal", engine="formula")
    return torch.autograd.grad(output.sum(), leaves)
