"""lowtri explain: the verb's input, what it writes, and the models that it opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import outcome, printed, refused
from model_files import decoder_folder, gguf_file, recurrent_folder, transformers_folder

import lowtri
from lowtri.explaining.example import tokens_of, untrained, worked
from lowtri.integrations.transformers import load_model


def test_without_a_model_it_says_that_the_weights_are_random(capsys: pytest.CaptureFixture[str]) -> None:
    said = "random weights, seed 42: untrained; tokens cut at spaces"
    assert said in printed(capsys, "explain", "The black cat <end>")
    seven = printed(capsys, "explain", "The black cat <end>", "--seed", "7", "--json")
    assert json.loads(seven)["note"] == said.replace("42", "7")


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
    explanation = json.loads(printed(capsys, "explain", text, "--json"))
    assert (
        explanation["tokens"] == tokens and explanation["note"] == f"random weights, seed 42: untrained; tokens {how}"
    )
    out, err = outcome(capsys, "mask", "causal", "--tokens", text, "--ticks")
    assert out.splitlines()[1].split() == tokens
    assert err == ("" if how == "cut at spaces" else f"{len(tokens)} tokens, {how}\n")
    assert lowtri.causal().draw(len(tokens), tokens=text) == lowtri.causal().draw(len(tokens), tokens=tokens)


@pytest.mark.parametrize(
    ("name", "text"),
    [("e.json", "[[1, 2, 3, 4], [5, 6, 7, 8]]"), ("e.csv", "1,2,3,4\n5,6,7,8\n"), ("e.txt", "1 2 3 4\n\n5 6 7 8")],
)
def test_encodings_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    explanation = json.loads(printed(capsys, "explain", "two words", "--encodings", path, "--heads", "2", "--json"))
    steps = {step["name"]: step for step in explanation["steps"]}
    assert steps["encoding"]["value"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert steps["q"]["shape"] == [2, 2, 2]
    assert "embedding" not in steps
    np.save(tmp_path / "e.npy", np.arange(8.0).reshape(2, 4))
    printed(capsys, "explain", "two words", "--encodings", tmp_path / "e.npy")


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
    explanation = json.loads(printed(capsys, "explain", "--scores", path, "--json"))
    steps = {step["name"]: step["value"] for step in explanation["steps"]}
    assert steps["scores"] == [[1, 2], [3, 4.5]] and explanation["tokens"] == ["0", "1"]
    np.testing.assert_allclose(steps["weights"], [[1, 0], [1 / (1 + np.exp(1.5)), 1 / (1 + np.exp(-1.5))]], atol=1e-12)
    valued = printed(capsys, "explain", "two words", "--scores", path, "--values", path, "--mask", "full")
    assert "output = weights v" in valued
    np.save(tmp_path / "heads.npy", np.zeros((2, 3, 3)))
    printed(capsys, "explain", "--scores", tmp_path / "heads.npy", "--head", "1")


def test_html_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "steps.html"
    assert "wrote" in outcome(capsys, "explain", "--html", page)[1]
    assert page.read_text(encoding="utf-8") == worked().to_html()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.html"]


def decoder_of_three_layers(path: Path) -> Path:
    return decoder_folder(path, num_hidden_layers=3)


def llama_of_three_layers(path: Path) -> Path:
    return transformers_folder(path, num_hidden_layers=3)


FOLDERS = pytest.mark.parametrize("make", [decoder_of_three_layers, llama_of_three_layers])


@FOLDERS
def test_a_trained_folder(make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["explain", "a cat", "--model", str(make(tmp_path))]
    explanation = json.loads(printed(capsys, *run, "--layer", "2", "--head", "1", "--json"))
    assert explanation["tokens"][-5:] == ["a", " ", "c", "a", "t"] and "untrained" not in explanation["note"]
    assert (
        explanation["note"].startswith("Tokens by the model's tokenizer. Computed anew") and not explanation["warning"]
    )
    model, tokenizer, _ = load_model(tmp_path)
    expected = lowtri.explain(model, tokenizer.encode("a cat"), layer=2, head=1)["weights"].value
    np.testing.assert_allclose({s["name"]: s["value"] for s in explanation["steps"]}["weights"], expected, atol=1e-6)
    explanation = json.loads(printed(capsys, *run, "--mask", "causal & window(2)", "--json"))
    assert explanation["mask"] == "causal & window(2)" and sum(explanation["visible"][3]) == 2
    for wrong, words in [
        (["--layer", "3"], "there is no layer 3 among 3. Fix: 0 to 2."),
        (["--head", "4"], "there is no head 4 among 2. Fix: head from 0 to 1."),
    ]:
        assert words in refused(capsys, *run, *wrong)


def test_a_model_without_a_first_token_needs_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = decoder_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    assert "the sentence is empty" in refused(capsys, "explain", "", "--model", folder)


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = gguf_file(tmp_path / "tiny.gguf")
    explanation = json.loads(printed(capsys, "explain", "a cat", "--model", str(file), "--head", "1", "--json"))
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
    assert words in refused(capsys, "explain", "a cat", "--model", make(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["   "], 'the sentence is empty. Fix: a word at least, as in "Write a poem".'),
        (["--encodings", "missing.json"], "missing.json: No such file or directory"),
        (["--head", "1"], "there is no head 1 among 1. Fix: head from 0 to 0."),
        (["--mask", "casual"], "casual"),
        (["--model", "nowhere"], "nowhere"),
        (["--heads", "0"], "--heads"),
    ],
)
def test_bad_input_is_one_clear_message(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, "explain", *arguments)


NO_TABLE = "is no table of numbers. Fix: a row for each token, all rows of equal length."


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        *(("--scores", text, NO_TABLE) for text in ("[[1, 2], [3]]", "[[1, 2]", "[" * 5000 + "]" * 5000, "[[1, x]]")),
        *(("--scores", text, NO_TABLE) for text in ("[[__import__('os')]]", "][", "1 2\n3\n", "a b")),
        ("--scores", "", "x.txt is empty. Fix: a row of numbers for each token"),
        ("--scores", "1 nan\n2 3\n", "x.txt: the number at (0, 1) is nan. Fix: finite numbers; --mask hides pairs"),
        ("--scores", "1 2\n2 -inf\n", "x.txt: the number at (1, 1) is -inf."),
        ("--scores", "[1, 2]", "an array of the shape (2,). Fix: an array of the shape (rows, columns) or"),
        ("--encodings", "[[[1, 2]]]", "an array of the shape (1, 1, 2). Fix: an array of the shape (tokens, d_model)."),
        ("--encodings", "1 2", "the encodings are (1, 2), but the sentence has 3 tokens: Write | a | poem"),
    ],
)
def test_bad_numbers(option: str, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.txt"
    path.write_text(content)
    assert words in refused(capsys, "explain", option, path)


def test_a_note_of_two_lines_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "explain", "Write a poem").splitlines()
    assert lines[1].endswith("Its encodings are given;") and lines[2] == "embedding = encoding - position."
