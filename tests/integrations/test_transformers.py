"""Two dozen architectures of transformers, switched over: the outputs, gradients and tokens that eager gives.

Equal means: equal to rounding, by how far eager's own output moves when each weight becomes the next number up or down.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
from rounding import with_rounding
from torch import Tensor

from lowtri.integrations.transformers import register

register()
register("lowtri-cpu", engine="cpu")  # the kernels, which "auto" leaves alone where a call is as small as here
register("lowtri-formula", engine="formula")
ENGINES = ("lowtri", "lowtri-cpu", "lowtri-formula")

PLACES = 24
LLAMA: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {**LLAMA, "sliding_window": 8}
TWO = ["sliding_attention", "full_attention"]
BERT = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "head_dim")}
BART = {
    **{"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
T5 = {
    **{"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "relative_attention_num_buckets": 8},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)),
    "mistral, sliding": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SLIDING)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**LLAMA)),
    "gemma2, softcap, alternating": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**SLIDING, layer_types=TWO, attn_logit_softcapping=2.0)
    ),
    "gemma3, alternating": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SLIDING, layer_types=TWO)),
    "gpt_oss, sinks": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**SLIDING, layer_types=TWO, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE)
    ),
    "llama4, chunked": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**LLAMA, attention_chunk_size=8, intermediate_size_mlp=64, num_local_experts=2)
    ),
    "deepseek_v3, value heads of another size": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(
            **{**LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
            **{"topk_group": 1, "moe_intermediate_size": 32},
        )
    ),
    "deepseek_v32, chosen keys": lambda: tf.DeepseekV32ForCausalLM(
        tf.DeepseekV32Config(
            **{**LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
            **{"topk_group": 1, "moe_intermediate_size": 32, "index_topk": 6, "index_n_heads": 2, "index_head_dim": 16},
        )
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{k: v for k, v in LLAMA.items() if k != "head_dim"})),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            **{"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
        )
    ),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**{**BERT, "ffn_dim": 64, "word_embed_proj_dim": 32})),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**BERT)),
    "modernbert, windows on both sides": lambda: tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(**BERT, local_attention=8, cls_token_id=1, sep_token_id=2)
    ),
    "t5, position bias": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
    "umt5, a bias for each layer": lambda: tf.UMT5ForConditionalGeneration(tf.UMT5Config(**T5)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
    "vit": lambda: tf.ViTModel(
        tf.ViTConfig(
            image_size=32,
            patch_size=8,
            **{k: BERT[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
        )
    ),
}
WITH_TEXT = [name for name in MODELS if name != "vit"]
DECODERS = [name for name in WITH_TEXT if name.split(",")[0] not in ("bert", "modernbert", "vit")]


@cache
def model_of(name: str) -> Any:
    """A tiny model with weights large enough that a mask that is wrong is seen."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model


def inputs_of(name: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}
    found = {"input_ids": torch.randint(3, 99, (3, PLACES), generator=draw)}
    if model_of(name).config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.randint(3, 99, (3, 12), generator=draw)
    return found


def padding(side: str) -> Tensor:
    pads = torch.ones(3, PLACES, dtype=torch.long)
    if side == "left":
        pads[0, :7], pads[2, :1] = 0, 0
    elif side == "right":
        pads[1, -5:] = 0
    return pads


def answer(model: Any, implementation: str, inputs: dict[str, Tensor], keep: Tensor | None) -> Tensor:
    model.set_attn_implementation(implementation)
    out = model(**inputs)[0]
    return out if keep is None else out[keep]


def gradients(model: Any, implementation: str, inputs: dict[str, Tensor], keep: Tensor | None) -> Tensor:
    model.zero_grad()
    out = answer(model, implementation, inputs, keep)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_is_the_same(name: str, side: str) -> None:
    model, inputs = model_of(name), inputs_of(name)
    keep = None
    if side != "none":
        if name == "vit":
            return
        inputs["attention_mask"] = padding(side)
        keep = None if "decoder_input_ids" in inputs else padding(side).bool()
    with torch.no_grad():
        expected, allowed = with_rounding(lambda: answer(model, "eager", inputs, keep), model.parameters(), terms=64)
        assert 0 < allowed < 1e-3 * expected.abs().max()
        for engine in ENGINES:
            assert (answer(model, engine, inputs, keep) - expected).abs().max() <= allowed, engine


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_the_same(name: str) -> None:
    model, inputs, keep = model_of(name), inputs_of(name), None
    if name in WITH_TEXT:
        inputs["attention_mask"] = padding("left")
        keep = None if "decoder_input_ids" in inputs else padding("left").bool()
    expected, allowed = with_rounding(lambda: gradients(model, "eager", inputs, keep), model.parameters(), terms=64)
    assert 0 < allowed < 1e-3 * expected.abs().max()
    for engine in ENGINES:
        assert (gradients(model, engine, inputs, keep) - expected).abs().max() <= allowed, engine


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "left-padded": {"attention_mask": padding("left")},
    "static cache": {"attention_mask": padding("left"), "cache_implementation": "static"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", DECODERS)
def test_it_generates_the_same(name: str, how: str) -> None:
    model, ids = model_of(name), inputs_of(name)["input_ids"]
    found = {}
    for implementation in ("eager", *(ENGINES if how == "left-padded" else ENGINES[:1])):
        model.set_attn_implementation(implementation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns of its own settings
            found[implementation] = model.generate(
                ids, max_new_tokens=10, min_new_tokens=10, no_repeat_ngram_size=1, do_sample=False, **HOW[how]
            )
    expected = found.pop("eager")
    assert len(expected.unique()) > 8
    for engine, tokens in found.items():
        assert torch.equal(tokens, expected), engine
