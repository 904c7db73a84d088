"""A lowtri mask on a switched model: what eager attention gives with the table of the mask, in forward, training and generate."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from cache_names import cache_name
from torch import Tensor

import lowtri
from lowtri.errors import CallError, EngineError, MaskError
from lowtri.integrations.transformers import attention, switch, use, user_masks

N = 12
SIZE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 128}
TWO = ["sliding_attention", "full_attention"]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**LLAMA, sliding_window=5)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**LLAMA, head_dim=8, sliding_window=5, layer_types=TWO)),
    "llama4": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**LLAMA, head_dim=8, attention_chunk_size=5, intermediate_size_mlp=64, num_local_experts=2)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, pad_token_id=0)),
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**SIZE)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZE, intermediate_size=64)),
}
HEADS = lowtri.heads(
    [lowtri.causal(), lowtri.mask("causal & window(2)"), lowtri.mask("causal & first(3)"), lowtri.full()]
)
MASKS: dict[str, Any] = {
    "a window": "causal & window(4)",
    "wider than the model's window": "causal & (window(8) | first(2))",
    "a prefix": lowtri.causal() | lowtri.first(5),
    "all": "full",
    "heads": HEADS,
    "a table": lowtri.table(torch.rand(N, N, generator=torch.Generator().manual_seed(3)) < 0.7) | lowtri.window(1),
}


@cache
def pair(name: str) -> tuple[Any, Any]:
    """The model with eager attention, and switched."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    theirs, ours = model, switch(copy.deepcopy(model))
    if name == "falcon":
        theirs.config._attn_implementation = "eager"
    else:
        theirs.set_attn_implementation("eager")
    return theirs, ours


def ids_of(rows: int = 2, n: int = N) -> Tensor:
    return torch.randint(3, 99, (rows, n), generator=torch.Generator().manual_seed(1))


def additive(mask: Any, n: int = N) -> Tensor:
    """The mask as eager attention takes it, (1, H|1, n, n)."""
    table = torch.from_numpy(lowtri.mask(mask).dense(n))
    table = table if table.ndim == 4 else table[None, None]
    return torch.where(table, 0.0, torch.finfo(torch.float32).min)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", MASKS)
def test_a_forward_gives_what_eager_gives_with_the_table(name: str, kind: str) -> None:
    (theirs, ours), ids, mask = pair(name), ids_of(), MASKS[kind]
    with torch.no_grad():
        expected = theirs(ids, attention_mask=additive(mask)).logits
        own = ours(ids).logits
        close(ours(ids, attention_mask=mask).logits, expected)
        if name not in ("falcon", "gpt2"):  # where attention_mask is the second argument
            close(ours(ids, mask).logits, expected)
        close(use(ours, mask=mask)(ids).logits, expected)
        assert torch.equal(use(ours, mask=None)(ids).logits, own)
    if (name, kind) != ("bert", "all"):  # which is its own mask
        assert not torch.allclose(own, expected, atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon"])
def test_training_gives_eagers_gradients(name: str) -> None:
    (theirs, ours), ids, mask = pair(name), ids_of(), "causal & (window(3) | first(1))"
    found = []
    for model, given in ((theirs, additive(mask)), (use(ours, mask=mask), None)):
        loss = model(ids, attention_mask=given, labels=ids).loss
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    use(ours, mask=None)
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(other, one)


def test_checkpointed_layers_train_with_the_mask_of_their_forward() -> None:
    model, ids = copy.deepcopy(pair("llama")[1]).train(), ids_of()
    expected = torch.autograd.grad(
        model(ids, attention_mask="causal & window(3)", labels=ids).loss, list(model.parameters())
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions call it by another name
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(ids, attention_mask="causal & window(3)", labels=ids, use_cache=False).loss
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("mask", ["causal & (window(3) | first(1))", "causal & chunks(5)", "causal | first(4)", HEADS])
def test_padded_and_packed_rows_are_as_if_alone(mask: Any) -> None:
    model, ids = use(pair("llama")[1], mask=mask), ids_of(1, 16)
    with torch.no_grad():
        alone = [model(ids[:, :7]).logits, model(ids[:, 7:]).logits]
        positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
        packed = model(ids, position_ids=positions, use_cache=False).logits
        close(packed, torch.cat(alone, 1))
        rows = torch.zeros(2, 9, dtype=torch.long)
        rows[0, 2:], rows[1] = ids[0, :7], ids[0, 7:]
        real = (torch.arange(9) >= torch.tensor([[2], [0]])).long()
        padded = model(rows, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(0)).logits
        close(padded[:1, 2:], alone[0])
        close(padded[1:], alone[1])
    use(model, mask=None)


# Generating.


def greedy(model: Any, ids: Tensor, mask: Any, steps: int) -> Tensor:
    """Tokens from whole passes of eager attention with the table."""
    with torch.no_grad():
        for _ in range(steps):
            logits = model(ids, attention_mask=additive(mask, ids.shape[1]), use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


HOW: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prefill in chunks": {"prefill_chunk_size": 5},
    "guesses from the prompt": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("llama", "causal & (window(4) | first(2))"),
        ("llama", "causal | first(6)"),
        ("llama", HEADS & lowtri.causal()),
        ("mistral", "causal & window(3)"),
        ("falcon", "causal & window(4)"),
    ],
)
def test_generate_gives_the_tokens_of_whole_passes(name: str, mask: Any, how: str) -> None:
    (theirs, ours), ids = pair(name), ids_of(1 if "guesses" in how else 2)
    if how == "prefill in chunks" and "first(6)" in str(mask):
        return  # refused, as below
    expected = greedy(theirs, ids, mask, 10)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = use(ours, mask=mask).generate(ids, attention_mask=torch.ones_like(ids), **options, **HOW[how])
    use(ours, mask=None)
    assert torch.equal(found, expected)


def test_a_left_padded_batch_generates_what_its_rows_generate() -> None:
    theirs, ours = pair("llama")
    mask, ids = "causal & (window(3) | first(2))", ids_of(1, 12)
    rows, real = torch.zeros(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    rows[0, 5:], real[0, :5], rows[1] = ids[0, :7], 0, ids[0]
    found = use(ours, mask=mask).generate(
        rows, attention_mask=real, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    use(ours, mask=None)
    assert torch.equal(found[0, 12:], greedy(theirs, ids[:, :7], mask, 8)[0, 7:])
    assert torch.equal(found[1], greedy(theirs, ids, mask, 8)[0])


def test_lowtris_own_generate_uses_the_mask() -> None:
    theirs, ours = pair("llama")
    mask, ids = "causal & (window(3) | first(2))", ids_of(1)
    found = list(lowtri.generate(use(ours, mask=mask), ids[0].tolist(), max_new_tokens=8))
    use(ours, mask=None)
    assert found == greedy(theirs, ids, mask, 8)[0, N:].tolist()


# What is refused.

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "all": ("llama", "full", {}, r"full shows the query at 0 the key at 12, which is computed only after it\.\nFix: a mask that"),
    "all, without a cache": (
        "llama", "full", {"use_cache": False}, r"shows the query at 0 the key at 12, which is computed only after it\.\nFix: a mask",
    ),
    "one ahead, without a cache": (
        "llama", "band(3, 1)", {"use_cache": False}, r"shows the query at 11 the key at 12, which is computed only after it",
    ),
    "a prefix longer than the prompt": (
        "llama", "causal | first(14)", {}, r"shows the query at 0 the key at 12, which is computed only after it",
    ),
    "a prefix in chunks": (
        "llama", "causal | first(6)", {"prefill_chunk_size": 5}, r"shows the query at 0 the key at 5, which is computed only",
    ),
    "both sides": ("llama", "band(3, 1)", {}, r"band\(3, 1\) shows the query at 11 the key at 12, which is computed only after it"),
    "what was dropped": (
        "mistral", "causal & (window(4) | first(1))", {},
        r"shows the query at 12 the key at 0, which the model's cache has dropped\.\nFix: (cache|past_key_values)=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_generate_refuses_what_a_cache_cannot_serve(why: str) -> None:
    name, mask, more, words = REFUSED[why]
    model, ids = use(pair(name)[1], mask=mask), ids_of()
    with pytest.raises(CallError, match=words):
        model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS, **more)
    use(model, mask=None)
    assert torch.equal(model(ids).logits, copy.deepcopy(model)(ids).logits)  # nothing is left of the mask


def test_a_cache_that_drops_nothing_serves_wider_masks() -> None:
    (theirs, ours), ids, mask = pair("mistral"), ids_of(), "causal & (window(4) | first(1))"
    own = {cache_name(ours): tf.DynamicCache()}
    found = use(ours, mask=mask).generate(ids, attention_mask=torch.ones_like(ids), **own, **OPTIONS)
    use(ours, mask=None)
    assert torch.equal(found, greedy(theirs, ids, mask, 4))


def test_models_that_a_mask_cannot_reach_are_named() -> None:
    model = MODELS["llama"]()
    with pytest.raises(EngineError, match=r'use: the model\'s attention is "sdpa"\. Fix: switch\(model\) first'):
        use(model, mask="causal")
    t5 = switch(
        tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=99, d_model=32, d_kv=8, num_layers=1, num_heads=4))
    )
    with pytest.raises(EngineError, match=r"use: T5ForConditionalGeneration: an encoder-decoder has three attentions"):
        use(t5, mask="causal")
    with pytest.raises(EngineError, match=r"attention_mask: T5ForConditionalGeneration"):
        t5(ids_of(), attention_mask="causal", decoder_input_ids=ids_of())
    jamba = switch(
        tf.JambaForCausalLM(
            tf.JambaConfig(**LLAMA, attn_layer_offset=0, attn_layer_period=2, use_mamba_kernels=False, num_experts=1)
        )
    )
    with pytest.raises(EngineError, match=r"its recurrent layers see every earlier token.*\nFix: the model's own mask"):
        use(jamba, mask="causal")
    with pytest.raises(MaskError, match=r"use: mask: got a bare Tensor"):
        use(switch(model), mask=torch.ones(3, 3).bool())
    with pytest.raises(MaskError, match="sliding"):
        model(ids_of(), attention_mask="sliding(3)")


def test_a_mask_that_was_not_applied_is_an_error() -> None:
    model, ids = use(copy.deepcopy(pair("llama")[1]), mask="causal & window(2)"), ids_of()
    with pytest.raises(
        EngineError, match=r"made no mask in this forward, so causal & window\(2\) was not applied\.\nFix"
    ):
        model(ids, attention_mask=additive("causal"))
    model.set_attn_implementation("sdpa")
    with pytest.raises(EngineError, match="was not applied"):
        model(ids)
    use(model, mask=None)(ids)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_applies_the_mask_or_says_that_it_did_not() -> None:
    model, ids = copy.deepcopy(pair("llama")[1]), ids_of()
    own = model(ids).logits
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(ids).logits, own)
    with pytest.raises(EngineError, match=r"was not applied\.\nFix: .* no torch\.compile"):
        torch.compile(model, backend="eager")(ids, attention_mask="causal & window(2)")


# A forward with nothing set.


def test_the_next_token_begins_nothing_and_its_layers_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair("llama")
    begun, masks = [], []
    real_begin, real_attention = user_masks._begin_eagerly, attention.attention
    monkeypatch.setattr(user_masks, "_begin_eagerly", lambda *given: begun.append(given) or real_begin(*given))
    monkeypatch.setattr(
        attention,
        "attention",
        lambda q, k, v, mask, **more: masks.append(mask) or real_attention(q, k, v, mask, **more),
    )
    ids = ids_of(1)
    kept = tf.DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(ids[:, :-1], **{cache_name(ours): kept})
        begun.clear()
        masks.clear()
        found = ours(ids[:, -1:], **{cache_name(ours): kept}).logits
        expected = theirs(ids).logits[:, -1:]
    assert begun == [] and masks == ["full", "full"]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "a mask of this forward": {"attention_mask": "causal & window(3)"},
    "a mask of this forward as a Mask": {"attention_mask": lowtri.causal() & lowtri.window(3)},
    "padding": {"attention_mask": torch.tensor([[0, 0] + [1] * (N - 2)])},
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_next_token_keeps_to_what_is_set(name: str, by_name: bool) -> None:
    _, ours = pair("llama")
    ids, options = ids_of(1), SETTINGS[name]
    kept = tf.DynamicCache(config=ours.config)
    of_prompt = {key: x[:, :-1] if isinstance(x, Tensor) else x for key, x in options.items()}
    with torch.no_grad():
        ours(ids[:, :-1], **of_prompt, **{cache_name(ours): kept})
        more = {**options, cache_name(ours): kept}
        found = ours(input_ids=ids[:, -1:], **more) if by_name else ours(ids[:, -1:], **more)
        expected = ours(ids, **options).logits[:, -1:]
        unset = ours(ids).logits[:, -1:]
    torch.testing.assert_close(found.logits, expected, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(unset, expected, rtol=2e-3, atol=2e-3)
