"""What a new user meets: typing errors, leaking masks, interrupts, an extended training run."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtri.cli.main import main

TEXT = "".join(f"{n} green bottles hanging on the wall, สวัสดี. " for n in range(300, 0, -1))
SIZES = ["--vocabulary", 258, "--hidden", 16, "--layers", 1, "--heads", 2, "--context", 32, "--batch", 2, "--steps", 4]


def says(capsys: Any, *arguments: Any, code: int = 0) -> tuple[str, str]:
    assert main([str(argument) for argument in arguments]) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out, err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "bottles.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def book(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out") / "book"
    assert main([str(word) for word in ("train", text, "--out", path, *SIZES)]) == 0
    return path


# Names of models


@pytest.mark.parametrize(
    "verb", [["generate", "{}", "x"], ["eval", "{}", "TEXT"], ["audit", "{}"], ["explain", "--model", "{}"]]
)
def test_a_misspelt_model_is_suggested(verb: list[str], book: Path, text: Path, capsys: Any) -> None:
    for name, meant in (("smolm2", "smollm2"), (str(book.parent / "bok"), str(book))):
        arguments = [word.format(name).replace("TEXT", str(text)) for word in verb]
        out, err = says(capsys, *arguments, code=2)
        assert out == "" and err.endswith(f"\nDid you mean {meant}?\n")
    err = says(capsys, *[word.format("nowhere").replace("TEXT", str(text)) for word in verb], code=2)[1]
    assert "nowhere is not a folder" in err and "Did you mean" not in err


# Masks that show what is predicted


@pytest.mark.parametrize(
    ("mask", "warns"),
    [("full", True), ("causal | first(3)", True), ("band(1, 1)", True), ("~causal", True)]
    + [(mask, False) for mask in ("causal", "window(4)", "causal & chunks(8)", "full & causal", "band(3, 0)")],
)
def test_training_under_a_mask_that_shows_the_future_says_so_once(
    mask: str, warns: bool, text: Path, tmp_path: Path, capsys: Any
) -> None:
    out, err = says(capsys, "train", text, "--out", tmp_path / "m", *SIZES, "--steps", 1, "--mask", mask)
    words = f"the mask {mask} shows what is predicted: this loss means nothing. Fix: a causal mask"
    assert err.count(words) == warns and "loss" in out


@pytest.mark.parametrize("mask", ["full", "causal | first(4)", "band(1, 1)", "causal & window(3) | chunks(5)"])
@pytest.mark.parametrize("more", [[], ["--no-cache"]])
def test_generating_with_a_mask_that_shows_the_future_is_an_error(
    mask: str, more: list[str], book: Path, capsys: Any
) -> None:
    out, err = says(capsys, "generate", book, "9", "--mask", mask, *more, code=2)
    assert out == "" and f"the mask {mask} shows tokens that are generated later" in err
    assert "Fix: --mask with a causal mask" in err
    # A prefix within the prompt is visible from both sides. (The tokenizer begins with a token of its own.)
    assert says(capsys, "generate", book, "9 gr", "--mask", "causal | first(5)", "--max-new-tokens", 2)[0][:4] == "9 gr"


# An extended run


def test_a_finished_run_goes_on_with_more_steps(text: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "m"
    says(capsys, "train", text, "--out", out, *SIZES)
    first = json.loads((out / "training.json").read_text())
    err = says(capsys, "train", "--out", out, "--resume", "--steps", 9)[1]
    assert err.startswith(f"{out} goes on: 4 steps are done, 9 will be\n")
    more = json.loads((out / "training.json").read_text())
    assert more["history"]["losses"][:4] == first["history"]["losses"] and len(more["history"]["losses"]) == 9
    assert more["plan"]["recipe"] == {**first["plan"]["recipe"], "steps": 9}
    assert says(capsys, "train", "--out", out, "--resume")[1] == f"{out} is finished: 9 steps\n"
    err = says(capsys, "train", "--out", out, "--resume", "--steps", 4, code=2)[1]
    assert err == f"lowtri: {out} holds another run: steps 9 there, 4 here.\nFix: another folder\n"
    shutil.rmtree(out / "training-state")
    err = says(capsys, "train", "--out", out, "--resume", "--steps", 12, code=2)[1]
    assert "is finished, and its training-state is gone: it cannot go on.\nFix: another folder" in err


def test_a_log_file_shows_the_first_step(text: Path, tmp_path: Path, capsys: Any) -> None:
    err = says(capsys, "train", text, "--out", tmp_path / "m", *SIZES, "--steps", 30)[1].splitlines()
    assert err[2].startswith("loss 5.5") and "before the first step; 5.5530 is a guess" in err[2]
    assert err[3].startswith("step      1  loss 5.5") and "held out" not in err[3]
    assert err[4].startswith("step      3  loss ") and "held out" in err[4]


# Prompts and texts


def test_an_empty_prompt_begins_a_text_where_the_tokenizer_can(book: Path, tmp_path: Path, capsys: Any) -> None:
    begun = says(capsys, "generate", book, "", "--max-new-tokens", 5)[0]
    assert begun.endswith("\n")
    shutil.copytree(book, tmp_path / "bare")
    tokenizer = tmp_path / "bare" / "tokenizer.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "post_processor": None}))
    err = says(capsys, "generate", tmp_path / "bare", "", code=2)[1]
    assert "the prompt is empty, and " in err and "has no token that begins a text. Fix: at least one character" in err


def test_thai_never_ends_in_half_a_character(book: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of bytes: a Thai letter is three tokens."""
    from lowtri.nn.files import load_tokenizer

    import lowtri

    ids = load_tokenizer(book).encode("สวัสดี", add_special_tokens=False).ids  # type: ignore[union-attr]
    assert len(ids) == 18
    for n in range(1, 19):
        monkeypatch.setattr(lowtri, "generate", lambda *_, n=n, **__: iter(ids[:n]))
        out, err = says(capsys, "generate", book, "x", "--max-new-tokens", n)
        assert out == f"x{'สวัสดี'[: n // 3]}\n" and err.startswith(f"{n} token")


def test_a_layer_that_is_not_there_is_rejected_before_the_weights_are_read(
    book: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(book, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"not weights")
    err = says(capsys, "explain", "a b", "--model", tmp_path / "m", "--layer", 300, code=2)[1]
    assert "--layer is 300, but " in err and "has 1 layer. Fix: 0 to 0." in err
    assert "is damaged" in says(capsys, "explain", "a b", "--model", tmp_path / "m", code=2)[1]


# At a terminal


def test_ctrl_c_keeps_the_figures(book: Path) -> None:
    """The model generates without end, in a context that does not end."""
    program = """
import signal, sys, itertools, time, lowtri
from lowtri.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored
lowtri.generate = lambda *_, **__: (time.sleep(0.01) or 70 for _ in itertools.count())
code = main(sys.argv[1:])
assert "torch._dynamo" not in sys.modules, "loading a model does not load torch's compiler, which takes a second"
sys.exit(code)
"""
    command = [sys.executable, "-c", program, "generate", str(book), "x", "--stats"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.read(4)[0] == "x"
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    lines = err.splitlines()
    assert [line[:8] for line in lines] == ["prompt  ", "decode  ", "lowtri: "] and "a second" in lines[1]
    assert lines[2] == "lowtri: interrupted"


@pytest.mark.parametrize("more", [[], ["--weights", "bf16"]])
def test_a_terminal_is_told_about_int8_once(more: list[str], book: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lowtri", "generate", str(book), "x", "--max-new-tokens", "2", *more]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True, timeout=120)
    os.close(theirs)
    assert os.read(ours, 10_000).decode().count("--weights int8") == (not more)
    os.close(ours)
