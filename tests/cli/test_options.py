"""Options of verbs: what another option silences is refused, - reads stdin, and a mask is drawn as far as it goes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from commands import printed, refused


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sets what stdin holds."""

    def put(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))

    return put


SILENCED = {
    "mask causal --json --ticks": "--ticks is a form of the picture, which JSON does not hold. Fix: drop --ticks or --json",
    "mask causal --json --numbers": "--numbers is a form of the picture, which JSON does not hold. Fix: drop --numbers or --json",
    "mask causal --json --latex": "--latex is a form of the picture, which JSON does not hold. Fix: drop --latex or --json",
    "mask causal --tokens a --n 3": "--n is the number of the tokens. Fix: drop --n or --tokens",
    "mask causal --tokens a --latex": "--tokens are labels, which the matrix does not have. Fix: drop --tokens or --latex",
    "mask causal --ticks --latex": "draw: ticks, numbers and latex are three forms of one picture. Fix: set one of them",
    "explain a --scores x.txt --seed 42": "--seed does not go with given scores. Fix: drop --seed or --scores",
    "explain a --scores x.txt --heads 1": "--heads does not go with given scores. Fix: drop --heads or --scores",
    "explain a --scores x.txt --model m": "--model does not go with given scores. Fix: drop --model or --scores",
    "explain a --scores x.txt --encodings y.txt": "--encodings does not go with given scores. Fix: drop --encodings or --scores",
    "explain a --model m --seed 1": "--seed is for random weights; a model has its own. Fix: drop --seed or --model",
    "explain a --model m --heads 1": "--heads is for random weights; a model has its own. Fix: drop --heads or --model",
    "explain a --model m --encodings y.txt": "--encodings is for random weights; a model has its own. Fix: drop --encodings or",
    "explain a --values v.txt": "--values goes with --scores. Fix: add --scores FILE",
    "explain a --layer 0": "--layer is for a trained model. Fix: add --model MODEL",
    "generate m p --top-k 3": "--top-k is for drawing tokens, and nothing is drawn at temperature 0. Fix: --temperature 1",
    "generate m p --top-p 0.5": "--top-p is for drawing tokens, and nothing is drawn at temperature 0. Fix: --temperature 1",
    "generate m p --seed 0": "--seed is for drawing tokens, and nothing is drawn at temperature 0. Fix: --temperature 1",
    "generate m p --prompt-file f": "one prompt is expected",
    "audit m --infer --mask causal": "--mask is for an audit, and --infer audits nothing. Fix: drop --mask or --infer",
    "audit m --infer --layers 2": "--layers is for an audit, and --infer audits nothing. Fix: drop --layers or --infer",
    "audit m --infer --conditions eval": "--conditions is for an audit, and --infer audits nothing. Fix: drop --conditions or",
    "audit m --infer --probes change": "--probes is for an audit, and --infer audits nothing. Fix: drop --probes or --infer",
    "audit m --infer --out a.txt": "--out is for an audit, and --infer audits nothing. Fix: drop --out or --infer",
}


@pytest.mark.parametrize("words", SILENCED)
def test_an_option_that_another_silences_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert SILENCED[words] in refused(capsys, *words.split())


def test_a_mask_is_drawn_as_far_as_its_documents_go(capsys: pytest.CaptureFixture[str]) -> None:
    five = "██···\n██···\n··███\n··███\n··███"
    assert five in printed(capsys, "mask", "documents(lengths=[2,3])")
    assert five in printed(capsys, "mask", "documents(lengths=[2,3])", "--n", "5")
    assert "██·\n██·\n··█\n" in printed(capsys, "mask", "documents(lengths=[2,3])", "--n", "3"), (
        "the beginning of a row"
    )
    words = "add up to 5, but the row has 9 tokens.\nFix: lengths that add up to 9; or open_end=True"
    for text in ("documents(lengths=[2,3])", "causal & documents(lengths=[2,3])", "~documents(lengths=[2,3])"):
        for more in (["--n", "9"], ["--tokens", "a b c d e f g h i"]):
            assert words in refused(capsys, "mask", text, *more)
    assert "9 tokens" in refused(capsys, "mask", "causal", "--beside", "documents(lengths=[2,3])", "--n", "9")
    beside = printed(capsys, "mask", "causal", "--beside", "documents(lengths=[2,3])")
    assert "15 of 25 pairs" in beside and "13 of 25 pairs" in beside
    open_end = printed(capsys, "mask", "documents(lengths=[2,3], open_end=True)", "--n", "9")
    assert open_end.count("··███████\n") == 7


def test_a_minus_reads_stdin(capsys: pytest.CaptureFixture[str], stdin: object, tmp_path: Path) -> None:
    expected = printed(capsys, "mask", "causal & window(2)", "--n", "5")
    stdin(b"causal & window(2)\n")  # type: ignore[operator]
    assert printed(capsys, "mask", "-", "--n", "5") == expected
    beside = printed(capsys, "mask", "causal", "--beside", "window(2)", "--n", "5")
    stdin(b"window(2)\r\n")  # type: ignore[operator]
    assert printed(capsys, "mask", "causal", "--beside", "-", "--n", "5") == beside
    tokens = printed(capsys, "mask", "causal", "--tokens", "die Katze schläft")
    stdin("die Katze schläft".encode())  # type: ignore[operator]
    assert printed(capsys, "mask", "causal", "--tokens", "-") == tokens
    sentence = json.loads(printed(capsys, "explain", "the black cat", "--mask", "window(2)", "--json"))
    stdin(b"the black cat\n")  # type: ignore[operator]
    assert json.loads(printed(capsys, "explain", "-", "--mask", "window(2)", "--json")) == sentence
    stdin(b"window(2)\n")  # type: ignore[operator]
    assert json.loads(printed(capsys, "explain", "the black cat", "--mask", "-", "--json")) == sentence
    (tmp_path / "scores.txt").write_text("1 2\n3 4\n")
    scores = printed(capsys, "explain", "--scores", str(tmp_path / "scores.txt"))
    stdin(b"1 2\n3 4\n")  # type: ignore[operator]
    assert printed(capsys, "explain", "--scores", "-") == scores


def test_a_stdin_without_a_text(capsys: pytest.CaptureFixture[str], stdin: object) -> None:
    stdin(b"causal\n")  # type: ignore[operator]
    err = refused(capsys, "mask", "-", "--beside", "-")
    assert err == "lowtri: the second mask in stdin is empty. Fix: at least one character\n"
    stdin(b"\xff\xfe")  # type: ignore[operator]
    err = refused(capsys, "mask", "-")
    assert "the mask is not UTF-8: " in err and "Fix: iconv -f ENCODING -t utf-8" in err
