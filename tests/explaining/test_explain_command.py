"""lowtri explain: the verb's input, what it writes, and the models that it opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import decoder_folder, gguf_file, recurrent_folder, transformers_folder

import lowtri
from lowtri.cli.main import main
from lowtri.explaining.example import tokens_of, untrained, worked
from lowtri.integrations.transformers import load_model


def test_without_a_model_it_says_that_the_weights_are_random(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "The black cat <end>"]) == 0
    assert "random weights, seed 42: untrained; tokens cut at spaces" in capsys.readouterr().out
    assert main(["explain", "The black cat <end>", "--seed", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["note"] == "random weights, seed 7: untrained; tokens cut at spaces"


def test_random_weights_leave_torchs_generator_alone() -> None:
    torch.manual_seed(0)
    first = untrained("a rose is a rose")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = untrained("a rose is a rose")
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(first["output"].value, again["output"].value)
    embedding = first["embedding"].value
    np.testing.assert_array_equal(embedding[0], embedding[3])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The black cat <end>", ["The", "black", "cat", "<end>"]),
        ("我爱NLP 吗", ["我", "爱", "NLP", "吗"]),
        ("我爱你。", ["我", "爱", "你", "。"]),
        ("ฉันรักน้ำ", ["ฉั", "น", "รั", "ก", "น้ำ"]),
        ("カメラが好き", list("カメラが好き")),
        ("나는 고양이를 좋아해", ["나는", "고양이를", "좋아해"]),  # Korean has spaces
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
    ],
)
def test_a_sentence_is_cut_alike_everywhere_and_the_cut_is_named(
    text: str, tokens: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    how = "cut at spaces" if len(tokens) == len(text.split()) else "cut at spaces and by characters"
    assert tokens_of(text) == (tokens, how)
    assert main(["explain", text, "--json"]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert (
        explanation["tokens"] == tokens and explanation["note"] == f"random weights, seed 42: untrained; tokens {how}"
    )
    assert main(["mask", "causal", "--tokens", text, "--ticks"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[1].split() == tokens
    assert said.err == ("" if how == "cut at spaces" else f"{len(tokens)} tokens, {how}\n")
    assert lowtri.causal().draw(len(tokens), tokens=text) == lowtri.causal().draw(len(tokens), tokens=tokens)


@pytest.mark.parametrize(
    ("name", "text"),
    [("e.json", "[[1, 2, 3, 4], [5, 6, 7, 8]]"), ("e.csv", "1,2,3,4\n5,6,7,8\n"), ("e.txt", "1 2 3 4\n\n5 6 7 8")],
)
def test_encodings_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["explain", "two words", "--encodings", str(path), "--heads", "2", "--json"]) == 0
    steps = {step["name"]: step for step in json.loads(capsys.readouterr().out)["steps"]}
    assert steps["encoding"]["value"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert steps["q"]["shape"] == [2, 2, 2]
    assert "embedding" not in steps
    np.save(tmp_path / "e.npy", np.arange(8.0).reshape(2, 4))
    assert main(["explain", "two words", "--encodings", str(tmp_path / "e.npy")]) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", "[[1, 2], [3, 4.5]]"),
        ("s.txt", "1 2\n3 4.5\n"),
        ("numpy.txt", "[[1.  2. ]\n [3.  4.5]]"),
        ("wrapped.txt", "[[1.\n  2. ]\n [ 3.\n 4.5]]"),
        ("repr.txt", "scores = array([[1. , 2. ],\n       [3. , 4.5]])"),
        ("torch.txt", "tensor([[1.0, 2.0],\n        [3.0, 4.5]])"),
    ],
)
def test_given_scores_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    run = ["explain", "--scores", str(path), "--json"]
    assert main(run) == 0
    explanation = json.loads(capsys.readouterr().out)
    steps = {step["name"]: step["value"] for step in explanation["steps"]}
    assert steps["scores"] == [[1, 2], [3, 4.5]] and explanation["tokens"] == ["0", "1"]
    np.testing.assert_allclose(steps["weights"], [[1, 0], [1 / (1 + np.exp(1.5)), 1 / (1 + np.exp(-1.5))]], atol=1e-12)
    assert main(["explain", "two words", "--scores", str(path), "--values", str(path), "--mask", "full"]) == 0
    assert "output = weights v" in capsys.readouterr().out
    np.save(tmp_path / "heads.npy", np.zeros((2, 3, 3)))
    assert main(["explain", "--scores", str(tmp_path / "heads.npy"), "--head", "1"]) == 0


@pytest.mark.parametrize(
    "text", ["[[1, 2], [3]]", "[[1, 2]", "[" * 5000 + "]" * 5000, "[[1, x]]", "[[__import__('os')]]", "]["]
)
def test_bad_scores_are_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "s.txt"
    path.write_text(text)
    assert main(["explain", "--scores", str(path)]) == 2
    assert "is no table of numbers. Fix: a row for each" in capsys.readouterr().err


def test_html_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "steps.html"
    assert main(["explain", "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == worked().to_html()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.html"]
    assert "wrote" in capsys.readouterr().err


def decoder_of_three_layers(path: Path) -> Path:
    return decoder_folder(path, num_hidden_layers=3)


def llama_of_three_layers(path: Path) -> Path:
    return transformers_folder(path, num_hidden_layers=3)


FOLDERS = pytest.mark.parametrize("make", [decoder_of_three_layers, llama_of_three_layers])


@FOLDERS
def test_a_trained_folder(make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["explain", "a cat", "--model", str(make(tmp_path))]
    assert main([*run, "--layer", "2", "--head", "1", "--json"]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["tokens"][-5:] == ["a", " ", "c", "a", "t"] and "untrained" not in explanation["note"]
    assert (
        explanation["note"].startswith("Tokens by the model's tokenizer. Computed anew") and not explanation["warning"]
    )
    model, tokenizer, _ = load_model(tmp_path)
    expected = lowtri.explain(model, tokenizer.encode("a cat"), layer=2, head=1)["weights"].value
    np.testing.assert_allclose({s["name"]: s["value"] for s in explanation["steps"]}["weights"], expected, atol=1e-6)
    assert main([*run, "--mask", "causal & window(2)", "--json"]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["mask"] == "causal & window(2)" and sum(explanation["visible"][3]) == 2
    for wrong, words in [
        (["--layer", "3"], "there is no layer 3 among 3. Fix: 0 to 2."),
        (["--head", "4"], "there is no head 4 among 2. Fix: head from 0 to 1."),
        (["--heads", "2"], "--heads is for random weights; a model has its own. Fix: drop --heads or --model."),
        (["--encodings", "x"], "--encodings is for random weights"),
    ]:
        assert main([*run, *wrong]) == 2
        assert words in capsys.readouterr().err


def test_a_model_without_a_first_token_needs_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = decoder_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    assert main(["explain", "", "--model", str(folder)]) == 2
    assert "the sentence is empty" in capsys.readouterr().err


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = gguf_file(tmp_path / "tiny.gguf")
    assert main(["explain", "a cat", "--model", str(file), "--head", "1", "--json"]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["mask"] == "causal" and explanation["tokens"][-3:] == ["c", "a", "t"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (recurrent_folder, "RecurrentLM has no attention that explain can open"),
        (lambda path: transformers_folder(path, "Bloom"), "BloomForCausalLM has attention code of its own"),
    ],
)
def test_a_model_without_readable_attention(
    make: Callable[[Path], Path], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "a cat", "--model", str(make(tmp_path))]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["   "], 'the sentence is empty. Fix: a word at least, as in "Write a poem".'),
        (["--encodings", "missing.json"], "missing.json: No such file or directory"),
        (["--layer", "1"], "--layer is for a trained model. Fix: add --model MODEL."),
        (["--head", "1"], "there is no head 1 among 1. Fix: head from 0 to 0."),
        (["--mask", "casual"], "casual"),
        (["--model", "nowhere"], "nowhere"),
        (["--heads", "0"], "--heads"),
        (["--values", "x"], "--values goes with --scores. Fix: add --scores FILE."),
        (["--scores", "x", "--heads", "2"], "--heads does not go with given scores. Fix: drop --heads or --scores."),
        (["--scores", "x", "--model", "y"], "--model does not go with given scores. Fix: drop --model or --scores."),
        (["--scores", "x", "--encodings", "y"], "--encodings does not go with given scores"),
        (["--html", "no/such/folder/x.html"], "there is no folder no/such/folder. Fix: make it first"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.out == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1 2\n3", "is no table of numbers. Fix: a row for each token, all rows of equal length."),
        ("a b", "is no table of numbers"),
        ("", "is empty. Fix: a row of numbers for each token."),
        ("1 nan\n1 2\n1 2", "the number at (0, 1) is nan. Fix: finite numbers"),
        ("1 2", "the encodings are (1, 2), but the sentence has 3 tokens: Write | a | poem"),
    ],
)
def test_bad_encodings(tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.txt"
    path.write_text(content)
    assert main(["explain", "--encodings", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_note_of_two_lines_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "Write a poem"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("Its encodings are given;") and lines[2] == "embedding = encoding - position."
