"""Models of the Hugging Face hub, by name: huggingface_hub's functions replaced, and its cache laid out by hand. No network."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from lowtri.cli.main import main
from lowtri.errors import DataError
from lowtri.nn import Decoder, DecoderConfig
from lowtri.nn.checkpoint import save
from lowtri.nn.names import FILES
from lowtri.training.corpus import learn

NAME = "some-org/a.model_1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).eval()


def cached(model: Decoder, home: Path) -> Path:
    """The model's snapshot as huggingface_hub keeps it: links to blobs, named by what they contain."""
    save(model, home / "plain", learn(["the cat sat on the mat"], 300))
    repository = home / "hub" / "models--some-org--a.model_1"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted((home / "plain").iterdir())):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot


def same_logits(model: Decoder, other: Decoder) -> bool:
    ids = torch.arange(12)[None]
    with torch.no_grad():
        return torch.equal(model(ids), other(ids))


def test_a_model_of_the_hub_is_loaded_by_its_name(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    snapshot, calls = cached(model, tmp_path), []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = Decoder.from_pretrained(NAME)
    assert same_logits(model, loaded) and loaded.tokenizer is not None
    assert calls == [(NAME, {"allow_patterns": FILES})]
    assert main(["generate", NAME, "the cat", "--max-new-tokens", "2"]) == 0
    assert main(["audit", NAME, "--length", "8"]) == 0
    assert "no leak found" in capsys.readouterr().out


def test_only_configuration_tokenizer_and_safetensors_are_downloaded() -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors", "model-00001-of-00002.safetensors"]
    others = ["pytorch_model.bin", "modeling_a.py", "model.pt", "original/consolidated.safetensors", "README.md"]
    chosen = [name for name in names + others if any(fnmatch.fnmatch(name, pattern) for pattern in FILES)]
    assert chosen == names


@pytest.mark.sweep
def test_the_cache_of_huggingface_hub_is_read_without_a_network(model: Decoder, tmp_path: Path) -> None:
    cached(model, tmp_path)
    program = f"from lowtri.nn import Decoder; print(Decoder.from_pretrained({NAME!r}).config.vocab_size)"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout == "300\n", ran.stderr
    program = """
from lowtri.errors import DataError
from lowtri.nn import Decoder
try:
    Decoder.from_pretrained("other/name")
except DataError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout.startswith("other/name is not a folder, and cannot be downloaded: "), ran.stderr
    assert "\nFix: a network connection, or the path of a folder" in ran.stdout


def test_a_snapshot_that_leaves_its_folder_is_refused(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(model, tmp_path)
    (tmp_path / "elsewhere").write_text("{}")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(snapshot))
    with pytest.raises(DataError, match=r"is a link to .*elsewhere, outside of its folder"):
        Decoder.from_pretrained(NAME)


def http_error(kind: Any) -> Any:
    error = kind.__new__(kind)  # their constructors take a response of one of several HTTP libraries
    error.args = ("404 Client Error\nRequest ID: 1",)
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            http_error(errors.RepositoryNotFoundError),
            "is not a model of the Hugging Face hub.\nFix: its name, org/name, or the",
        ),
        (errors.HFValidationError("bad"), "is not a model of the Hugging Face hub.\nFix: its name"),
        (
            http_error(errors.GatedRepoError),
            "needs the consent of its owner.\nFix: accept its terms on its page, then hf",
        ),
        (
            errors.LocalEntryNotFoundError("no\x1b[31m network\nx"),
            r"cannot be downloaded: no\?\[31m network.\nFix: a net",
        ),
        (ConnectionError(), "cannot be downloaded: ConnectionError.\nFix: a network connection"),
    ],
)
def test_every_failure_is_one_error(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(DataError, match=f"some-org/a.model_1 is not a folder, and {words}"):
        Decoder.from_pretrained(NAME)


def test_without_huggingface_hub_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["generate", NAME, "a"]) == 2
    err = capsys.readouterr().err
    assert f"{NAME} is not a folder, and a model of the Hugging Face hub needs huggingface_hub" in err
    assert "Fix: pip install 'lowtri[models]', or the path of a folder" in err


@pytest.mark.parametrize("name", ["no model", "a/b/c", "./a/b", "../b", "/a/b", "a/", "a\\b", Path("a/b")])
def test_anything_but_org_name_is_a_path(name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")  # so that it does not matter what lies beside this checkout
    with pytest.raises(DataError, match=r"is not a folder: a checkpoint is a folder with config.json"):
        Decoder.from_pretrained(name)


def test_an_existing_folder_takes_precedence_over_the_hub(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(model, "out/book")
    assert same_logits(model, Decoder.from_pretrained("out/book"))
