"""EvictingCache: steps equal the whole forward, in every way that transformers generates, and memory stays what the mask needs."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from cache_names import cache_name

import lowtri
from lowtri.errors import CallError, EngineError
from lowtri.integrations.transformers import EvictingCache, switch, use

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    **IDS,
}
GROUPED = {**SIZE, "num_key_value_heads": 2, "max_position_embeddings": 4096}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 4096, **IDS}
CHUNKED = {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=5)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=8)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**GROUPED, head_dim=8, sliding_window=5)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**GROUPED)),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**GROUPED)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZE)),
    "gpt_oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**GROUPED, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1)
    ),
    "gemma3n": lambda: tf.Gemma3nForCausalLM(  # its last layers share the keys of earlier ones
        tf.Gemma3nTextConfig(
            **{**GROUPED, "num_hidden_layers": 4},
            head_dim=8,
            sliding_window=5,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=99,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
        )
    ),
    "llama4": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**GROUPED, head_dim=8, num_local_experts=2, intermediate_size_mlp=64, **CHUNKED)
    ),
}
MASKS = [
    "causal",
    "causal & window(6)",
    "causal & (window(6) | first(3))",
    "causal & strided(3) | causal & window(2)",
    "causal & chunks(5)",
    'documents(lengths=[11, 9], open_end=True, inner="causal & (window(4) | first(1))")',
    "heads([causal & window(3), causal & chunks(4), causal & window(9), causal & first(5)])",
]
PARTS = [(0, 9), (9, 10), (10, 13), *[(t, t + 1) for t in range(13, 40)]]


@functools.cache
def original(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def made(name: str, mask: str | None = None) -> Any:
    return use(switch(copy.deepcopy(original(name))), mask=mask)


def ids_of(rows: int, n: int) -> torch.Tensor:
    return torch.randint(3, 99, (rows, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def stepped(model: Any, ids: torch.Tensor, cache: Any, parts: Any = PARTS, valid: torch.Tensor | None = None) -> Any:
    """The logits of prompt, chunks and tokens; with padding where ``valid`` is 0."""
    steps = []
    for a, b in parts:
        padding = {} if valid is None else {"attention_mask": valid[:, :b]}
        if valid is not None and "position_ids" in type(model).forward.__annotations__:
            padding["position_ids"] = (valid.cumsum(1) - 1).clamp(min=0)[:, a:b]
        steps.append(model(ids[:, a:b], **{cache_name(model): cache}, use_cache=True, **padding).logits)
    return torch.cat(steps, 1)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_the_whole_under_the_mask(name: str, mask: str) -> None:
    model, ids = made(name, mask), ids_of(2, 40)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    cache = EvictingCache(model, block=4)
    torch.testing.assert_close(stepped(model, ids, cache), whole, rtol=2e-4, atol=2e-4)
    assert cache.get_seq_length() == 40
    if mask != "causal" and "strided" not in mask:
        assert cache.held < 20


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "gemma3n", "llama4", "llama"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_own_masks_of_a_model_evict_layer_by_layer(name: str, padded: bool) -> None:
    model, ids = made(name), ids_of(2, 40)
    valid = torch.ones_like(ids)
    valid[0, : 7 * padded] = 0
    given = {"attention_mask": valid} if padded else {}
    with torch.no_grad():
        plain = copy.deepcopy(original(name))  # of transformers alone
        whole = plain(ids, use_cache=False, **given, position_ids=(valid.cumsum(1) - 1).clamp(min=0)).logits
    cache = EvictingCache(model, block=4)
    steps = stepped(model, ids, cache, valid=valid if padded else None)
    seen = valid.bool()
    torch.testing.assert_close(steps[seen], whole[seen], rtol=2e-4, atol=2e-4)
    sizes = sorted(kv.held for kv in cache._caches.values())
    assert sizes[-1] == 40 if name != "mistral" else sizes[-1] <= 12
    assert sizes[0] <= 12 or name == "llama"


@pytest.mark.parametrize("mask", MASKS)
def test_a_padded_row_is_the_row_alone(mask: str) -> None:
    """Also where the first tokens of a row come only with the second forward."""
    model, ids = made("llama", mask), ids_of(2, 40)
    cache, valid = EvictingCache(model, block=4), torch.ones_like(ids)
    valid[0, :11] = 0
    steps = stepped(model, ids, cache, valid=valid)
    with torch.no_grad():
        alone = model(ids[:1, 11:], use_cache=False).logits
        other = model(ids[1:], use_cache=False).logits
    torch.testing.assert_close(steps[:1, 11:], alone, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(steps[1:], other, rtol=2e-4, atol=2e-4)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams that sample": {"do_sample": True, "num_beams": 2},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
    "a prompt looked up": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "in chunks": {"do_sample": False, "prefill_chunk_size": 4},
}


@pytest.mark.parametrize("mask", MASKS[2:3] + MASKS[4:6])
@pytest.mark.parametrize("way", WAYS)
def test_generate_is_that_without_a_cache(way: str, mask: str) -> None:
    model, options = made("llama", mask), {**WAYS[way], "max_new_tokens": 30}
    ids = ids_of(1, 9)
    without = {name: x for name, x in options.items() if not name.startswith("prefill_chunk")}
    if "lookup" in str(options):  # which needs a cache
        del without["prompt_lookup_num_tokens"]
    torch.manual_seed(3)
    expected = model.generate(ids, use_cache=False, **without)
    cache = EvictingCache(model, block=4)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, **{cache_name(model): cache}, **options), expected)
    assert cache.held < 30


def test_assisted_decoding_is_greedy_decoding() -> None:
    model, assistant = made("llama", MASKS[2]), copy.deepcopy(original("qwen3"))
    ids = ids_of(1, 9)
    cache = EvictingCache(model, block=4)
    given = {cache_name(model): cache, "assistant_model": assistant}
    tokens = model.generate(ids, do_sample=False, max_new_tokens=30, **given)
    assert torch.equal(tokens, model.generate(ids, do_sample=False, max_new_tokens=30, use_cache=False))
    assert cache._records and cache.held < 30


def test_generate_of_padded_rows() -> None:
    model, ids = made("llama", MASKS[2]), ids_of(2, 9)
    valid = torch.ones_like(ids)
    valid[1, :4] = 0
    ids[1, :4] = 0
    cache = {cache_name(model): EvictingCache(model, block=4)}
    options = {"do_sample": False, "max_new_tokens": 20}
    both = model.generate(ids, attention_mask=valid, **cache, **options)
    for row, start in ((0, 0), (1, 4)):
        alone = model.generate(ids[row : row + 1, start:], use_cache=False, **options)
        assert torch.equal(both[row : row + 1, start:], alone)


def test_lowtri_generates_with_it() -> None:
    model, prompts = made("gemma2", MASKS[2]), [[5, 6, 7, 8, 9], [11, 12]]
    cache = EvictingCache(model, block=4)
    cached = list(lowtri.generate(model, prompts, 25, cache=cache))
    assert cached == list(lowtri.generate(model, prompts, 25, cached=False))
    assert cache.held < 20
    decoder = lowtri.nn.Decoder(lowtri.nn.DecoderConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1)).eval()
    own = decoder.make_cache()
    assert list(lowtri.generate(decoder, [1, 2], 5, cache=own)) == list(lowtri.generate(decoder, [1, 2], 5))
    assert own.length == 6


def test_copies_go_on_by_themselves() -> None:
    model, ids = made("llama", MASKS[2]), ids_of(2, 40)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    cache = EvictingCache(model, block=4)
    stepped(model, ids, cache, PARTS[:10])
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache).to("cpu")):
        torch.testing.assert_close(stepped(model, ids, other, PARTS[10:]), whole[:, 20:], rtol=2e-4, atol=2e-4)
    assert cache.get_seq_length() == 20
    moved = copy.deepcopy(cache).to("meta")
    assert moved.bytes == cache.bytes and moved._caches[model.lowtri_mask.mask]._layers[0].keys.is_meta


def test_rows_are_repeated_chosen_reordered_and_forgotten() -> None:
    model, ids = made("llama", MASKS[2]), ids_of(2, 30)
    valid = torch.ones_like(ids)
    valid[0, :5] = 0
    cache = EvictingCache(model, block=4)
    assert cache.batch_size == -1 and not all(cache.is_linear) and not cache.is_initialized
    stepped(model, ids, cache, [(0, 12)], valid)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    cache.reorder_cache(torch.tensor([1, 0]))
    turned = stepped(model, ids.flip(0), cache, [(12, 30)], valid.flip(0))
    straight = stepped(model, ids, EvictingCache(model, block=4), [(0, 12), (12, 30)], valid)
    torch.testing.assert_close(turned.flip(0), straight[:, 12:], rtol=2e-4, atol=2e-4)
    cache.reset()
    assert cache.get_seq_length() == cache.bytes == len(cache) == 0
    torch.testing.assert_close(stepped(model, ids, cache, [(0, 30)], valid), straight, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_crop_removes_what_came_since_the_last_crop(padded: bool) -> None:
    model, ids = made("llama", MASKS[2]), ids_of(2, 40)
    valid = torch.ones_like(ids)
    valid[0, : 5 * padded] = 0
    given = valid if padded else None
    whole = stepped(model, ids, EvictingCache(model), [(0, 40)], given)
    cache = EvictingCache(model, block=1)
    stepped(model, ids, cache, [(0, 20)], given)
    cache.activate_past_recording()
    cache.crop(0)
    wrong = ids.flip(1)
    stepped(model, wrong, cache, [(t, t + 1) for t in range(20, 35)], given)  # far more than the window
    cache.crop(-15)
    assert cache.get_seq_length() == 20
    again = stepped(model, ids, cache, [(t, t + 1) for t in range(20, 40)], given)
    torch.testing.assert_close(again, whole[:, 20:], rtol=2e-4, atol=2e-4)
    with pytest.raises(CallError, match=r"crop: n is \[1[,\]]|crop: n is \[0, 1\]"):
        cache.crop(-39)
    with pytest.raises(CallError, match=r"crop: got -41, but the cache has 40 tokens.\nFix: reset\(\)"):
        cache.crop(-41)


def test_a_refused_crop_or_reorder_changes_no_group_of_layers() -> None:
    """The layers without a window could be cropped by far, those with one could not."""
    model, ids = made("gemma2"), ids_of(2, 40)
    valid = torch.ones_like(ids)
    valid[0, :5] = 0
    whole = stepped(model, ids, EvictingCache(model), [(0, 40)], valid)
    cache = EvictingCache(model, block=1)
    stepped(model, ids, cache, [(0, 20), *[(t, t + 1) for t in range(20, 30)]], valid)
    lengths = [kv.next_positions(1).tolist() for kv in cache._caches.values()]
    with pytest.raises(CallError, match=r"crop: n is \[5, 10\], but keys that queries before"):
        cache.crop(-20)
    with pytest.raises(CallError, match=r"reorder: index is \[0, 2\], but the cache has the rows 0 .. 1"):
        cache.reorder_cache(torch.tensor([0, 2]))
    assert [kv.next_positions(1).tolist() for kv in cache._caches.values()] == lengths
    again = stepped(model, ids, cache, [(t, t + 1) for t in range(30, 40)], valid)
    torch.testing.assert_close(again, whole[:, 30:], rtol=2e-4, atol=2e-4)


def test_memory_of_many_tokens_is_that_of_few() -> None:
    """100,000 tokens through a window with sinks, of which 2,000 have filled every slot."""
    torch.manual_seed(0)
    size = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = switch(tf.LlamaForCausalLM(tf.LlamaConfig(**size, max_position_embeddings=10**6)).eval())
    cache = EvictingCache(use(model, mask="causal & (window(1024) | first(4))"))
    ids = torch.zeros((1, 1000), dtype=torch.long)
    sizes = []
    with torch.no_grad():
        for n in range(100):
            model.model(ids, **{cache_name(model): cache})
            for _ in range(10):  # single tokens between
                model.model(ids[:, :1], **{cache_name(model): cache})
            sizes.append(cache.bytes)
            assert cache.get_seq_length() == 1010 * (n + 1)
    assert max(sizes[2:]) == sizes[1]
    assert "█" in cache.draw().splitlines()[1][0]


def test_a_fixed_capacity_stays_and_overflow_raises() -> None:
    model, ids = made("llama", "causal & (window(6) | first(3))"), ids_of(2, 40)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    cache = EvictingCache(model, capacity=20, block=4)
    torch.testing.assert_close(stepped(model, ids, cache), whole, rtol=2e-4, atol=2e-4)
    assert {kv.capacity for kv in cache._caches.values()} == {20}
    with pytest.raises(
        CallError, match=r"append: 30 new tokens and 8 .* do not fit the 20 slots .*\nFix: capacity=38 or more"
    ):
        stepped(model, ids, cache, [(0, 30)])


ERRORS: list[tuple[Callable[[Any, Any], Any], str]] = [
    (
        lambda model, cache: model(ids_of(1, 3), attention_mask="causal & window(2)", **cache),
        r"EvictingCache: the forward has causal & window\(2\), but the cache evicts by .*\nFix: a new cache after use",
    ),
    (
        lambda model, cache: model(ids_of(1, 3), attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool), **cache),
        r"EvictingCache: attention_mask is \(1, 1, 3, 3\), but keys are evicted by a formula.\nFix: use\(model, mask=",
    ),
    (
        lambda model, cache: model(ids_of(1, 3), attention_mask=torch.ones(1, 5), **cache),
        r"EvictingCache: attention_mask is \(1, 5\), but the cache has 0 tokens .* 1 x 3.\nFix: attention_mask \(1, 3\)",
    ),
    (
        lambda model, cache: model(ids_of(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), **cache),
        r"EvictingCache: got position_ids of packed rows.\nFix: use\(model, mask=documents\(lengths=",
    ),
    (
        lambda model, cache: model(ids_of(1, 3), output_attentions=True, **cache),
        r"EvictingCache: got output_attentions in LlamaAttention, which it does not compute.\nFix: model.eval\(\)",
    ),
    (
        lambda model, cache: use(model, mask="causal")(ids_of(1, 3), **cache),
        r"EvictingCache: the forward has causal, but the cache evicts by .*\nFix: a new cache after use",
    ),
    (
        lambda model, cache: use(model)(ids_of(1, 3), **cache),
        r"EvictingCache: the forward has the model's own masks, but the cache evicts by causal .*\nFix: a new cache after use",
    ),
    (
        lambda model, cache: copy.deepcopy(original("llama"))(ids_of(1, 3), **cache),
        r"EvictingCache: a layer appends outside of a forward of a switched model.\nFix: switch\(model\)",
    ),
]


@pytest.mark.parametrize(("act", "words"), ERRORS, ids=[words[15:50] for _, words in ERRORS])
def test_what_it_cannot_do_raises(act: Any, words: str) -> None:
    model = made("llama", MASKS[2])
    with torch.no_grad(), pytest.raises(CallError, match=words) as caught:
        act(model, {cache_name(model): EvictingCache(model), "use_cache": True})
    assert len(str(caught.value).splitlines()) <= 3


def test_gradients_and_other_padding_and_other_models_raise() -> None:
    model, ids = made("llama", MASKS[2]), ids_of(1, 4)
    with pytest.raises(CallError, match=r"EvictingCache: it records no gradients.\nFix: with torch.no_grad\(\)"):
        model(ids, **{cache_name(model): EvictingCache(model)})
    cache = EvictingCache(model)
    stepped(model, ids, cache, [(0, 2)], torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(
        CallError, match=r"attention_mask hides other earlier tokens than before.*\nFix: the attention_mask"
    ):
        stepped(model, ids, cache, [(2, 3)], torch.tensor([[1, 1, 1, 1]]))
    with pytest.raises(CallError, match=r"it holds padded rows, but the forward has no attention_mask.\nFix"):
        stepped(model, ids, cache, [(2, 3)])
    with pytest.raises(EngineError, match=r'EvictingCache: the model\'s attention is ".*". Fix: switch\(model\) first'):
        EvictingCache(copy.deepcopy(original("llama")))
    with pytest.raises(CallError, match=r"generate: the cache holds 2 tokens.*\nFix: a new cache, or cache.reset\(\)"):
        next(lowtri.generate(model, [1, 2], 3, cache=cache))
    with pytest.raises(CallError, match="generate: got cache=, but function takes none"):
        next(lowtri.generate(lambda ids: np.eye(9)[ids % 9], [1, 2], 3, cache=cache))
    with pytest.raises(CallError, match="KVCache: block is 0; it counts tokens"):
        EvictingCache(model, block=0)
    if cache_name(model) != "cache":
        with pytest.raises(CallError, match=r"got cache=, but LlamaForCausalLM takes its cache as past_key_values"):
            model(ids, cache=EvictingCache(model))


def test_it_is_shown() -> None:
    model = made("gemma2")
    cache = EvictingCache(model, block=4)
    stepped(model, ids_of(1, 12), cache, [(0, 12)])
    lines = str(cache).splitlines()
    assert lines[0].startswith("EvictingCache, 2 layers: KVCache(window(5)): 12 held")
    assert any(line.startswith("EvictingCache, 1 layer: KVCache(causal): 12 held, 0 evicted") for line in lines)
    assert (
        repr(cache).startswith("EvictingCache(KVCache(window(5)): ")
        and "12 of 16 slots hold a token" in cache._repr_html_()
    )
