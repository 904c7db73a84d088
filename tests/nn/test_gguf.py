"""GGUF files written here from tiny models: the folder they become, its logits and its tokens; and files that are refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from lowtri.errors import DataError
from lowtri.nn import Decoder, DecoderConfig
from lowtri.nn.checkpoint import save
from lowtri.nn.config import GPT2Config
from lowtri.nn.gguf import converted
from lowtri.nn.positions import RopeScaling, rotary_frequencies
from rounding import with_rounding

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48}
TEXTS = ["the cat sat", "  two  spaces\n\n\tand a tab", "naïve 你好 🐈", "1234567 don't I'LL", "", " x<|end|>y"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOWTRI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZES, **options}))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.15 * torch.randn_like(weight)
    return model.eval()


def paired(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as a llama file has them: entry i of a head beside its partner i + D/2."""
    half = rows.shape[0] // heads // 2
    index = [h * 2 * half + i + part * half for h in range(heads) for i in range(half) for part in (0, 1)]
    return rows[index]


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def written(
    model: Decoder,
    path: Path,
    kind: str = "llama",
    *,
    quantised: gguf.GGMLQuantizationType | None = None,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file of a Decoder, as converters write it; quantised weights in the model are replaced by what is stored."""
    c, writer = model.config, gguf.GGUFWriter(path, kind)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_key_length(c.head_dim)
    for name, value in {**(fields or {}), **(tokenizer or {})}.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}[
                type(value)
            ](name, value)
    heads = {"self_attn.q_proj": c.num_attention_heads, "self_attn.k_proj": c.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        whole, end = name.rsplit(".", 1)
        layer, part = whole.split(".", 3)[2:] if whole.startswith("model.layers.") else (None, whole)
        values = paired(tensor, heads[part]) if kind == "llama" and part in heads else tensor
        own = NAMES[part] if layer is None else f"blk.{layer}.{NAMES[part]}"
        array, kept = values.numpy(), None
        if quantised is not None and array.ndim == 2:
            stored = gguf.quants.quantize(array, quantised)
            kept = torch.from_numpy(gguf.quants.dequantize(stored, quantised).copy())
            writer.add_tensor(f"{own}.{end}", stored, raw_dtype=quantised)
            if kind == "llama" and part in heads:
                order = paired(torch.arange(len(kept)), heads[part])
                kept = kept[order.argsort()]
            with torch.no_grad():
                tensor.copy_(kept)
        else:
            writer.add_tensor(f"{own}.{end}", array)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ids_of(n: int = 20) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (2, n), generator=torch.Generator().manual_seed(1))


def same_logits(model: Decoder, other: Decoder) -> bool:
    with torch.no_grad():
        ours, theirs = model(ids_of()), other(ids_of())
    assert ours.std() > 0.2
    return torch.equal(ours, theirs)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama with biases": ("llama", {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"qkv_bias": True, "rope_theta": 1e6}),
    "qwen3": ("qwen3", {"qk_norm": True, "head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("quantised", [None, "Q8_0", "Q4_1", "F16", "BF16"])
def test_a_file_gives_the_logits_of_the_model_it_was_written_from(
    case: str, quantised: str | None, tmp_path: Path
) -> None:
    kind, options = CASES[case]
    model = decoder(**options)
    stored = None if quantised is None else gguf.GGMLQuantizationType[quantised]
    path = written(model, tmp_path / "m.gguf", kind, quantised=stored)
    back = Decoder.from_pretrained(path)
    assert {weight.dtype for weight in back.parameters()} == {torch.float32}
    assert same_logits(model, back)


def test_the_rotary_scaling_of_llama_3_is_read_from_its_tensor(tmp_path: Path) -> None:
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    model = decoder(rope_theta=500000.0, rope_scaling=scaling, head_dim=64)
    slower = rotary_frequencies(64, 500000.0) / rotary_frequencies(64, 500000.0, scaling)
    assert 1 < (slower > 1).sum() < 31, "some pairs are slower"
    back = Decoder.from_pretrained(written(model, tmp_path / "m.gguf", tensors={"rope_freqs.weight": slower.numpy()}))
    assert back.config.rope_scaling == scaling
    assert same_logits(model, back)
    odd = {"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)}
    with pytest.raises(DataError, match=r"rope_freqs\.weight is not the scaling of Llama 3"):
        converted(written(model, tmp_path / "odd.gguf", tensors=odd))


def test_windows_and_linear_scaling(tmp_path: Path) -> None:
    for kind, options in (("llama", {}), ("qwen2", {"qkv_bias": True})):
        model = decoder(mask="causal & window(5)", rope_scaling=RopeScaling(2.0), **options)
        fields = {f"{kind}.attention.sliding_window": 5, f"{kind}.rope.scaling.type": "linear"}
        path = written(model, tmp_path / f"{kind}.gguf", kind, fields={**fields, f"{kind}.rope.scaling.factor": 2.0})
        back = Decoder.from_pretrained(path)
        assert (back.config.mask, back.config.rope_scaling) == ("causal & window(5)", RopeScaling(2.0))
        assert same_logits(model, back)


def test_gpt2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(
        GPT2Config(vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=128, tie_word_embeddings=True)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.15 * torch.randn_like(weight)
    state, c, writer = model.eval().state_dict(), model.config, gguf.GGUFWriter(tmp_path / "m.gguf", "gpt2")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_layer_norm_eps(c.rms_norm_eps)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {"up_proj": "ffn_up", "down_proj": "ffn_down"}
    for end in ("weight", "bias"):
        for layer in range(c.num_hidden_layers):
            of = f"model.layers.{layer}."
            qkv = torch.cat([state[f"{of}self_attn.{x}_proj.{end}"] for x in "qkv"])
            writer.add_tensor(f"blk.{layer}.attn_qkv.{end}", qkv.numpy())
            for ours, theirs in names.items():
                writer.add_tensor(f"blk.{layer}.{theirs}.{end}", state[f"{of}{ours}.{end}"].numpy())
        writer.add_tensor(f"output_norm.{end}", state[f"model.norm.{end}"].numpy())
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("position_embd.weight", state["model.embed_positions.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    back = Decoder.from_pretrained(tmp_path / "m.gguf")
    assert isinstance(back.config, GPT2Config) and same_logits(model, back)


# The cache


def test_a_file_is_converted_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, notes = written(decoder(), tmp_path / "m.gguf"), []
    folder = converted(path, notes.append)
    assert folder.parent == own_cache / "gguf" and folder.name.startswith("m-")
    assert notes == [f"converting m.gguf once, to {folder}"]
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    monkeypatch.setitem(sys.modules, "gguf", None)  # not needed any more
    assert converted(path, notes.append) == folder and len(notes) == 1
    assert [one.name for one in folder.parent.iterdir()] == [folder.name], "nothing is left beside it"


def test_a_replaced_file_is_converted_again(tmp_path: Path) -> None:
    model = decoder()
    first = converted(written(model, tmp_path / "m.gguf"))
    second = converted(written(decoder(num_hidden_layers=1), tmp_path / "m.gguf"))
    assert first != second and Decoder.from_pretrained(tmp_path / "m.gguf").config.num_hidden_layers == 1


def test_a_failed_conversion_leaves_no_files(tmp_path: Path, own_cache: Path) -> None:
    path = written(decoder(), tmp_path / "m.gguf", tensors={"blk.0.attn_rel_b.weight": np.ones(3, np.float32)})
    with pytest.raises(DataError, match=r"the tensor blk\.0\.attn_rel_b\.weight has no place in lowtri's Decoder"):
        converted(path)
    assert list((own_cache / "gguf").iterdir()) == []


# The tokenizer


def byte_level(cut: str = "gpt-2", begin: bool = True) -> tuple[dict[str, Any], Any]:
    """The fields of a byte-level tokenizer, and the tokenizer whose vocabulary and merges they hold."""
    from lowtri.training.corpus import learn

    made = learn([*TEXTS, "the cat sat on the mat"] * 3, 400)
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": cut}
    fields |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]]}
    fields["tokenizer.ggml.token_type"] = [3 if token.startswith("<|") else 1 for token in tokens]
    fields |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    return {**fields, "tokenizer.ggml.add_bos_token": begin}, made


@pytest.mark.parametrize("begin", [True, False])
def test_a_byte_level_tokenizer_is_restored(begin: bool, tmp_path: Path) -> None:
    fields, made = byte_level(begin=begin)
    model = Decoder.from_pretrained(written(decoder(), tmp_path / "m.gguf", tokenizer=fields))
    assert model.tokenizer is not None and model.config.eos_token_id == (1,)
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=begin).ids
        assert model.tokenizer.encode(text).ids == ids
        assert model.tokenizer.decode(ids) == made.decode(ids)


def test_the_pieces_of_each_pre_tokenizer(tmp_path: Path) -> None:
    from lowtri.nn.gguf import tokenizer_of

    cuts = {}
    for cut in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        tokenizer = tokenizer_of({**byte_level(cut)[0], "pre": "of something else"}, tmp_path)[0]
        assert tokenizer is not None
        text = "it's 12345\n\n  (x)!\n"
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        cuts[cut] = [text[start:stop] for _, (start, stop) in pieces]
        assert "".join(cuts[cut]) == text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert cuts["gpt-2"] == ["it", "'s", " 12345", "\n\n ", " (", "x", ")!", "\n"]
    assert cuts["smollm"] == ["it", "'s", " ", "1", "2", "3", "4", "5", "\n\n ", " (", "x", ")!", "\n"]
    assert cuts["qwen2"] == ["it", "'s", " ", "1", "2", "3", "4", "5", "\n\n", " ", " (", "x", ")!\n"]
    assert cuts["llama-bpe"] == ["it", "'s", " ", "123", "45", "\n\n", " ", " (", "x", ")!\n"]


def test_a_sentence_piece_tokenizer_merges_by_score(tmp_path: Path) -> None:
    from lowtri.nn.gguf import tokenizer_of

    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁catsh"]
    joined = {"at": -1.0, "▁c": -2.0, "ca": -3.0, "▁cat": -4.0, "hat": -5.0, "▁s": -6.0}
    tokens = [*letters, *joined]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-100.0] * len(letters) + list(joined.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer, config = tokenizer_of(fields, tmp_path)
    assert tokenizer is not None and config["bos_token"] == "<s>"
    found = tokenizer.encode("cat shat é")
    assert found.tokens == ["<s>", "▁cat", "▁s", "hat", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found.ids) == "cat shat é"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model 'bert'; lowtri reads gpt2 and llama"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre 'deepseek-llm'; lowtri knows gpt-2"),
    ],
)
def test_unknown_tokenizers_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    from lowtri.nn.gguf import tokenizer_of

    with pytest.raises(DataError, match=words):
        tokenizer_of({**byte_level()[0], **fields}, tmp_path)


def test_the_chat_template_is_converted(tmp_path: Path) -> None:
    from lowtri.nn.chat import chat_text

    fields = {**byte_level()[0], "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    folder = converted(written(decoder(), tmp_path / "m.gguf", tokenizer=fields))
    assert chat_text(folder, [{"role": "user", "content": "hi"}]) == "<|begin|>hi"


# Refusals


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("falcon", {}, r"general\.architecture 'falcon'; lowtri reads llama, qwen2, qwen3, gpt2"),
        (
            "llama",
            {"llama.expert_count": 8},
            r"llama\.expert_count 8, which lowtri's Decoder does not support",
        ),
        ("llama", {"llama.logit_scale": 0.5}, r"llama\.logit_scale 0\.5"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type 'yarn'; .* has none and linear"),
        ("llama", {"llama.rope.dimension_count": 8}, r"rope\.dimension_count 8; .* the head size 16 only"),
        ("llama", {"llama.attention.value_length": 32}, r"attention\.value_length 32; .* the head size 16 only"),
    ],
)
def test_unsupported_options_are_refused_by_name(kind: str, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        converted(written(decoder(), tmp_path / "m.gguf", kind, fields=fields))


def test_a_damaged_file_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(decoder(), tmp_path / "m.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"cut\.gguf is damaged or cut off: "):
        converted(cut)
    empty = gguf.GGUFWriter(tmp_path / "empty.gguf", "llama")
    empty.write_header_to_file()
    empty.write_kv_data_to_file()
    empty.write_tensors_to_file()
    empty.close()
    with pytest.raises(DataError, match=r"it has no token_embd\.weight, so it is not a language model"):
        converted(tmp_path / "empty.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DataError, match=r"the package gguf, which reads them, is not installed\.\nFix: pip install"):
        converted(whole)


def test_a_converted_folder_is_loaded_by_transformers_and_saved_again(tmp_path: Path) -> None:
    """transformers loads it, and lowtri saves it again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields, made = byte_level()
    folder = converted(written(decoder(vocab_size=400), tmp_path / "m.gguf", tokenizer=fields))
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder).eval(), Decoder.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("the cat").input_ids == made.encode("the cat").ids
    with torch.no_grad():
        expected, limit = with_rounding(lambda: theirs(ids_of()).logits, theirs.parameters(), terms=64)  # of a sum
        assert (ours(ids_of()) - expected).abs().max() <= limit
    save(ours, tmp_path / "again", ours.tokenizer)
    assert same_logits(ours, Decoder.from_pretrained(tmp_path / "again"))
    shutil.rmtree(folder)
