"""The decoder: transformers' Llama with the same weights gives the same logits, and a cache changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rounding import with_rounding

import lowtri
from lowtri.errors import CallError, MaskError
from lowtri.nn import Decoder, DecoderConfig, GPT2Config

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}


def decoder(seed=0, **options):
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(**{**SIZES, "max_position_embeddings": 64, **options}))
    with torch.no_grad():  # larger weights than at the start of training, so that layers matter
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(8)
    return model.eval()


def ids_of(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, SIZES["vocab_size"], shape))


def logits_with_rounding(model, ids):
    """The logits, and how far rounding may move them: sums have at most 40 features or 60 keys."""

    def logits():
        output = model(ids)
        return getattr(output, "logits", output)

    return with_rounding(logits, model.parameters(), terms=60)


def llama_of(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    same = [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"]
    sizes = {name: getattr(model.config, name) for name in same}
    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    llama.load_state_dict(model.state_dict(), strict=True)
    return llama.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kv_heads", "head_dim", "theta"), [(4, None, 1e4), (2, 10, 5e5), (1, 6, 100.0)])
def test_transformers_llama_loads_it_and_gives_the_same_logits(tied, kv_heads, head_dim, theta):
    model = decoder(num_key_value_heads=kv_heads, head_dim=head_dim, rope_theta=theta, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    llama, ids = llama_of(model), ids_of((2, 40))
    with torch.no_grad():
        ours, (theirs, limit) = model(ids), logits_with_rounding(llama, ids)
        assert ours.abs().max() > 0.3, "logits that say something"
        assert (ours - theirs).abs().max() <= limit
        # The same for left padding: theirs by an attention mask, ours by places.
        valid = torch.ones(2, 40, dtype=torch.int64)
        valid[0, :9] = 0
        places = (valid.cumsum(1) - 1).masked_fill(valid == 0, -1)
        theirs = llama(ids, attention_mask=valid, position_ids=places.clamp(min=0)).logits
        assert (model(ids, positions=places) - theirs)[valid == 1].abs().max() <= limit


def test_gradients_are_those_of_llama():
    model = decoder(num_key_value_heads=2).double()
    llama, ids = llama_of(model).double(), ids_of((2, 12))
    model(ids).logsumexp(-1).sum().backward()
    llama(ids).logits.logsumexp(-1).sum().backward()
    theirs = dict(llama.named_parameters())
    for name, weight in model.named_parameters():
        size = float(weight.grad.abs().max())
        assert torch.allclose(weight.grad, theirs[name].grad, rtol=1e-5, atol=1e-5 * size), name


@pytest.mark.parametrize(
    "mask", ["causal", "causal & window(5)", "causal & (window(4) | first(2))", "causal & chunks(6)"]
)
@pytest.mark.parametrize("chunks", [[1] * 24, [9, 1, 1, 1, 12], [24]])
def test_a_cache_changes_nothing(mask, chunks):
    model, ids = decoder(num_key_value_heads=2, mask=mask), ids_of((2, 24))
    cache, parts, start = model.make_cache(2), [], 0
    with torch.no_grad():
        for size in chunks:
            parts.append(model(ids[:, start : start + size], cache=cache))
            start += size
        expected, limit = logits_with_rounding(model, ids)
        assert (torch.cat(parts, 1) - expected).abs().max() <= limit


def test_prompts_of_different_lengths_share_a_batch():
    model, lengths = decoder(num_key_value_heads=2, mask="causal & window(6)"), [9, 3, 6]
    rows = [ids_of((n + 8,), seed=n) for n in lengths]
    longest = max(lengths)
    ids, places = torch.zeros(3, longest, dtype=torch.int64), np.full((3, longest), -1)
    for b, n in enumerate(lengths):
        ids[b, longest - n :] = rows[b][:n]
        places[b, longest - n :] = np.arange(n)
    cache = model.make_cache(3)
    with torch.no_grad():
        found = [model(ids, positions=places, cache=cache)[:, -1]]
        for t in range(8):
            ids = torch.stack([row[n + t] for row, n in zip(rows, lengths, strict=True)])
            found.append(model(ids[:, None], cache=cache)[:, 0])
        for b, n in enumerate(lengths):
            alone, limit = logits_with_rounding(model, rows[b][None])
            for t in range(9):
                assert (found[t][b] - alone[0, n - 1 + t]).abs().max() <= limit, (b, t)


def test_packed_documents_do_not_see_one_another():
    model, one, two = decoder(), ids_of((1, 7), 1), ids_of((1, 9), 2)
    packed = lowtri.causal() & lowtri.documents(lengths=[7, 9])
    with torch.no_grad():
        both = model(torch.cat([one, two], 1), mask=packed)
        # Rotary embedding knows distances only, so a document may begin anywhere.
        limit = logits_with_rounding(model, torch.cat([one, two], 1))[1]
        assert (both - torch.cat([model(one), model(two)], 1)).abs().max() <= limit
        labels = np.array([[0] * 7 + [1] * 9, [0] * 16])
        rows = model(torch.cat([one, two], 1).expand(2, -1), mask=lowtri.causal() & lowtri.documents(labels))
        assert (rows[0] - both[0]).abs().max() <= limit
        assert (rows[1] - model(torch.cat([one, two], 1))[0]).abs().max() <= limit


def test_a_mask_for_each_head():
    model = decoder(mask="heads([causal, causal & window(2), causal & window(3), causal])")
    ids, cache = ids_of((2, 10)), model.make_cache(2)
    with torch.no_grad():
        steps = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(10)], 1)
        expected, limit = logits_with_rounding(model, ids)
        assert (steps - expected).abs().max() <= limit


def test_logits_to_keep():
    model, ids = decoder(), ids_of((2, 5))
    with torch.no_grad():
        assert model(ids, logits_to_keep=1).shape == (2, 1, 61)
        expected, limit = logits_with_rounding(model, ids)
        assert (model(ids, logits_to_keep=2) - expected[:, -2:]).abs().max() <= limit


def test_initial_weights_have_the_documented_deviations():
    model = Decoder(DecoderConfig(vocab_size=500, hidden_size=128, num_hidden_layers=8))
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert (layer.input_layernorm.weight == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model, ids = decoder(num_key_value_heads=2), ids_of((2, 9))
    with torch.no_grad():
        expected = model(ids).double()
        found = model.to(dtype)(ids)
    assert found.dtype == dtype
    bound = {torch.float16: 0.02, torch.bfloat16: 0.15, torch.float64: 2e-5}[dtype] * expected.abs().max()
    assert (found.double() - expected).abs().max() < bound


def test_a_cache_works_in_and_outside_of_inference_mode():
    model, ids = decoder(), ids_of((1, 6))
    cache = model.make_cache()
    with torch.inference_mode():
        first = model(ids[:, :3], cache=cache)
    rest = model(ids[:, 3:], cache=cache)  # with gradients on
    with torch.no_grad():
        expected, limit = logits_with_rounding(model, ids)
    assert (torch.cat([first, rest], 1) - expected).abs().max() <= limit


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it is a whole number, at least 1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; it is a whole number"),
        (
            {"hidden_size": 25},
            "hidden_size 25 is not a multiple of num_attention_heads 4. Fix: change one of them, or pass head_dim=",
        ),
        ({"head_dim": 5}, "head_dim is 5, but rotary embedding rotates entries in pairs. Fix: an even head_dim"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"rope_theta": 0.0}, "rope_theta 0.0; the first is at least 0, the second above 0"),
        (
            {"rope_layers": (True, False)},
            "rope_layers has 2 entries, but there are 3 layers. Fix: one bool for each",
        ),
        ({"mask": "heads([causal, full])"}, r"has batch \(1, 2\), but a model has 4 heads"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(options, words):
    with pytest.raises(CallError, match=words):
        DecoderConfig(**{**SIZES, **options})


def test_the_mask_of_a_config_is_text():
    assert DecoderConfig(**SIZES, mask=lowtri.causal() & lowtri.window(3)).mask == "causal & window(3)"
    with pytest.raises(MaskError):
        DecoderConfig(**SIZES, mask="casual")
    with pytest.raises(MaskError):
        DecoderConfig(**SIZES, mask=lowtri.keys([True, False]))  # holds an array: no file could keep it


def full_cache(model):
    cache = model.make_cache()
    model(ids_of((1, 8)), cache=cache)
    return cache


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(ids_of((1, 9))), r"the last position is 8, but the context has 8 positions \(0 .. 7\)"),
        (
            lambda m: m(ids_of((1, 2)), positions=[7, 8]),
            "Fix: keep the last 8 ids, or a model with a larger max_position_",
        ),
        (lambda m: m(ids_of((1, 1)), cache=full_cache(m)), "the last position is 8"),
        (lambda m: m(ids_of((3,))), r"ids are \(3,\) torch.int64; expected \(B, N\) int64.\nFix: ids\[None\]"),
        (lambda m: m(torch.tensor([[5, 61]])), "ids reach from 5 to 61, but the vocabulary has"),
        (
            lambda m: m(ids_of((1, 1)), cache=m.make_cache(), mask="full"),
            r"mask full .* causal.\nFix: make_cache\(batch_",
        ),
        (lambda m: m.make_cache(0), "batch_size is 0"),
        (
            lambda m: m.make_cache(3, mask=lowtri.keys([[True], [False]])),
            r"batch_size is 3, and the mask .* has batch \(2,",
        ),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, words):
    with pytest.raises(CallError, match=words):
        call(decoder(max_position_embeddings=8))


def test_a_model_made_on_the_meta_device_is_initialised_like_any_other() -> None:
    config = DecoderConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Decoder(config)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(3)
    model.init_weights()
    other = Decoder(config)
    torch.manual_seed(3)
    other.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 0.015 < model.lm_head.weight.std() < 0.025 and (model.model.norm.weight == 1).all()


@pytest.mark.parametrize("kind", [DecoderConfig, GPT2Config])
def test_a_function_in_the_place_of_attention(kind: type[DecoderConfig]) -> None:
    model = Decoder(kind(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
    ids, calls = torch.arange(12).reshape(2, 6), []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any) -> Any:
        calls.append(options["q_positions"])
        return lowtri.attention(q, k, v, mask, **options)

    assert torch.equal(model(ids, positions=np.arange(6), attend=attend), model(ids, positions=np.arange(6)))
    assert len(calls) == 2 and all((positions == np.arange(6)).all() for positions in calls)
