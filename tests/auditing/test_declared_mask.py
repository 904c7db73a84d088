"""A checkpoint of transformers is audited against the mask that its config declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from lowtri.auditing.loading import declared_mask, load_target
from lowtri.cli.main import main

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
MIXED, LOCAL = ["sliding_attention", "full_attention"], ["sliding_attention"] * 2


@pytest.mark.parametrize(
    ("name", "options", "mask"),
    [
        ("LlamaConfig", {}, ("causal", None)),
        ("MistralConfig", {"sliding_window": 16}, ("causal & window(16)", 2)),
        ("MistralConfig", {"sliding_window": None}, ("causal", None)),
        ("Qwen2Config", {"sliding_window": 8, "use_sliding_window": False}, ("causal", None)),
        ("Qwen2Config", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, ("causal", None)),
        (
            "Qwen2Config",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
            ("causal & window(8)", 2),
        ),
        ("Gemma3TextConfig", {"sliding_window": 8, "layer_types": MIXED}, ("causal", None)),
        ("Gemma3TextConfig", {"sliding_window": 8, "layer_types": LOCAL}, ("causal & window(8)", 2)),
        (
            "Gemma3Config",
            {"text_config": {**SIZES, "sliding_window": 8, "layer_types": LOCAL}},
            ("causal & window(8)", 2),
        ),
        (
            "Llama4TextConfig",
            {"attention_chunk_size": 4, "layer_types": ["chunked_attention"] * 2},
            ("causal & chunks(4)", 2),
        ),
        (
            "GPTNeoConfig",
            {"num_layers": 2, "attention_types": [[["local"], 2]], "window_size": 4},
            ("causal & window(4)", 2),
        ),
        (
            "GPTNeoConfig",
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
            ("causal", None),
        ),
    ],
)
def test_what_a_config_declares(name: str, options: dict[str, Any], mask: tuple[str, int | None]) -> None:
    sizes = {} if name == "Gemma3Config" else SIZES if name != "GPTNeoConfig" else {"hidden_size": 16, "num_heads": 2}
    assert declared_mask(getattr(transformers, name)(**sizes, **options)) == mask


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with a sliding window, and one whose config declares a window that its class does not have."""
    transformers.set_seed(0)
    root = tmp_path_factory.mktemp("models")
    models = {
        "right": transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=5)),
        "wrong": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
    file = root / "wrong" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sliding_window": 5}))
    return {name: root / name for name in models}


def test_a_folder_is_audited_against_its_window(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target(str(folders["right"]))
    assert (target.mask, target.arguments) == ("causal & window(5)", {"layers": 2})
    assert main(["audit", str(folders["right"])]) == 0
    assert (
        capsys.readouterr().out.partition("\n")[2].startswith("no leak found against causal & window(5) x 2 layers: ")
    )
    alone = [
        "--probes",
        "change",
    ]  # which mask the folder is held against shows in the first line, whatever else is tried
    assert main(["audit", str(folders["wrong"]), *alone]) == 1
    assert (
        capsys.readouterr()
        .out.partition("\n")[2]
        .startswith(
            "leak against causal & window(5) x 2 layers: position 9 sees position 0: changing input 0 moves output 9"
        )
    )
    assert main(["audit", str(folders["right"]), "--mask", "causal", *alone]) == 0
    assert capsys.readouterr().out.partition("\n")[2].startswith("no leak found against causal: ")


@pytest.mark.parametrize(
    ("kind", "mask"), [("Bert", "full"), ("MPNet", "full"), ("Llama", "causal"), ("Bloom", "causal")]
)
def test_an_encoder_is_held_against_both_directions(kind: str, mask: str, tmp_path: Path) -> None:
    """MPNet and Bloom have no flag in their attention; a base model without a head is no encoder for that."""
    transformers.set_seed(0)
    sizes = {**SIZES, "pad_token_id": 0, "n_layer": 1, "n_head": 2}
    transformers.AutoModel.from_config(getattr(transformers, f"{kind}Config")(**sizes)).save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert (target.mask, target.arguments) == (mask, {})
    assert main(["audit", str(tmp_path), "--probes", "change"]) == 0
