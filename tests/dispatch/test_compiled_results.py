"""Dropout, weights and what keys received inside of a program: whole, with the numbers and gradients of the call outside of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import draw
from programs import Attend, compiled, leaves, outcome, same, same_to_rounding
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from lowtri import attention
from lowtri.dispatch import operators, prepared
from lowtri.errors import CallError, EngineError
from lowtri.ops.call import CallOptions

pytestmark = [
    pytest.mark.not_emulated,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks at every tensor it meets
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # inductor imports it
]

BACKENDS = ["eager", "aot_eager", "inductor"]
OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.4},
    "dropout by the formula": {"dropout": 0.4, "engine": "formula"},
    "dropout by the definition": {"dropout": 0.4, "engine": "reference"},
    "weights": {"return_weights": True},
    "received": {"return_received": True},
    "all": {"dropout": 0.3, "return_weights": True, "return_received": True, "return_lse": True},
    "all, with a bias": {"dropout": 0.3, "return_weights": True, "return_lse": True, "bias": torch.linspace(-1, 1, 20)},
}


RECEIVED = {"received": 1, "all": 2}  # which result has no gradient


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_those_outside(name: str, backend: str) -> None:
    """At the first, second and third call: the same seed gives the same bits; another one drops other weights."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, "causal & window(9)", **OPTIONS[name])

    program, but = compiled(fn, backend), RECEIVED.get(name)
    for call in range(3):
        inputs = leaves(seed=call)
        found = outcome(program, inputs, call, but)
        assert same(found, outcome(fn, inputs, call, but))
        if "dropout" in OPTIONS[name]:
            assert not torch.equal(found[0][0], outcome(program, inputs, call + 9, but)[0][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_equal_calls_of_a_program_drop_other_weights(backend: str) -> None:
    """As R-Drop trains: the compiler may not join two equal calls, and draws their seeds in their order."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, "causal", dropout=0.5), attention(q, k, v, "causal", dropout=0.5)

    inputs = leaves()
    found = outcome(compiled(fn, backend), inputs)
    assert not torch.equal(*found[0]) and same(found, outcome(fn, inputs))


def test_the_gradients_of_dropout_are_those_of_finite_differences() -> None:
    inputs = [x.detach().double().requires_grad_() for x in leaves(5, 7)]
    program = compiled(lambda q, k, v: attention(q, k, v, "causal", dropout=0.4))

    def seeded(*arrays: torch.Tensor) -> Any:
        torch.manual_seed(1)
        return program(*arrays)

    torch.autograd.gradcheck(seeded, inputs)


def load_as_at_first() -> None:
    """Nothing that the first call outside of a program binds is bound."""
    prepared._tensor_signature = prepared._load_tensor_signature


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_may_vary(backend: str) -> None:
    """In one program, also where it is compiled before any other call, and calls outside follow."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, "causal", dropout=0.2, return_weights=True)

    load_as_at_first()
    counter = CompileCounterWithBackend(backend)
    program = compiled(fn, counter)
    for n in (30, 31, 45):
        inputs = leaves(n, n)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
        assert same(outcome(program, inputs), outcome(fn, inputs)), n
    assert counter.frame_count == 1


def test_a_checkpoint_inside_of_the_program_drops_the_same_weights_again() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(lambda *x: attention(*x, "causal", dropout=0.5).sin(), q, k, v, use_reentrant=False)

    inputs = leaves()
    assert same(outcome(compiled(fn), inputs), outcome(fn, inputs))


def test_an_exported_program_draws_anew_in_each_call() -> None:
    module = Attend("causal", dropout=0.5, return_received=True)
    inputs = [x.detach() for x in leaves()]
    program = torch.export.export(module, tuple(inputs)).module()
    torch.manual_seed(0)
    first, second = program(*inputs), program(*inputs)
    torch.manual_seed(0)
    for found in (first, second):
        right = module(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert not torch.equal(first[0], second[0])


def test_an_exported_program_can_be_trained_where_its_example_was_not() -> None:
    for strict in (True, False):
        program = torch.export.export(Attend("causal"), tuple(x.detach() for x in leaves()), strict=strict).module()
        inputs = leaves(seed=1)
        assert same_to_rounding(outcome(program, inputs)[1], outcome(Attend("causal"), inputs)[1])


def test_torchs_own_dropout_is_repeatable_by_name() -> None:
    """It draws numbers of its own, from a seed of the call: the same again, forward and backward."""
    program = compiled(lambda q, k, v: attention(q, k, v, "causal", dropout=0.5, engine="sdpa"))
    inputs = leaves()
    first, second = outcome(program, inputs), outcome(program, inputs)
    assert all(map(torch.equal, [*first[0], *first[1]], [*second[0], *second[1]]))
    torch.manual_seed(3)
    total = program(*inputs).sum()
    (d_v,) = torch.autograd.grad(total, inputs[2])
    assert (total - (d_v * inputs[2]).sum()).abs() < 1e-3  # linear in v, by the weights that the output has


def test_a_call_without_gradients_has_no_layer_for_them() -> None:
    """The operator without autograd, unless a gradient may be recorded."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    program, inputs = compiled(lambda q, k, v: attention(q, k, v, "causal"), backend), leaves()
    program(*(x.detach() for x in inputs))
    with torch.no_grad():
        program(*inputs)
    program(*inputs)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes if "lowtri" in str(node.target)]
    assert names == ["lowtri.attention_output.default"] * 2 + ["lowtri.attention.default"]


def test_received_weights_have_no_gradient_in_a_program() -> None:
    program = compiled(lambda q, k, v: attention(q, k, v, "causal", return_received=True))
    output, received = program(*leaves())
    assert output.requires_grad and not received.requires_grad


def test_a_gradient_of_torch_func_inside_of_the_program_is_right_or_refused() -> None:
    q = draw(nq=6, nk=6)[0]

    def total(x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x, "causal").sin().sum()

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(total)(x) * 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"inside of torch\.func's transforms"):
        compiled(slope)(q)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(slope, backend="aot_eager")(q), torch.func.grad(total)(q))


def test_a_program_compares_no_defaults_and_no_name_of_torch_again() -> None:
    """Each costs a part of a microsecond at each call, and a name read by two ways a check in Python."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, "causal")

    torch._dynamo.reset()
    torch.compile(function, backend="eager", fullgraph=True)(*(x.detach() for x in leaves()))
    (entry,) = _debug_get_cache_entry_list(function.__code__)
    guards = str(entry.guard_manager)
    assert "check_tensor" in guards and "defaults" not in guards
    assert guards.count("LAMBDA_GUARD") == 1  # torch's own, of hooks


def test_options_of_a_program_are_checked() -> None:
    torch._dynamo.reset()
    program = torch.compile(lambda q, k, v: attention(q, k, v, "causal", engine="cpu; return_lse"), backend="eager")
    with pytest.raises(EngineError, match="no engine 'cpu; return_lse'"):
        program(*leaves())
    program = torch.compile(lambda q, k, v: attention(q, k, v, "causal", scal=1.0), backend="eager")  # type: ignore[call-overload]
    with pytest.raises(Exception, match=r"attention\(\) got an unexpected keyword argument 'scal'"):
        program(*leaves())


def test_programs_know_the_options_of_a_call() -> None:
    options: dict[str, Any] = dict.fromkeys(CallOptions._fields)
    operators._check_names(options)
    assert options.keys() == inspect.signature(attention).parameters.keys() - {"q", "k", "v", "mask"}


UNUSUAL: list[dict[str, Any]] = [
    {"sinks": [1.0, 2.0, 3.0, 4.0]},
    {"scale": "x"},
    {"dropout": None},
    {"return_lse": "no"},
    {"engine": None},
    {"engine": "mask=full"},
    {"q_positions": "abc"},
]


@pytest.mark.parametrize("options", UNUSUAL, ids=str)
def test_what_the_call_refuses_it_refuses_in_a_program_in_its_words(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    program = torch.compile(lambda q, k, v: attention(q, k, v, "causal", **options), backend="eager")
    inputs = leaves()
    with pytest.raises((CallError, EngineError)) as eager:
        attention(*inputs, "causal", **options)
    with pytest.raises(type(eager.value)) as found:
        program(*inputs)
    assert str(found.value) == str(eager.value)


def test_shapes_and_devices_that_do_not_fit_are_refused_in_a_program_in_the_calls_words() -> None:
    q, k, v = (x.detach() for x in leaves())
    torch._dynamo.reset()
    program = torch.compile(lambda q, k, v: attention(q, k, v, "causal"), backend="eager")
    for wrong in ((q.sum(), k.sum(), v.sum()), (q.to("meta"), k, v)):
        with pytest.raises(CallError) as eager:
            attention(*wrong, "causal")
        with pytest.raises(CallError) as found:
            program(*wrong)
        assert str(found.value) == str(eager.value)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_scale_may_be_numpys_number_in_a_program(fullgraph: bool) -> None:
    q, k, v = (x.detach() for x in leaves())
    torch._dynamo.reset()
    program = torch.compile(
        lambda q, k, v: attention(q, k, v, "causal", scale=1 / np.sqrt(8)), backend="eager", fullgraph=fullgraph
    )
    assert torch.equal(program(q, k, v), attention(q, k, v, "causal", scale=1 / np.sqrt(8)))


# A factor that each run of the program computes, and its arguments.
COMPUTED: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "NumPy's number": (lambda x: x, [np.float32(0.5), np.float32(0.25), np.float32(0.125)]),
    "NumPy's root": (lambda x: 1 / np.sqrt(x), [np.float64(8), np.float64(9), np.float64(10)]),
    "the mean of an array": (lambda x: x.mean(), [np.array([0.5, 0.25]), np.array([0.5, 0.75])]),
    "a tensor's number": (lambda x: x.item(), [torch.tensor(0.1), torch.tensor(0.7)]),
    "a tensor's number, in float64": (lambda x: 0.5 * float(x.mean()), [torch.tensor(x).double() for x in (0.1, 0.7)]),
    "a number": (lambda x: x, [0.1, 0.2, 0.3, 0.4]),
}


@pytest.mark.sweep
@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_factor_that_each_run_computes(name: str, option: str) -> None:
    compute, given = COMPUTED[name]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: Any) -> Any:
        options: Any = {option: compute(x)}
        return attention(q, k, v, "causal", **options)

    program = compiled(function)
    for x in given:
        inputs = (*leaves(), x)
        assert same(outcome(program, inputs), outcome(function, inputs))
    programs = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    assert len(programs) == (len(given) if name == "a number" else 1)


def test_a_factor_that_each_run_computes_is_checked_then() -> None:
    q = torch.zeros(1, 2, 4, 8)
    program = compiled(lambda x: attention(q, q, q, "causal", scale=x.item()))
    with pytest.raises(CallError, match="scale is nan, but scores are multiplied by a finite number"):
        program(torch.tensor(torch.nan))
