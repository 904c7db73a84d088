"""Folders of lowtri's own models: what comes back, what is on disk, and what is refused in which words."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lowtri.errors import DataError, MaskError
from lowtri.nn import Decoder, DecoderConfig, GPT2Config, RecurrentLM
from lowtri.nn.positions import RopeScaling

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": DecoderConfig(**SIZES),
    "tied": DecoderConfig(**SIZES, tie_word_embeddings=True, eos_token_id=(2, 5)),
    "window": DecoderConfig(**SIZES, mask="causal & (window(3) | first(2))", num_key_value_heads=1),
    "full": DecoderConfig(**SIZES, mask="full", qkv_bias=True, qk_norm=True),
    "scaled": DecoderConfig(**SIZES, rope_scaling=RopeScaling(4.0), rope_layers=(True, False)),
    "llama 3": DecoderConfig(**SIZES, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32), o_bias=True, mlp_bias=True),
    "gpt2": GPT2Config(**SIZES, max_position_embeddings=16),
    "gpt2 with sizes of its own": GPT2Config(**SIZES, head_dim=10, num_key_value_heads=1, tie_word_embeddings=True),
}


def decoder(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIGS[kind]).to(dtype)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loading_restores_every_bit_that_was_saved(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = decoder(kind, dtype)
    model.save(tmp_path / "new" / "folder")
    back = Decoder.load(tmp_path / "new" / "folder")
    assert back.config == model.config and type(back.config) is type(model.config)
    assert same_weights(model, back) and not back.training
    ids = torch.randint(30, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(back(ids), model.eval()(ids))
    tied = model.config.tie_word_embeddings
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "new" / "folder" / "model.safetensors")) == (not tied)
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_a_recurrent_model_comes_back(cell: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = RecurrentLM(30, 16, cell=cell, tie_word_embeddings=tied)
    model.save(tmp_path)
    back = RecurrentLM.load(tmp_path)
    assert back.config == model.config and same_weights(model, back) and not back.training
    assert (back.lm_head.weight is back.embed_tokens.weight) == tied


def test_the_config_is_strict_json_with_the_masks_text(tmp_path: Path) -> None:
    for kind in CONFIGS:
        decoder(kind).save(tmp_path)
        content = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
        assert content["model_type"] == "lowtri_decoder" and content["mask"] == CONFIGS[kind].mask
    RecurrentLM(30, 16).save(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["model_type"] == "lowtri_recurrent" and content["cell"] == "lstm" and content["mask"] == "causal"


def test_the_mask_is_replaced_when_loading(tmp_path: Path) -> None:
    decoder().save(tmp_path)
    narrow = Decoder.load(tmp_path, mask="causal & window(2)")
    assert narrow.config.mask == repr(narrow.mask) == "causal & window(2)"
    ids = torch.arange(9)[None]
    assert not torch.allclose(narrow(ids), Decoder.load(tmp_path)(ids))
    with pytest.raises(MaskError, match="causl"):
        Decoder.load(tmp_path, mask="causl")


def test_a_failed_save_leaves_the_files_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder().save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(DataError, match=r"save: .* cannot be written: No space left on device. Fix: free some space"):
        decoder().save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"save: .*file cannot be written: File exists"):
        decoder().save(tmp_path / "file")


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        decoder().save(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o644}


def edited(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of config.json; ``...`` removes one."""

    def harm(folder: Path) -> None:
        path = folder / "config.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))

    return harm


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def weights(**changes: Any) -> Callable[[Path], None]:
    """Replaces tensors of the file; ``...`` removes one."""

    def harm(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not ...}, path)

    return harm


HUGE = 2**60


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json. Fix: a folder with config.json and model.safe"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors, which is written last. Fix: save"),
        (written("config.json", b"{"), "config.json cannot be read: Expecting .*. Fix: the file as it was saved"),
        (written("config.json", b"\xff\xfe{"), "config.json cannot be read: "),
        (written("config.json", b"[" * 10**5), "config.json cannot be read: "),
        (written("config.json", b"[]"), "config.json holds a list; expected an object. Fix:"),
        (written("config.json", b" " * 2**20 + b"{}"), "config.json cannot be read: "),
        (written("model.safetensors", b"\x01\x02"), "model.safetensors is damaged: .*. Fix: save the model again"),
        (written("model.safetensors", b"\xff" * 100), "model.safetensors is damaged: "),
        (edited(model_type="llama"), "model_type is 'llama'; expected 'lowtri_decoder'.\nFix: Decoder.load or Recur"),
        (edited(model_type="lowtri_recurrent"), "model_type is 'lowtri_recurrent'; expected 'lowtri_decoder'"),
        (edited(model_type=...), "model_type is None; expected"),
        (edited(config_class="RecurrentConfig"), "config_class is 'RecurrentConfig', which is none of lowtri.nn"),
        (edited(config_class=["GPT2Config"]), "config_class is .*. Fix: a newer lowtri"),
        (edited(**{"new\x1b[31m": 1}), r"new\?\[31m is unknown to this lowtri. Fix: a newer lowtri"),
        (edited(vocab_size=...), "does not describe a model: .*vocab_size.*. Fix: the file as it was saved"),
        (edited(hidden_size=-4), "does not describe a model: DecoderConfig: hidden_size is -4"),
        (edited(hidden_size="16"), "does not describe a model: DecoderConfig: hidden_size is '16'"),
        (edited(mask="causl"), "does not describe a model: .*causl"),
        (edited(mask="__import__('os')"), "does not describe a model: "),
        (edited(rope_scaling={"factor": 0.5}), "does not describe a model: RopeScaling: factor is 0.5"),
        (edited(rope_scaling={"no": 1}), "does not describe a model: "),
        (edited(rope_scaling=4), "does not describe a model: "),
        (edited(eos_token_id=[[1]]), "does not describe a model: "),
        (edited(rope_layers=3), "does not describe a model: "),
        (edited(vocab_size=2**31), f"do not fit together: vocab_size is {2**31}"),
        (edited(vocab_size=HUGE), f"does not describe a model: DecoderConfig: vocab_size is {HUGE}"),
        (edited(num_hidden_layers=65_536), f"do not fit together: num_hidden_layers is {65_536}"),
        (edited(num_hidden_layers=HUGE), f"does not describe a model: DecoderConfig: num_hidden_layers is {HUGE}"),
        (edited(intermediate_size=2**31), f"do not fit together: intermediate_size is {2**31}"),
        (edited(intermediate_size=HUGE), f"does not describe a model: DecoderConfig: intermediate_size is {HUGE}"),
        (edited(num_hidden_layers=1), "fit together at model.layers.1.*\n.*asks for nothing, the file has"),
        (
            edited(num_hidden_layers=3),
            "fit together at model.layers.2.*\n.*, the file has nothing.\nFix: both files from",
        ),
        (edited(vocab_size=29), r"at lm_head.weight:\n  the config asks for \(29, 16\), the file has \(30, 16\)"),
        (edited(tie_word_embeddings=True), "at lm_head.weight:\n  the config asks for nothing"),
        (edited(config_class="GPT2Config"), "do not fit together at "),
        (weights(lm_head__weight=...), "fit together at lm_head.weight:\n.*the file has nothing"),
        (weights(extra=torch.zeros(2)), r"fit together at extra:\n  the config asks for nothing, the file has \(2,\)"),
        (weights(lm_head__weight=torch.zeros(30, 16, dtype=torch.int8)), "lm_head.weight is I8; expected floats"),
    ],
)
def test_the_error_of_a_damaged_folder_names_folder_and_fault(
    harm: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    decoder().save(tmp_path)
    harm(tmp_path)
    with pytest.raises(DataError) as caught:
        Decoder.load(tmp_path)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_of_another_model_or_none(tmp_path: Path) -> None:
    decoder().save(tmp_path)
    with pytest.raises(DataError, match=r"model_type is 'lowtri_decoder'; expected 'lowtri_recurrent'.\nFix: Decoder"):
        RecurrentLM.load(tmp_path)
    with pytest.raises(DataError, match=r"nowhere is not a folder. Fix: a folder with config\.json and model"):
        Decoder.load(tmp_path / "nowhere")


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    """A folder whose weights are a pickle has no weights: the file is not opened."""
    model = decoder()
    model.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        Decoder.load(tmp_path)
    torch.save(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="is damaged: "):
        Decoder.load(tmp_path)


def test_no_memory_is_allocated_for_sizes_that_the_weights_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder().save(tmp_path)
    edited(hidden_size=32, head_dim=8, intermediate_size=1000)(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights are read although they do not fit")

    monkeypatch.setattr("safetensors.torch.load_file", fails)
    with pytest.raises(DataError, match="do not fit together at "):
        Decoder.load(tmp_path)


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(["config.json", "model.safetensors"]), data=st.data())
def test_any_changed_bytes_load_or_are_a_data_error(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    RecurrentLM(5, 4, num_hidden_layers=1).save(folder)
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    words = str(folder)
    try:
        RecurrentLM.load(folder)
    except DataError as error:
        words = str(error)
    assert str(folder) in words
