"""EvictingCache in programs of torch.compile: two programs for a prompt and all tokens, without breaks, with the values of eager."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from cache_names import cache_name
from torch._dynamo.utils import counters

from lowtri.errors import CallError
from lowtri.integrations.transformers import EvictingCache, switch, use

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks at every tensor
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # inductor imports it
]
SIZE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": None,
}
WINDOW_AND_SINKS = "causal & (window(8) | first(2))"
MASKS = {  # with how many tokens, and how many slots
    WINDOW_AND_SINKS: (212, 48),
    "causal": (40, 64),
    'documents(lengths=[20, 40], open_end=True, inner="causal & (window(5) | first(1))")': (50, 48),
}


class Programs:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return graph

    def with_layers(self) -> int:
        """How many of the graphs attend."""
        return sum("attend_in_cache" in graph.code for graph in self.graphs)


def model_of(mask: str | None, family: str = "Llama", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**SIZE, **options)
    model = switch(getattr(tf, f"{family}ForCausalLM")(config).eval())
    return use(model, mask=mask)


def compiled(model: Any, backend: Any) -> Any:
    """The same model, whose forward is a program."""
    program = copy.deepcopy(model)
    program.forward = torch.compile(program.forward, backend=backend, fullgraph=True)
    return program


def ids_of(rows: int, n: int) -> torch.Tensor:
    return torch.randint(3, 99, (rows, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def stepped(program: Any, model: Any, ids: torch.Tensor, cache: Any, prompt: int = 12, valid: Any = None) -> Any:
    """The logits of a prompt and of each token after it."""
    parts = [(0, prompt), *[(t, t + 1) for t in range(prompt, ids.shape[1])]]
    steps = []
    for a, b in parts:
        given = {} if valid is None else {"attention_mask": valid[:, :b]}
        if valid is not None:
            given["position_ids"] = (valid.cumsum(1) - 1).clamp(min=0)[:, a:b]
        steps.append(program(ids[:, a:b], **{cache_name(model): cache}, **given).logits)
    return torch.cat(steps, 1)


@pytest.mark.parametrize(
    "mask", [pytest.param(one, marks=[] if one == WINDOW_AND_SINKS else pytest.mark.sweep) for one in MASKS]
)
def test_two_programs_serve_the_prompt_and_two_hundred_tokens(mask: str) -> None:
    n, capacity = MASKS[mask]
    model, ids, backend = model_of(mask), ids_of(2, n), Programs()
    program = torch.compile(model, backend=backend, fullgraph=True)
    cache = EvictingCache(model, capacity=capacity, block=4)
    found = stepped(program, model, ids, cache)
    eager = EvictingCache(model, capacity=capacity, block=4)
    torch.testing.assert_close(found, stepped(model, model, ids, eager), rtol=1e-5, atol=1e-5)
    assert backend.with_layers() == 2
    assert not counters["graph_break"]
    assert (cache.held, cache.bytes, cache.get_seq_length()) == (eager.held, eager.bytes, n)
    before = len(backend.graphs)
    again = EvictingCache(model, capacity=capacity, block=4)
    assert torch.equal(stepped(program, model, ids[:, :20], again), found[:, :20])
    assert len(backend.graphs) == before, "another cache has the same programs"


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_a_compiled_forward_generates_as_the_eager_one(padded: bool) -> None:
    """The hooks of the outer model run outside of the program, which has the length of the padding mask as an input."""
    model, ids, backend = model_of(WINDOW_AND_SINKS), ids_of(2, 12), Programs()
    valid = torch.ones_like(ids)
    valid[0, : 3 * padded] = 0
    program = compiled(model, backend)
    options = {"attention_mask": valid, "do_sample": False, "max_new_tokens": 30}
    right = model.generate(ids, **{cache_name(model): EvictingCache(model, capacity=48, block=4)}, **options)
    cache = EvictingCache(program, capacity=48, block=4)
    assert torch.equal(program.generate(ids, **{cache_name(model): cache}, **options), right)
    assert backend.with_layers() <= 3
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("Mistral", {"sliding_window": 5}, marks=pytest.mark.sweep),
        ("Gemma2", {"sliding_window": 5, "head_dim": 8}),
    ],
)
def test_the_own_masks_of_a_model_evict_in_a_program(family: str, options: dict[str, Any]) -> None:
    model, ids, backend = model_of(None, family, **options), ids_of(2, 40), Programs()
    valid = torch.ones_like(ids)
    valid[1, :4] = 0
    program = compiled(model, backend)
    cache = EvictingCache(program, capacity=48, block=4)
    found = stepped(program, model, ids, cache, valid=valid)
    right = stepped(model, model, ids, EvictingCache(model, block=4), valid=valid)
    torch.testing.assert_close(found[valid.bool()], right[valid.bool()], rtol=1e-5, atol=1e-5)
    assert not counters["graph_break"]


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_functional_programs_keep_the_order_of_the_cache(backend: str) -> None:
    model, ids = model_of(WINDOW_AND_SINKS), ids_of(2, 40)
    torch._dynamo.reset()
    program = compiled(model, backend)
    right = stepped(model, model, ids, EvictingCache(model, block=4))
    found = stepped(program, model, ids, EvictingCache(program, capacity=32, block=4))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_programs_and_eager_forwards_may_alternate() -> None:
    """Also with a copy of the cache, rows in another order, and tokens removed."""
    model, ids, backend = model_of(WINDOW_AND_SINKS), ids_of(2, 40), Programs()
    program = compiled(model, backend)
    right = stepped(model, model, ids, EvictingCache(model, block=4))
    cache = EvictingCache(program, capacity=48, block=4)
    name = cache_name(model)
    with torch.no_grad():
        found = [program(ids[:, :12], **{name: cache}).logits]
        for t in range(12, 20):
            found.append((program if t % 2 else model)(ids[:, t : t + 1], **{name: cache}).logits)
        cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        program(ids[:, 3:4], **{name: cache})
        cache.crop(-1)
        cache.reorder_cache(torch.tensor([1, 0]))
        for t in range(20, 40):
            found.append(program(ids[:, t : t + 1].flip(0), **{name: cache}).logits.flip(0))
    torch.testing.assert_close(torch.cat(found, 1), right, rtol=1e-5, atol=1e-5)


ERRORS: list[tuple[Callable[[Any, Any], Any], str]] = [
    (
        lambda program, cache: program(ids_of(1, 30), **cache),
        r"append: 30 new tokens and 0 .* do not fit the 20 slots .*\nFix: capacity=30 or more",
    ),
    (
        lambda program, cache: program(ids_of(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), **cache),
        r"EvictingCache: got position_ids of packed rows.\nFix: use\(model, mask=documents\(lengths=",
    ),
    (
        lambda program, cache: program(ids_of(1, 6), attention_mask=torch.ones(1, 9), **cache),
        r"EvictingCache: attention_mask is \(1, 9\), but the cache has 0 tokens .*\nFix: attention_mask \(1, 6\)",
    ),
]


@pytest.mark.parametrize(("act", "words"), ERRORS, ids=[words[:30] for _, words in ERRORS])
def test_what_a_program_finds_wrong_when_it_runs_raises(act: Any, words: str) -> None:
    model = model_of(WINDOW_AND_SINKS)
    program = torch.compile(model, backend=Programs(), fullgraph=True)
    cache = EvictingCache(model, capacity=20)
    with torch.no_grad(), pytest.raises(CallError, match=words):
        act(program, {cache_name(model): cache})
    ids = ids_of(1, 16)
    right = stepped(model, model, ids, EvictingCache(model))
    torch.testing.assert_close(stepped(program, model, ids, cache), right, rtol=1e-5, atol=1e-5)


TRACED_ERRORS: list[tuple[Callable[[Any, Any], Any], str]] = [
    (
        lambda program, cache: program(ids_of(1, 3), seq_idx=torch.tensor([[0, 0, 1]]), **cache),
        r"EvictingCache: got seq_idx of packed rows",
    ),
    (
        lambda program, cache: program(ids_of(1, 3), output_attentions=True, **cache),
        r"EvictingCache: got (output_attentions|attention weights) in LlamaAttention, which it does not compute",
    ),
    (
        lambda program, cache: use(program, mask="causal")(ids_of(1, 3), **cache),
        r"EvictingCache: the forward has causal, but the cache evicts by causal & \(window",
    ),
]


@pytest.mark.parametrize(("act", "words"), TRACED_ERRORS, ids=[words[:40] for _, words in TRACED_ERRORS])
def test_what_no_program_can_do_raises(act: Any, words: str) -> None:
    model = model_of(WINDOW_AND_SINKS)
    cache = EvictingCache(model)
    torch._dynamo.reset()
    program = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.raises(CallError, match=f"(?s){words}"):
        act(program, {cache_name(model): cache})


def test_an_equal_mask_is_the_same() -> None:
    model, ids = model_of(WINDOW_AND_SINKS), ids_of(1, 20)
    cache = EvictingCache(model, block=4)
    right = stepped(model, model, ids, EvictingCache(model, block=4))
    use(model, mask=WINDOW_AND_SINKS)
    torch._dynamo.reset()
    program = torch.compile(model, backend="eager")
    torch.testing.assert_close(stepped(program, model, ids, cache), right, rtol=1e-5, atol=1e-5)
