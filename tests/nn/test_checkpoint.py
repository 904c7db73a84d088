"""Folders in Llama's layout: what transformers computes from them, what comes back, and what is refused in which words."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtri.errors import DataError
from lowtri.files import write_atomically
from lowtri.nn import Decoder, DecoderConfig, GPT2Config
from lowtri.nn.checkpoint import load, save
from lowtri.nn.hf_config import from_json, to_json
from lowtri.training.corpus import learn
from rounding import with_rounding

TEXTS = ["the cat sat on the mat", "  two  spaces\n\n\tand a tab", "naïve 你好 สวัสดี 🐈", "", " ", "1234567 don't"]


def small(mask: str = "causal", **sizes: Any) -> Decoder:
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = DecoderConfig(**{"vocab_size": 300, "max_position_embeddings": 64, **shape, **sizes}, mask=mask)
    model = Decoder(config)
    with torch.no_grad():
        for weight in model.parameters():  # fresh norms are all ones, and fresh logits nearly equal: neither would tell
            weight += 0.2 * torch.randn_like(weight)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return learn([*TEXTS, "the cat sat on the mat and the cat sat"] * 3, 290)


@pytest.mark.parametrize(
    ("mask", "model_type"),
    [
        ("causal", "llama"),
        ("causal & window(5)", "mistral"),
        ("window(5) & causal", "mistral"),
        ("window(5)", "mistral"),
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": True}, {"head_dim": 16, "rope_theta": 500.0}])
def test_transformers_computes_the_same_logits(
    mask: str, model_type: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = small(mask, **sizes)
    save(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.model_type == model_type
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours_out, (theirs_out, limit) = model(ids), with_rounding(lambda: theirs(ids).logits, theirs.parameters(), 64)
    assert ours_out.std() > 0.5
    assert (ours_out - theirs_out).abs().max() <= limit


def test_sliding_window_counts_the_query_itself_in_both_libraries(tmp_path: Path) -> None:
    """A window one key longer or shorter gives other logits, so the test above can fail."""
    ids = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        five, six = (small(f"causal & window({n})")(ids) for n in (5, 6))
    assert (five - six).abs().max() > 1e-2


@pytest.mark.parametrize("mask", ["causal", "causal & window(5)"])
def test_transformers_reads_the_same_tokens(mask: str, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save(small(mask), tmp_path, tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    assert theirs.model_max_length == 64


@pytest.mark.parametrize("mask", ["causal", "full", "causal & (window(3) | first(2))", "chunks(4) | causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_restores_every_bit_that_was_saved(
    mask: str, dtype: torch.dtype, tokenizer: Any, tmp_path: Path
) -> None:
    model = small(mask, tie_word_embeddings=True).to(dtype)
    save(model, tmp_path, tokenizer)
    back, its_tokenizer = load(tmp_path)
    assert back.config == replace(model.config, eos_token_id=(1,)), "the tokenizer's own end"
    assert not back.training
    assert its_tokenizer is not None and its_tokenizer.to_str() == tokenizer.to_str()
    for name, weight in model.state_dict().items():
        assert back.state_dict()[name].dtype == dtype
        assert torch.equal(back.state_dict()[name], weight), name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_mask_unknown_to_transformers_is_saved_as_text(tmp_path: Path) -> None:
    save(small("causal & (window(3) | first(2))"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and "sliding_window" not in config
    assert config["lowtri_mask"] == "causal & (window(3) | first(2))"
    assert load(tmp_path)[1] is None


def test_a_folder_written_by_transformers_is_loaded(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    shape = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    more = dict(num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    ids = torch.arange(20)[None]
    for theirs in (
        LlamaForCausalLM(LlamaConfig(**shape, **more)),
        MistralForCausalLM(MistralConfig(**shape, **more, sliding_window=4)),
    ):
        theirs.eval().save_pretrained(tmp_path)
        ours, _ = load(tmp_path)
        assert ours.config.rope_theta == 700.0
        with torch.no_grad():
            expected, limit = with_rounding(lambda: theirs(ids).logits, theirs.parameters(), 48)  # noqa: B023
            assert (ours(ids) - expected).abs().max() <= limit


def broken(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (
            lambda f: (f / "config.json").unlink(),
            "has no config.json: it is not a checkpoint, or not a finished one",
        ),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read: Expecting property name"),
        (
            lambda f: (f / "config.json").write_text("[]"),
            "config.json holds a list; expected an object: {...}",
        ),
        (
            lambda f: (f / "config.json").write_text("{}"),
            "model_type None; lowtri's Decoder reads llama, mistral, qwen2, qwen3, smollm3, gpt2",
        ),
        (lambda f: broken(f, model_type="bert"), "model_type 'bert'; lowtri's Decoder reads llama, mistral"),
        (lambda f: broken(f, vocab_size="gone"), "does not describe a decoder: .*vocab_size"),
        (lambda f: broken(f, hidden_size=-4), "does not describe a decoder: DecoderConfig: hidden_size is -4"),
        (lambda f: broken(f, lowtri_mask="causl"), "does not describe a decoder: .*causl"),
        (lambda f: broken(f, attention_bias=True), "q_proj.bias|k_proj.bias.*the file has nothing"),
        (lambda f: broken(f, rope_parameters={"rope_type": "llama3"}), "a decoder: 'factor' is missing"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors: training is not finished"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x01\x02"), "model.safetensors is damaged: "),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "model.safetensors is damaged: ",
        ),
        (
            lambda f: broken(f, vocab_size=299),
            r"do not fit together at lm_head.weight:\n  the config asks for \(299, 48\), the file has \(300, 48\)",
        ),
        (lambda f: broken(f, num_hidden_layers=1), r"fit together at model.layers.1.* asks for nothing, the file has"),
        (lambda f: broken(f, num_hidden_layers=3), r"fit together at model.layers.2.*, the file has nothing"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer: "),
    ],
)
def test_the_error_of_a_damaged_folder_names_folder_and_fault(
    harm: Any, words: str, tokenizer: Any, tmp_path: Path
) -> None:
    import re

    save(small(), tmp_path, tokenizer)
    harm(tmp_path)
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_file_is_refused_where_a_folder_is_expected(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"is not a folder: a checkpoint is a folder with config\.json and model\.safetensors"
    ):
        load(tmp_path / "nothing")


def test_files_are_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, lambda beside: beside.write_text("old"))

    def fails(beside: Path) -> None:
        beside.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fails)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save(small(), tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o644}


@pytest.mark.parametrize("sizes", [{"head_dim": 16}, {"num_key_value_heads": 2}, {"hidden_size": 30, "head_dim": 8}])
def test_a_gpt2_that_config_json_cannot_describe_is_not_saved(sizes: dict[str, int], tmp_path: Path) -> None:
    """transformers has no key for these, so they would be lost."""
    model = Decoder(
        GPT2Config(50, **{"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 16} | sizes)
    )
    with pytest.raises(DataError, match=r"save: .*head_dim .*num_key_value_heads .*\nFix: GPT2Config without head_dim"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_gpt2_does_not_have_neither_stops_writing_nor_reading_it(tmp_path: Path) -> None:
    config = GPT2Config(50, 32, 128, num_hidden_layers=1, max_position_embeddings=16, rope_layers=(True,))
    content = to_json(config) | {"rope_scaling": "none", "rope_parameters": {"partial_rotary_factor": 0.5}}
    assert from_json(content, tmp_path) == replace(config, rope_layers=None)
