"""Small sizes for the configs of transformers: the two benchmarks of its models share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Sizes by the names that configs use for them; a config takes those that it knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "model_dim", "embed_dim", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_selected_experts", "topk_group", "n_group"), 2),
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 99),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 128),
    **dict.fromkeys(("sliding_window", "attention_window", "local_window_size", "window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "chunk_length"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "type_vocab_size": 1,
    "is_decoder": True,
    "use_cache": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "add_cross_attention": False,
}  # fmt: skip

# What a model type needs besides, found by reading its error message.
ALSO: dict[str, dict[str, Any]] = {}
for _types, _sizes in {
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa": {"num_key_value_heads": 4},
    "dots3_note_text longcat_flash minicpm3 youtu": {"num_key_value_heads": 4},
    "kimi_linear": {"num_key_value_heads": 4, "num_hidden_layers": 5},
    "bamba granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    },
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "codegen gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense hunyuan_v1_moe ministral": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "qwen3_next qwen3_5_text qwen3_5_moe_text qwen4_exp_text": {"num_hidden_layers": 4},
    "bailing_hybrid": {"num_key_value_heads": 4, "num_hidden_layers": 6, "num_expert_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"num_hidden_layers": 5},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "zamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
    },
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "xlstm": {"qk_dim_factor": 1.0},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "musicgen_decoder musicgen_melody_decoder": {"num_codebooks": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gemma3n_text gemma4_text": {
        "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    },
    "reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 4,
        "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}.items():  # fmt: skip
    for _type in _types.split():
        ALSO[_type] = ALSO.get(_type, {}) | _sizes


def tiny_config(config_class: Any) -> Any:
    """The class's own defaults with every known size made small, in its text part as well."""
    default = config_class()
    known = set(default.to_dict()) | set(getattr(config_class, "attribute_map", {}))
    also = ALSO.get(config_class.model_type, {})
    chosen = {name: value for name, value in SMALL.items() if name in known}
    # A size that the class sets to None or switches off is left so.
    given = default.to_dict()
    for name in (
        "sliding_window",
        "n_group",
        "topk_group",
        "q_lora_rank",
        "head_dim",
        "attention_chunk_size",
        "n_inner",
    ):
        if name in chosen and given.get(name) is None:
            chosen.pop(name)
    for name in ("n_group", "topk_group"):
        if name in chosen:
            chosen[name] = 1
    for name, value in given.items():  # token ids beyond the small vocabulary
        if name.endswith("_token_id") and isinstance(value, int) and value >= 99:
            chosen[name] = 1
    for name in ("text_config", "decoder", "language_config"):
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict"):
            chosen[name] = tiny_config(type(part)).to_dict()
    chosen.update(also)
    return config_class(**chosen)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:110]}"


VISION: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_channels": 3, "in_channels": 3, "in_chans": 3, "depth": 2, "embed_dim": 32,
    "num_heads": 4, "out_hidden_size": 32, "projection_dim": 32, "num_frames": 4, "temporal_patch_size": 2,
    "num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 64, "num_query_tokens": 4, "num_queries": 4,
    "projector_hidden_size": 32, "encoder_embed_dim": 32, "decoder_hidden_size": 32, "feature_size": 16, "mlp_dim": 64,
    "fused_hidden_size": 32, "vision_feature_layer": -1, "vision_hidden_size": 32, "text_hidden_size": 32,
    "encoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64,
}  # fmt: skip


def small(config_class: Any, way: dict[str, Any]) -> Any:
    """A config whose known sizes are small, in its parts as well; ``way`` says what is tried besides."""
    default = config_class()
    given = default.to_dict()
    known = set(given) | set(getattr(config_class, "attribute_map", {}))
    also = ALSO.get(config_class.model_type, {}) | MORE.get(config_class.model_type, {})
    chosen: dict[str, Any] = {}
    for name, value in {**VISION, **SMALL, **way.get("sizes", {})}.items():
        if name not in known or name in way.get("without", ()) or name not in way.get("only", (name,)):
            continue
        absent = None if name in given else way.get("open", False) or getattr(default, name, None)
        before = given.get(name, absent)
        if name != "pad_token_id" and before is None and not way.get("open"):
            continue  # a size that the class leaves open, or switches off, is left so
        chosen[name] = [value] * len(before) if isinstance(before, (list, tuple)) else value
    for name, value in given.items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= 99:
            chosen[name] = 1
        if name in ("n_group", "topk_group"):
            chosen[name] = 1
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
            chosen[name] = value | {"mrope_section": way.get("mrope", [2, 1, 1])}
        if name == "rope_parameters" and config_class.model_type.startswith(MROPE):  # and is not in its defaults
            base = value if isinstance(value, dict) else {"rope_type": "default", "rope_theta": 1e4}
            chosen[name] = base | {"mrope_section": way.get("mrope", [2, 1, 1])}
    chosen.update(also)
    chosen |= {name: value for name, value in way.get("sizes", {}).items() if name in known}
    layers = next((chosen[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in chosen), None)
    before = next((given[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in given), None)
    for name, value in given.items():  # one entry a layer
        if name not in also and isinstance(value, list) and layers and len(value) == before and name not in VISION:
            kinds = [v for i, v in enumerate(value) if v not in value[:i]] if name == "layer_types" else value
            chosen[name] = (kinds * layers)[:layers]
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict") and name not in also:
            chosen[name] = small(type(part), way).to_dict()
    return config_class(**chosen)


# What a type needs besides what the audit's table knows, found by reading its error message.
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
_RESNET |= {"out_features": ["stage2", "stage3", "stage4"]}
_BACKBONE = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
MORE: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 99},
    "chameleon": {"vocabulary_map": {"<image>": 1}},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 1, "<image>": 1}},
    "ernie4_5_vl_moe_text": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "cohere_compass_text": {"num_hidden_layers": 4, "layer_types": None},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8, "hidden_size": 32}},
    "dia": {
        "delay_pattern": [0, 1, 2],
        "decoder_config": {"num_channels": 3, "hidden_size": 32, "num_hidden_layers": 2},
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "kimi_linear": {"num_hidden_layers": 4},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},  # the outer ones are convolutions
    "lw_detr": {"num_windows": 4},
    "nemo_speechlm_audio": {"chunk_right_context": 2},
    **{
        kind: _BACKBONE
        | {"backbone_config": _RESNET | ({"out_features": ["stage4"]} if kind != "deformable_detr" else {})}
        for kind in ("detr", "conditional_detr", "deformable_detr", "table-transformer")
    },
}

MROPE = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_5_omni_text",
    "glm4v",
    "glm46v",
    "glm_ocr",
    "glmga",
    "glm_image",
    "paddleocr",
)

SHRINK = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
    "vocab_size",
)
HEADS = {"num_key_value_heads": 4, "decoder_num_key_value_heads": 4, "encoder_num_key_value_heads": 4}
WAYS: list[dict[str, Any]] = [
    {},
    {"sizes": HEADS},
    {"without": ("head_dim",)},
    {"sizes": HEADS | {"head_dim": 8, "num_experts_per_tok": 2}, "open": True},
    {"sizes": {"hidden_size": 64, "head_dim": 16}, "mrope": [4, 2, 2]},
    {"mrope": [1, 1, 0]},
    {"sizes": {"hidden_size": 64, "head_dim": 16}, "mrope": [2, 1, 1]},
    {
        "sizes": HEADS,
        "without": ("chunk_length", "chunk_size", "head_dim", "num_mel_bins", "feature_size", "in_channels"),
    },
    {"only": SHRINK},
]


def configs_of(config_class: Any) -> Iterator[Any]:
    """The class's config made small in several ways, the smallest first; for one that cannot be made, the trouble."""
    for way in WAYS:
        try:
            yield small(config_class, way)
        except Exception as error:
            yield error
