"""What the cache of a model is called, what it holds, how long it is, and how it is cropped, in whichever version is installed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from lowtri.compat.model_caches import (
    CACHE_NAMES,
    cache_argument,
    cache_of,
    cached_length,
    crop_cache,
    is_ordinary,
    needs_whole_mask,
)

IDS = torch.arange(3, 12)[None]
SIZE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {**SIZE, "num_attention_heads": 4, "intermediate_size": 64}


def llama() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**ATTENTION)).eval()


def mamba() -> Any:
    return tf.MambaForCausalLM(tf.MambaConfig(**SIZE, state_size=4)).eval()


def names_of(model: Any) -> Any:
    return inspect.signature(type(model).forward).parameters


@pytest.mark.parametrize(("make", "whole"), [(llama, True), (mamba, False)])
def test_a_cache_comes_out_and_goes_in_again(make: Any, whole: bool) -> None:
    """Passed on by its name, it gives the logits of the whole; under a name that the model does not know, it would not."""
    torch.manual_seed(0)
    model = make()
    argument = cache_argument(names_of(model), model)
    assert argument in CACHE_NAMES[:3]
    with torch.no_grad():
        found = cache_of(model(IDS[:, :6], use_cache=True))
        assert found is not None and found[0] == argument
        assert needs_whole_mask(found[1], found[0]) == whole
        after = model(IDS[:, 6:7], use_cache=True, **{argument: found[1]}).logits
        torch.testing.assert_close(after, model(IDS[:, :7]).logits[:, 6:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_a_cropped_cache_continues_where_it_was_cut(static: bool) -> None:
    torch.manual_seed(0)
    model = llama()
    argument = str(cache_argument(names_of(model), model))
    cache = tf.StaticCache(config=model.config, max_cache_len=16) if static else tf.DynamicCache(config=model.config)
    assert cached_length(cache) == 0
    if static and not hasattr(cache.layers[0], "crop"):
        return  # not in this version
    with torch.no_grad():
        model(IDS, **{argument: cache})
        assert cached_length(cache) == 9
        crop_cache(cache, 4, 9)
        assert cached_length(cache) == 4
        after = model(IDS[:, 4:], **{argument: cache}).logits
        torch.testing.assert_close(after, model(IDS).logits[:, 4:], rtol=1e-4, atol=1e-5)


def test_another_cache_is_told_how_many_stay() -> None:
    told: list[int] = []
    crop_cache(SimpleNamespace(crop=told.append), 4, 9)
    assert told == [4]


def test_a_cache_of_states_has_no_length() -> None:
    model = mamba()
    found = cache_of(model(IDS, use_cache=True))
    assert found is not None
    assert cached_length(found[1]) is None
    assert cached_length((torch.zeros(1),)) is None


@pytest.mark.parametrize(
    ("names", "model", "expected"),
    [
        (["input_ids", "past_key_values"], None, "past_key_values"),
        (["input_ids", "cache_params", "use_cache"], None, "cache_params"),
        (["ids", "cache"], None, None),
        (["ids", "cache", "use_cache"], None, "cache"),
        (["input_ids", "cache"], SimpleNamespace(config=1, generate=2), "cache"),
        (["ids", "cache", "use_cache"], SimpleNamespace(make_cache=1), None),
        (["input_ids", "state", "use_cache"], None, None),
        (["ids"], None, None),
    ],
)
def test_which_argument_takes_a_cache(names: list[str], model: Any, expected: str | None) -> None:
    assert cache_argument(names, model) == expected


def test_outputs_of_all_forms() -> None:
    assert cache_of({"logits": 1, "past_key_values": 2}) == ("past_key_values", 2)
    assert cache_of(SimpleNamespace(state=[3])) == ("state", [3])
    assert cache_of((1, 2)) == ("", 2)
    assert cache_of((1, None)) is None and cache_of(torch.zeros(2)) is None


def test_kinds_by_the_object_and_by_the_name_of_lists_only() -> None:
    layer, state = SimpleNamespace(get_mask_sizes=1), SimpleNamespace()
    assert needs_whole_mask(SimpleNamespace(layers=[state, layer]), "cache_params")  # a hybrid model
    assert not needs_whole_mask(SimpleNamespace(layers=[state, state]), "past_key_values")
    assert not needs_whole_mask(SimpleNamespace(conv_states=1), "cache")
    assert needs_whole_mask(((1, 2),), "past_key_values") and not needs_whole_mask([1], "state")


def test_a_paged_cache_is_no_ordinary_one() -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    assert not is_ordinary(PagedAttentionCache.__new__(PagedAttentionCache))
    assert is_ordinary(tf.DynamicCache())
