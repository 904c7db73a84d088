"""Audit every causal language model class of the installed transformers, each with a tiny random config.

    python benchmarks/audit_transformers.py --out out/audit-transformers.md            # all of them, some twenty minutes
    python benchmarks/audit_transformers.py --only mistral gemma2 --show               # a few, with their reports

Each model is made and audited in a process of its own with a time limit, on CPU, 24 positions, windows and chunks of 8, the
weights of a copy redrawn (standard deviation 0.15; fresh ones hide leaks). The table says clean, leak (with the pair and the
module), could not decide (why), or why no tiny model could be made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

POSITIONS = 24

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
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "layer_types": ["mamba", "hybrid"], "mamba_dt_rank": 4},
    "cohere_compass_text": {"num_hidden_layers": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gemma3n_text gemma4_text": {
        "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    },
    "reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_buckets": 4,
        "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}.items():  # fmt: skip
    for _type in _types.split():
        ALSO[_type] = ALSO.get(_type, {}) | _sizes


# Each leak of transformers 5.23.0, read in its source until it was understood. All are theirs; none is the audit's.
UNDERSTOOD = {
    "bamba": "told no position_ids, cached steps count from 0 again; `generate` passes them, so it is a warning",
    "cpmant": "by design: told no context length, it takes the whole input for context, which everyone may see",
    "falcon": "asked for weights, the sdpa path's boolean mask is added to the scores, where it hides nothing",
    "git": "text alone: beside a cache its padding mask is widened over image tokens that are not there, and shifts",
    "recurrent_gemma": "its recurrent blocks take the padding mask and do not use it: the convolution sees the pads",
    "reformer": "by design of LSH: tokens are sorted into buckets over the whole row, so later ones decide who meets whom",
    "rwkv": "takes a padding mask and does not use it, as its documentation says",
    "xlm": "by design: its config is not causal unless it says so",
    "xlnet": "by design: without a permutation mask everyone sees everyone",
    "moshi": "the cache keeps a window that the whole forward does not have",
    "nemotron_h": "the chunked scan keeps dt above time_step_min, the cached single step does not",
    "prophetnet": "the predicting stream flattens its relative positions in one order and reads them back in another, so that "
    "queries get the ones of other positions",
}


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


def audit_one(name: str, show: bool) -> dict[str, Any]:
    """One class: what the audit says of it."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import lowtri

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    class_name = class_name[0] if isinstance(class_name, (list, tuple)) else class_name
    result: dict[str, Any] = {"type": name, "class": class_name}
    try:
        config = tiny_config(transformers.AutoConfig.for_model(name).__class__)
        model_class = getattr(transformers, class_name)
        model = model_class(config if isinstance(config, model_class.config_class) else config.get_text_config()).eval()
    except Exception as error:
        return result | {"verdict": "not made", "why": first_line(error)}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    result["parameters"] = parameters
    if parameters > 200_000_000:
        return result | {"verdict": "not made", "why": f"{parameters:,} parameters are not tiny"}
    example = torch.randint(2, 99, (2, POSITIONS), generator=torch.Generator().manual_seed(1))
    try:
        report = lowtri.audit(model, example, vocab_size=99, redraw=True)
        if not report.decided and report.reason and "NaN" in report.reason:
            report = lowtri.audit(model, example, vocab_size=99)
            result["fresh"] = True
    except Exception as error:
        return result | {"verdict": "does not run", "why": first_line(error)}
    if show:
        print(report)
    found = report.first
    return result | {
        "verdict": {"no leak found": "clean"}.get(report.verdict, report.verdict),
        "why": "" if report.ok else report.message,
        "pair": [found.query, found.key] if found else None,
        "module": found.module if found else None,
        "leaking": {f.probe: f.message for f in report.findings if f.status == "leak"},
        "warnings": {f.probe: f.message for f in report.warnings if f.probe != "poison"},
        "skipped": {f.probe: f.message for f in report.findings if f.status == "skipped"},
        "seconds": round(report.seconds, 1),
    }


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:110]}"


def limited(name: str, show: bool, limit: float) -> dict[str, Any]:
    """`audit_one` in a process of its own that is ended when it takes too long."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        try:
            send.send(audit_one(name, show))
        except BaseException as error:
            send.send({"type": name, "verdict": "does not run", "why": f"{type(error).__name__}: {error}"[:120]})

    process = context.Process(target=work)
    process.start()
    if receive.poll(limit):
        try:
            result = receive.recv()
        except EOFError:
            result = {"type": name, "verdict": "does not run", "why": "the process ended"}
    else:
        result = {"type": name, "verdict": "does not run", "why": f"took longer than {limit:.0f} s"}
    process.terminate()
    process.join()
    return dict(result)


def table(results: list[dict[str, Any]], version: str) -> str:
    """The results as a Markdown table, leaks first."""
    order = {"leak": 0, "could not decide": 1, "clean": 2, "does not run": 3, "not made": 4}
    counts = {verdict: sum(r["verdict"] == verdict for r in results) for verdict in order}
    lines = [
        f"# lowtri audit of transformers {version}",
        "",
        ", ".join(f"{verdict} {count}" for verdict, count in counts.items() if count) + f"; {len(results)} in all.",
        "",
        "| type | class | verdict | pair | module | what |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (order[r["verdict"]], r["type"])):
        pair = "" if not r.get("pair") else f"({r['pair'][0]}, {r['pair'][1]})"
        leaking = "; ".join(f"{probe}: {message}" for probe, message in r.get("leaking", {}).items())
        warned = "; ".join(f"warning, {probe}: {message}" for probe, message in r.get("warnings", {}).items())
        understood = UNDERSTOOD.get(r["type"], "") if leaking or warned else ""
        what = "; ".join(part for part in (understood, leaking or r.get("why", ""), warned) if part).replace("|", "/")
        cells = (r["type"], r.get("class", ""), r["verdict"], pair, r.get("module") or "", what)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each model")
    parser.add_argument("--out", type=Path, help="write the table here, and .json beside it")
    parser.add_argument("--show", action="store_true", help="print each report")
    arguments = parser.parse_args()

    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import lowtri.auditing.audit  # noqa: F401 (once, before the processes part)

    results = []
    for name in arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started = time.monotonic()
        result = limited(name, arguments.show, arguments.limit)
        results.append(result)
        line = f"{name:28} {result['verdict']:17} {time.monotonic() - started:5.1f} s  {result.get('why', '')[:120]}"
        print(line, flush=True)
        if arguments.out:
            write(arguments.out, table(results, transformers.__version__), results)
    if not arguments.out:
        print(table(results, transformers.__version__))


def write(path: Path, text: str, results: list[dict[str, Any]]) -> None:
    """The table and the figures behind it, each written atomically."""
    from lowtri.files import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    for target, content in ((path, text), (path.with_suffix(".json"), json.dumps(results, indent=1))):
        write_text(target, content)


if __name__ == "__main__":
    main()
