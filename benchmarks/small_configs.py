"""Small sizes for the configs of transformers: the two benchmarks of its models share them."""

from __future__ import annotations

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
