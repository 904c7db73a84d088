"""What comes to the attention besides a mask function: tables by hand, biases, sinks, weights, dropout, caches; and what is refused."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from cache_names import cache_in
from torch import Tensor

import lowtri
from lowtri.errors import CallError, EngineError
from lowtri.integrations.dense_mask import read_dense_mask
from lowtri.integrations.transformers import attention as door
from lowtri.integrations.transformers import register, switch
from lowtri.integrations.transformers.attention import attend
from lowtri.integrations.transformers.lazy import LazyMaskTensor
from lowtri.integrations.transformers.masks import make_mask
from lowtri.masks import causal, full
from lowtri.masks.array_masks import Keys, Table

register()

NQ, NK, HEADS = 5, 7, 4
LEAST = torch.finfo(torch.float32).min
SIZE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0}


class Layer(torch.nn.Module):
    """What an attention function is told of the layer that calls it."""

    is_causal = True


def qkv(rows: int = 2, nq: int = NQ, nk: int = NK, seed: int = 0, kv_heads: int = HEADS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((rows, HEADS, nq, 16), (rows, kv_heads, nk, 16), (rows, kv_heads, nk, 16))
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | float = 0.0) -> Tensor:
    """(B, Nq, H, D): the scores, the mask, the softmax, as on the board; a row that sees nothing gives 0."""
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


BOOLS = torch.rand(2, HEADS, NQ, NK, generator=torch.Generator().manual_seed(5)) < 0.6


@pytest.mark.parametrize("shape", [(2, HEADS), (2, 1), (1, HEADS), (1, 1)])
@pytest.mark.parametrize("written", ["bools", "infinite", "finite", "least of half", "no rows"])
def test_a_table_by_hand(shape: tuple[int, int], written: str) -> None:
    q, k, v = qkv()
    visible = BOOLS[: shape[0], : shape[1]]
    if written == "no rows":
        visible = visible[:, :, :1]
    tables = {
        "infinite": torch.zeros(visible.shape).masked_fill(~visible, -torch.inf),
        "finite": torch.zeros(visible.shape).masked_fill(~visible, LEAST),
        "least of half": torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(
            ~visible, torch.finfo(torch.bfloat16).min
        ),
    }
    table = tables.get(written, visible)
    seen, bias = read_dense_mask(table, NQ, NK, q.dtype)
    assert bias is None
    assert isinstance(seen.mask, Keys if written == "no rows" and shape[1] == 1 else Table)
    close(attend(Layer(), q, k, v, table)[0], by_hand(q, k, v, visible))


@pytest.mark.parametrize("hidden", [-torch.inf, LEAST, None])
def test_other_numbers_are_a_bias(hidden: float | None) -> None:
    q, k, v = qkv()
    numbers = torch.randn(2, 1, NQ, NK, dtype=torch.float64)
    visible = BOOLS[:, :1] if hidden is not None else torch.ones(2, 1, NQ, NK, dtype=torch.bool)
    table = numbers.float().masked_fill(~visible, 0.0 if hidden is None else hidden)
    seen, bias = read_dense_mask(table, NQ, NK, q.dtype)
    assert torch.equal(bias, table) and np.array_equal(np.broadcast_to(seen.table(), visible.shape), visible.numpy())
    close(attend(Layer(), q, k, v, table)[0], by_hand(q, k, v, visible, numbers.float().double()))


@pytest.mark.parametrize("zero", [0.0, 1.0])  # a learned bias begins with 0 and says nothing yet
def test_a_bias_keeps_its_gradient(zero: float) -> None:
    q, k, v = qkv()
    table = torch.randn(1, HEADS, NQ, NK, dtype=torch.float64)
    table = (table * zero).requires_grad_()
    same = table.detach().clone().requires_grad_()
    for _ in range(2):  # a second call must not meet the graph of the first
        table.grad = same.grad = None
        attend(Layer(), q, k, v, table)[0].square().sum().backward()
        by_hand(q, k, v, None, same).square().sum().backward()
        close(table.grad, same.grad)


def test_a_position_bias_joins_a_table_of_numbers() -> None:
    q, k, v = qkv()
    one, two = (torch.randn(1, HEADS, NQ, NK, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out, _ = attend(Layer(), q, k, v, one.detach(), position_bias=two)
    close(out, by_hand(q, k, v, None, one + two))
    assert torch.autograd.grad(out.sum(), two)[0].shape == two.shape


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_what_was_read_is_forgotten_with_its_tensor(value: float) -> None:
    table = torch.full((1, 1, NQ, NK), value)
    read_dense_mask(table, NQ, NK, torch.float32)
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None


def test_a_dense_mask_is_read_as_the_simplest_mask() -> None:
    line = torch.ones(NQ, NK, dtype=torch.bool).tril(NK - NQ)
    assert read_dense_mask(line[None, None], NQ, NK, torch.float32).lazy.mask == causal()
    assert read_dense_mask(line.expand(3, 2, NQ, NK), NQ, NK, torch.float32).lazy.mask == causal()
    more = read_dense_mask(torch.ones(6, 4, dtype=torch.bool).tril(), 6, 4, torch.float32)  # more queries than keys
    assert isinstance(more.lazy.mask, Table)
    assert np.array_equal(more.lazy.table()[0, 0], np.tri(6, 4, dtype=bool))


def test_no_mask_is_causal_from_the_top_left_where_the_layer_is() -> None:
    q, k, v = qkv()
    corner = torch.ones(NQ, NK, dtype=torch.bool).tril()
    close(attend(Layer(), q, k, v, None)[0], by_hand(q, k, v, corner))
    close(attend(Layer(), q, k, v, None, is_causal=False)[0], by_hand(q, k, v, None))
    close(attend(Layer(), q[:, :, :1], k, v, None)[0], by_hand(q[:, :, :1], k, v, None))


def test_keys_that_nobody_sees_are_left_out_with_their_bias() -> None:
    q, k, v = qkv(nq=2, nk=64)
    k[:, :, :20], v[:, :, 43:] = torch.nan, torch.inf  # no trace of them
    mask = make_mask(2, 2, 64, 40, 0, attention_mask=torch.arange(64).expand(2, -1) >= 20)
    bias = torch.randn(1, HEADS, 2, 64, dtype=torch.float64)
    out, _ = attend(Layer(), q, k, v, mask, position_bias=bias)
    visible = (torch.arange(64) <= torch.tensor([[40], [41]])) & (torch.arange(64) >= 20)
    close(out, by_hand(q, k.nan_to_num(), v.nan_to_num(posinf=0), visible[None, None], bias))


def test_one_set_of_learned_queries_serves_a_batch() -> None:
    q, k, v = qkv()
    close(attend(Layer(), q[:1], k, v, None, is_causal=False)[0], by_hand(q[:1], k, v, None))


def test_sinks_for_each_head_and_for_each_query() -> None:
    q, k, v = qkv()
    heads = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    each = heads[None, :, None, None].expand(2, HEADS, NQ, 1)
    scores = torch.cat([q @ k.transpose(2, 3) / 4, each], -1).softmax(-1)[..., :-1]
    expected = (scores @ v).transpose(1, 2)
    one, w1 = attend(Layer(), q, k, v, None, is_causal=False, s_aux=heads, output_attentions=True)
    two, w2 = attend(Layer(), q, k, v, None, is_causal=False, sinks=each, output_attentions=True)
    for out, weights in ((one, w1), (two, w2)):
        close(out, expected)
        close(weights, scores)
        close(
            torch.autograd.grad(out.sum(), heads)[0], torch.autograd.grad(expected.sum(), heads, retain_graph=True)[0]
        )


@pytest.mark.parametrize("indices", [torch.tensor([[[0, 3], [6, 6], [1, -1], [-1, -1], [2, 0]]] * 2)])
def test_keys_that_an_indexer_chose(indices: Tensor) -> None:
    q, k, v = qkv()
    visible = torch.zeros(2, 1, NQ, NK, dtype=torch.bool)
    for row, places in enumerate(indices[0].tolist()):
        visible[:, 0, row, [p for p in places if p >= 0]] = True
    close(attend(Layer(), q, k, v, None, is_causal=False, indices=indices)[0], by_hand(q, k, v, visible))


# Refused, with the fix.

REFUSED = {
    "a paged cache": ({"cache": object()}, r"got a paged cache.*\nFix: attn_implementation=\"sdpa\" for continuous"),
    "keys in blocks": (
        {"read_index": [torch.zeros(4)]},
        r"got a paged cache.*\nFix: attn_implementation=\"sdpa\" for cont",
    ),
    "alibi": ({"alibi": torch.zeros(1)}, r"passes alibi, and lowtri would have to leave it out.\nFix: attn_impl"),
    "a head mask": ({"head_mask": torch.ones(4)}, "passes head_mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_arguments_are_rejected(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(CallError, match=words):
        attend(Layer(), *qkv(), None, **options)


def test_tables_of_other_sizes_are_rejected() -> None:
    with pytest.raises(
        CallError, match=r"attention_mask is \(2, 1, 5, 9\), but the layer has 5 queries and 7 keys: expected"
    ):
        attend(Layer(), *qkv(), torch.ones(2, 1, 5, 9, dtype=torch.bool))
    with pytest.raises(
        CallError, match=r"attention_mask is torch.int64 .* two things.\nFix: bools, True = may see, or floats"
    ):
        attend(Layer(), *qkv(), torch.ones(2, 1, 5, 7, dtype=torch.long))
    with pytest.raises(CallError, match="but the layer has 5 queries and 7 keys"):
        attend(Layer(), *qkv(), make_mask(2, 5, 6))


@pytest.mark.parametrize("shape", [(3, 1, 5, 7), (2, 3, 5, 7), (3, 1, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_tables_of_other_rows_or_heads_are_rejected_also_where_all_are_equal(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Equal rows are read as one; that there are too many of them is an error all the same, as with torch's attention."""
    with pytest.raises(CallError, match=r"attention_mask is \(., ., ., 7\), but the layer has 2 rows and 4 heads: exp"):
        attend(Layer(), *qkv(), torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "my|kernel"])
def test_names_of_transformers_are_rejected(name: str) -> None:
    with pytest.raises(
        EngineError, match=rf'register: "{name.replace("|", ".")}" is a name of transformers\' own.*Fix: name="lowtri"'
    ):
        register(name)


def test_switch_rejects_models_with_attention_of_their_own() -> None:
    size = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    deberta = tf.DebertaModel(tf.DebertaConfig(**size))
    with pytest.raises(
        EngineError,
        match=r"switch: DebertaModel, DisentangledSelfAttention has attention code of its own .*\nFix: keep",
    ):
        switch(deberta)
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    sam = tf.SamVisionModel(tf.SamVisionConfig(**vision, output_channels=16, global_attn_indexes=[0], mlp_dim=64))
    with pytest.raises(EngineError, match="switch: SamVisionSdpaAttention has attention code of its own"):
        switch(sam)
    with pytest.raises(EngineError, match=r'switch: "other" is not registered. Fix: register\("other"\)'):
        switch(deberta, "other")
    falcon = tf.FalconForCausalLM(
        tf.FalconConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    )
    falcon.config._attn_implementation_internal = "lowtri"  # whoever forces it is told by the first forward
    with pytest.raises(CallError, match="adds its boolean mask to the scores"):
        falcon(torch.randint(99, (1, 8)))


def test_torchs_attention_with_a_lazy_mask_is_rejected() -> None:
    q, k, v = qkv(nk=NQ)
    with pytest.raises(CallError, match="passes its mask to torch's attention"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=make_mask(2, NQ, NQ))


# In models.


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return switch(tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZE, **more})).eval())


def test_an_engine_by_name_runs_or_raises() -> None:
    register("lowtri-sdpa", engine="sdpa")
    model = switch(llama(), "lowtri-sdpa")
    ids = torch.randint(3, 99, (1, 8))
    model(ids)
    with pytest.raises(EngineError, match=r'engine "sdpa" cannot run this call(.|\n)*it does not return weights'):
        model(ids, output_attentions=True)


def test_weights_are_those_of_the_mask() -> None:
    model, ids = llama(), torch.randint(3, 99, (2, 9))
    pads = torch.ones_like(ids)
    pads[0, :3] = 0
    found = model(ids, attention_mask=pads, output_attentions=True).attentions
    assert len(found) == 2
    hidden = ~make_mask(2, 9, 9, attention_mask=pads.bool()).materialize()
    for weights in found:
        assert weights.shape == (2, 4, 9, 9)
        assert not weights.masked_select(hidden).any()  # exactly 0
        assert torch.allclose(weights.sum(-1)[1], torch.ones(4, 9))
    assert model(ids).attentions is None


def test_a_mask_by_hand_reaches_every_layer() -> None:
    model, ids = llama(), torch.randint(3, 99, (2, 9))
    visible = lowtri.mask("causal & window(3)").dense(9)
    tables = [torch.from_numpy(visible)[None, None].expand(2, 1, 9, 9)]
    tables += [torch.where(tables[0], 0.0, least) for least in (-torch.inf, LEAST)]
    answers = [model(ids, attention_mask=table).logits for table in tables]
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=tables[2]).logits
    for found in answers:
        torch.testing.assert_close(found, expected)


def test_sliding_caches_forget_and_the_tokens_are_the_same() -> None:
    torch.manual_seed(0)
    config = tf.MistralConfig(**SIZE, num_key_value_heads=2, sliding_window=8)
    model = tf.MistralForCausalLM(config).eval()
    for p in model.parameters():
        p.data.add_(0.15 * torch.randn_like(p))
    ids = torch.randint(3, 99, (2, 5))
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "no_repeat_ngram_size": 1}
    expected = model.generate(ids, **options)
    switch(model)
    for more in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert torch.equal(model.generate(ids, **options, **more), expected), more
    cache = cache_in(model(ids.repeat(1, 8), use_cache=True))
    assert cache.layers[0].keys.shape[2] == 7  # the window without the next token


def test_dropout_trains_in_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = llama(attention_dropout=0.5).train(), torch.randint(3, 99, (1, 9))
    with caplog.at_level(logging.WARNING, "lowtri.integrations.transformers"):
        one, two = (model(ids, labels=ids) for _ in range(2))
    assert not caplog.records
    assert not torch.equal(one.logits, two.logits)
    one.loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_t5_trains_its_position_bias() -> None:
    torch.manual_seed(0)
    size = {
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    model = tf.T5ForConditionalGeneration(tf.T5Config(**size, decoder_start_token_id=0))
    ids, pads = torch.randint(3, 99, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    pads[0, 8:] = 0
    found = {}
    for name in ("eager", "lowtri"):
        model.zero_grad()
        model.set_attn_implementation(name)
        model(ids, attention_mask=pads, labels=ids[:, :6].contiguous()).loss.backward()
        grads = [p.grad for n, p in model.named_parameters() if "relative_attention_bias" in n]
        found[name] = torch.cat([g.flatten() for g in grads])
    assert len(grads) == 2 and found["eager"].abs().max() > 1e-6
    torch.testing.assert_close(found["lowtri"], found["eager"], rtol=1e-4, atol=1e-8)


def test_all_layers_of_a_forward_share_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    read = door._lazy_mask
    monkeypatch.setattr(door, "_lazy_mask", lambda mask, *sizes: seen.append(mask) or read(mask, *sizes))
    llama(num_hidden_layers=3)(torch.randint(3, 99, (1, 9)))
    assert len(seen) == 3 and all(isinstance(one, LazyMaskTensor) for one in seen)
    assert len({id(one.lazy) for one in seen}) == 1


def test_a_dense_mask_made_in_inference_mode() -> None:
    with torch.inference_mode():  # torch does not count the changes of such tensors
        table = torch.ones(1, 1, NQ, NK, dtype=torch.bool)
        assert read_dense_mask(table, NQ, NK, torch.float32).lazy.mask == full()
        table[..., 0] = False
        assert read_dense_mask(table, NQ, NK, torch.float32).lazy.mask != full()


def test_a_table_that_does_not_fit_is_named_as_its_caller_names_it() -> None:
    with pytest.raises(CallError, match=r"^Attend: mask is \(3, 3\), but the layer has 2 queries and 4 keys"):
        read_dense_mask(torch.ones(3, 3, dtype=torch.bool), 2, 4, torch.float32, name=("Attend", "mask"))
    with pytest.raises(CallError, match=r"^transformers: attention_mask is torch.int64 \(2, 4\)"):
        read_dense_mask(torch.ones(2, 4, dtype=torch.int64), 2, 4, torch.float32)
