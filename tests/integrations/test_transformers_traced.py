"""Models of transformers that run on lowtri, inside programs: torch.compile without a graph break, and torch.export."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from lowtri.errors import CallError
from lowtri.integrations.transformers import attend, register
from lowtri.integrations.transformers.masks import _can_omit_mask as can_omit_mask

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks at every tensor it meets
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),  # transformers' collector
]
SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
PADS = torch.ones_like(IDS)
PADS[0, :3] = 0
TRIANGLE = torch.ones(12, 12).tril().bool()[None, None]
NUMBERS = torch.zeros(1, 1, 12, 12).masked_fill(~TRIANGLE, torch.finfo(torch.float32).min)


def model(family: str = "Llama", implementation: str = "lowtri", **options: Any) -> Any:
    register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **options)
    made = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    made.set_attn_implementation(implementation)
    return made


def whole(fn: Any, backend: Any = "eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True)


def exported(one: Any, **inputs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own future
        return torch.export.export(one, (IDS,), kwargs={"use_cache": False, **inputs}, strict=False).module()


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "causal": ("Llama", {}, {}),
    "padding": ("Llama", {}, {"attention_mask": PADS}),
    "no padding, and said so": ("Llama", {}, {"attention_mask": torch.ones_like(IDS)}),
    "a window": ("Mistral", {"sliding_window": 4}, {}),
    "a window and padding": ("Mistral", {"sliding_window": 4}, {"attention_mask": PADS}),
    "two masks and a softcap": ("Gemma2", {"sliding_window": 4, "head_dim": 8}, {}),
    "bools by hand": ("Llama", {}, {"attention_mask": TRIANGLE}),
    "numbers by hand": ("Llama", {}, {"attention_mask": NUMBERS}),
}
OFTEN = ("causal", "padding", "a window", "numbers by hand")


@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in OFTEN else pytest.mark.sweep) for one in CASES])
def test_whole_programs_give_what_the_model_gives(name: str) -> None:
    family, options, inputs = CASES[name]
    real = PADS.bool() if inputs.get("attention_mask") is PADS else torch.ones_like(IDS).bool()
    right = model(family, "eager" if "softcap" in name else "sdpa", **options)(IDS, **inputs).logits[real]
    switched = model(family, **options)
    torch.testing.assert_close(whole(switched)(IDS, **inputs).logits[real], right)
    torch.testing.assert_close(exported(switched, **inputs)(IDS, use_cache=False, **inputs).logits[real], right)


def test_a_causal_model_needs_no_table() -> None:
    """Each layer is one operator, whose mask is a text. (Without a cache transformers looks for packed rows: a table.)"""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    switched = model()
    found = whole(switched, backend)(IDS).logits
    torch.testing.assert_close(found, switched(IDS).logits)
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if "lowtri.attention" in str(node.target)]
    assert [node.args[3:5] for node in calls] == [("scale; mask=causal", None)] * 2
    assert not any(getattr(node.meta.get("example_value"), "dtype", None) == torch.bool for node in graph.graph.nodes)


@pytest.mark.sweep
def test_lengths_may_vary() -> None:
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        made.append(graph)
        return graph

    switched = model()
    program = whole(switched, backend)
    for n in (12, 9, 7, 33):
        ids = torch.randint(3, 99, (2, n))
        torch.testing.assert_close(program(ids, use_cache=False).logits, switched(ids).logits)
    assert len(made) == 2, "one for the first length, one for all others"
    dynamic = {"input_ids": {1: torch.export.Dim("n", min=2, max=64)}, "use_cache": None}
    inputs = {"kwargs": {"use_cache": False}, "dynamic_shapes": dynamic, "strict": False}
    for_any = torch.export.export(switched, (IDS,), **inputs).module()
    ids = torch.randint(3, 99, (2, 40))
    torch.testing.assert_close(for_any(ids, use_cache=False).logits, switched(ids).logits)


@pytest.mark.sweep
def test_a_step_of_training() -> None:
    switched = model()
    switched.train()
    found = []
    for forward in (switched, whole(switched, "aot_eager")):
        switched.zero_grad()
        forward(IDS, labels=IDS, use_cache=False).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in switched.parameters()]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.sweep
def test_generating_with_a_compiled_forward() -> None:
    options = {"attention_mask": PADS, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    right = model(implementation="sdpa").generate(IDS, **options)
    switched = model()
    switched.forward = whole(switched.forward)
    assert torch.equal(switched.generate(IDS, **options), right)


@pytest.mark.sweep
@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_generates_with_the_graphs_of_sdpa(padded: bool) -> None:
    """One program for the prompt and one for all tokens, without breaks: generate makes their masks outside of them."""
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": PADS if padded else None}
    right, graphs = None, []
    for implementation in ("sdpa", "lowtri"):
        one, counter = model(implementation=implementation), CompileCounter()
        plain = one.generate(IDS, **options)
        torch._dynamo.reset()
        one.forward = torch.compile(one.forward, backend=counter, fullgraph=True)
        tokens = one.generate(IDS, cache_implementation="static", disable_compile=True, **options)
        assert torch.equal(tokens, plain if right is None else right)
        right = tokens
        graphs.append(counter.frame_count)
    assert graphs[1] <= graphs[0]


def test_what_no_program_holds_runs_outside_and_names_lowtri() -> None:
    switched = model()
    right = switched(IDS, output_attentions=True).attentions
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="lowtri's attention of a transformers model with dropout, weights"
    ):
        whole(switched)(IDS, output_attentions=True)
    torch._dynamo.reset()
    found = torch.compile(switched, backend="eager")(IDS, output_attentions=True).attentions
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
    words = (
        "transformers: lowtri's attention with dropout, weights, .* cannot be an operator of an exported program.\n"
        r"Fix: model.eval\(\) and output_attentions=False; or attn_implementation=\"sdpa\" for the export"
    )
    with pytest.raises(CallError, match=words):
        exported(switched, output_attentions=True)


@pytest.mark.parametrize(
    ("sizes", "silent"),
    [
        ((9, 9, 0, 0), True),
        ((1, 9, 8, 0), True),
        ((3, 9, 6, 0), False),  # behind a cache: the first query is not the first key's
        ((9, 16, 0, 0), False),  # a static cache has a tail
        ((1, 16, 8, 0), False),
        ((9, 9, 0, 4), False),
        ((1, 9, torch.tensor(8), 0), False),
    ],
)
def test_when_a_mask_can_be_omitted(sizes: tuple[Any, ...], silent: bool) -> None:
    assert can_omit_mask(*sizes) is silent


# A layer's call alone, with all that models pass.

GENERATOR = torch.Generator().manual_seed(1)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "nothing said": (7, 7, {}),
    "one query": (1, 9, {}),
    "fewer queries, from the top left": (4, 9, {}),
    "more queries, from the top left": (9, 4, {}),
    "not causal": (9, 4, {"is_causal": False}),
    "more queries and a table": (9, 4, {"attention_mask": some(2, 1, 9, 4) > 0}),
    "by head": (7, 7, {"attention_mask": some(1, 4, 7, 7) > 0}),
    "keys alone": (7, 7, {"attention_mask": torch.tensor([[[[True] * 5 + [False] * 2]]])}),
    "numbers": (7, 7, {"attention_mask": some(7, 7).masked_fill(some(7, 7) > 0.5, -torch.inf)}),
    "a bias of the layer": (7, 7, {"position_bias": some(1, 4, 7, 7), "attention_mask": some(2, 1, 7, 7) > 0}),
    "numbers and a bias": (7, 7, {"position_bias": some(1, 4, 7, 7), "attention_mask": some(7, 7)}),
    "sinks of heads": (7, 7, {"s_aux": some(1, 4, 1, 1), "softcap": 2.0, "scaling": 0.3}),
    "sinks of queries": (7, 7, {"sinks": some(2, 4, 7, 1)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_layer_s_call_is_the_same_in_a_program(name: str) -> None:
    nq, nk, options = CALLS[name]
    module, mask = SimpleNamespace(is_causal=True), options.get("attention_mask")
    given = {key: value for key, value in options.items() if key != "attention_mask"}
    q, k, v = some(2, 4, nq, 8), some(2, 2, nk, 8), some(2, 2, nk, 8)
    right, _ = attend(module, q, k, v, mask, **given)

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Any, given: Any) -> Any:
        return attend(module, q, k, v, mask, output_attentions=False, **given)[0]

    torch.testing.assert_close(whole(layer)(q, k, v, mask, given), right)
    torch.testing.assert_close(layer(q, k, v, mask, given), right)


def test_learned_queries_serve_the_whole_batch() -> None:
    module, q, k = SimpleNamespace(is_causal=False), some(1, 4, 3, 8), some(2, 2, 9, 8)
    right, _ = attend(module, q, k, k, None)
    found, _ = whole(lambda q, k: attend(module, q, k, k, None, output_attentions=False))(q, k)
    assert found.shape == (2, 3, 4, 8)
    torch.testing.assert_close(found, right)
