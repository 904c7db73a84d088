"""train, generate and eval from the command line, one after the other, and what each says when it cannot go on."""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import gguf_file
from lowtri.nn.checkpoint import load
from lowtri.nn.gguf import converted

import lowtri
from lowtri.cli.main import main
from lowtri.cli.models import _until
from lowtri.errors import DataError
from lowtri.nn import Decoder, DecoderConfig
from lowtri.training.evaluate import evaluate

TEXT = "".join(
    f"{n} green bottles hanging on the wall; if one should fall, {n - 1} are left.\n" for n in range(99, 0, -1)
)
SIZES = ["--vocabulary", 300, "--hidden", 32, "--layers", 2, "--heads", 2, "--context", 48]
SIZES += ["--batch", 4, "--steps", 60, "--lr", 0.01]


def says(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> tuple[str, str]:
    assert main([str(argument) for argument in arguments]) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out, err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "bottles.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "out"
    assert main([str(word) for word in ("train", text, "--out", path, *SIZES)]) == 0
    return path


# train


def test_train_puts_the_result_on_stdout_and_the_rest_on_stderr(text: Path, tmp_path: Path, capsys: Any) -> None:
    out, err = says(capsys, "train", text, "--out", tmp_path / "out", *SIZES, "--steps", 3, "--json")
    result = json.loads(out)
    assert result["steps"] == 3 and result["out"] == str(tmp_path / "out")
    assert result["parameters"] > 20_000 and result["tokens_per_second"] > 0
    assert 3 < result["held_out_loss"] < 7 and 3 < result["loss"] < 7
    lines = err.splitlines()
    assert lines[0] == "learning 300 tokens from 1 document"
    assert "mask causal" in lines[1] and "parameters" in lines[1]
    assert lines[2].startswith("loss ") and lines[2].endswith(
        " before the first step; 5.7038 is a guess among all tokens"
    )
    assert [line[:18] for line in lines[3:]] == ["step      1  loss ", "step      2  loss ", "step      3  loss "]
    assert "held out" in lines[3] and "tokens/s" in lines[3]


def test_train_learns_and_reports_in_two_lines(folder: Path, capsys: Any) -> None:
    out, err = says(capsys, "train", "--out", folder, "--resume")
    first, second = out.splitlines()
    assert first.startswith(f"{folder}: ") and "60 steps" in first
    assert float(second.split()[1]) < 3.5 and "on held-out rows" in second
    assert err == f"{folder} is finished: 60 steps\n"


def test_resume_takes_what_is_unsaid_from_the_folder_and_compares_what_is_said(folder: Path, capsys: Any) -> None:
    says(capsys, "train", "--out", folder, "--resume", "--steps", 60, "--hidden", 32)
    _, err = says(capsys, "train", "--out", folder, "--resume", "--steps", 61, "--mask", "full", code=2)
    assert "holds another run: mask causal there, full here.\nFix: another folder" in err


def test_resuming_what_was_never_begun_begins(text: Path, tmp_path: Path, capsys: Any) -> None:
    _, err = says(capsys, "train", text, "--out", tmp_path / "new", *SIZES, "--steps", 1, "--resume")
    assert err.startswith(f"nothing was begun in {tmp_path / 'new'}: starting\n")


def test_the_mask_reaches_the_model(text: Path, tmp_path: Path, capsys: Any) -> None:
    mask = "causal & (window(8) | first(2))"
    says(capsys, "train", text, "--out", tmp_path / "m", *SIZES, "--steps", 2, "--mask", mask)
    assert load(tmp_path / "m")[0].config.mask == mask


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.txt", "--out", "OUT"], "nowhere.txt: No such file or directory"),
        (["EMPTY", "--out", "OUT"], "has no text in it"),
        (["--out", "OUT"], "FILES: none were given. Fix: name text files"),
        (["FOLDER", "--out", "OUT"], "is a folder.\nFix: name the files in it"),
        (["TEXT", "--out", "OUT", "--mask", "causl"], "causl"),
        (["TEXT", "--out", "OUT", "--steps", "0"], "steps: got 0; at least 1 is needed"),
        (["TEXT", "--out", "OUT", "--heads", "7"], "--hidden is 256, but 7 heads need an even number of entries"),
        (["TEXT", "--out", "OUT", "--vocabulary", "9"], "vocabulary: got 9; at least 258 are needed"),
        (["TEXT", "--out", "OUT", "--context", "99999"], "one row takes 100000.\nFix: more text, or a smaller context"),
        (["TEXT", "--out", "OUT", "--device", "abacus"], "--device: 'abacus' cannot be used: "),
        (["TEXT", "--out", "OUT", "--device", "meta"], "--device: 'meta' cannot be used: "),
        (["TEXT", "--out", "FOLDER"], "is not empty. Fix: another folder, or --resume to go on with the run in it"),
        (["TEXT", "--out", "EMPTY"], "is a file. Fix: a folder"),
    ],
)
def test_train_rejects_in_a_line_and_leaves_no_files(
    arguments: list[str], words: str, text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    places = {"OUT": tmp_path / "out", "EMPTY": tmp_path / "empty.txt", "FOLDER": text.parent, "TEXT": text}
    out, err = says(capsys, "train", *(places.get(word, word) for word in arguments), code=2)
    assert words in err and out == ""
    assert not (tmp_path / "out").exists()


# generate


def test_generate_streams_the_prompt_and_what_follows(folder: Path, capsys: Any) -> None:
    out, err = says(capsys, "generate", folder, "9 green", "--max-new-tokens", 12)
    model, tokenizer = load(folder)
    text = "".join(lowtri.generate(model, "9 green", 12, tokenizer=tokenizer))
    assert out == f"9 green{text}\n"
    assert err.startswith("12 tokens, ")
    assert says(capsys, "generate", folder, "9 green", "--max-new-tokens", 12, "--no-cache")[0] == out


def test_one_token_is_one_token(folder: Path, capsys: Any) -> None:
    err = says(capsys, "generate", folder, "9", "--max-new-tokens", 1, "--stats")[1]
    begun, second = err.splitlines()  # the tokenizer puts its own token in front of the "9"
    assert begun.startswith("prompt       2 tokens, ") and second == "decode        1 token,      0.0 a second"
    assert says(capsys, "generate", folder, "9", "--max-new-tokens", 1)[1].startswith("1 token, ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_generating_onto_a_full_disk_ends_in_a_line(folder: Path) -> None:
    command = [sys.executable, "-m", "lowtri.cli.main", "generate", folder, "9 green", "--max-new-tokens", "3"]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 2
    assert ran.stderr == (
        "lowtri: the result, or a file, cannot be written: No space left on device. Fix: make room, or write it elsewhere\n"
    )


def test_generate_draws_the_same_for_the_same_seed(folder: Path, capsys: Any) -> None:
    drawn = [
        says(
            capsys,
            "generate",
            folder,
            "9",
            "--temperature",
            1.5,
            "--top-k",
            50,
            "--top-p",
            0.9,
            "--seed",
            seed,
            "--json",
        )[0]
        for seed in (1, 1, 2)
    ]
    texts = [json.loads(one)["text"] for one in drawn]
    assert texts[0] == texts[1] != texts[2]
    result = json.loads(drawn[0])
    assert result["prompt"] == "9" and 0 < result["tokens"] <= 48 and result["tokens_per_second"] > 0


def test_generate_ends_before_a_stop_text(folder: Path, capsys: Any) -> None:
    whole = says(capsys, "generate", folder, "9 green")[0]
    stop = whole[12:18]
    out, _ = says(capsys, "generate", folder, "9 green", "--stop", "never in it", "--stop", stop)
    assert out == whole[: whole.index(stop, 7)] + "\n"


class Stdin:
    """A stdin that holds these bytes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_a_prompt_comes_from_a_file_or_from_stdin(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = says(capsys, "generate", folder, "9 green", "--max-new-tokens", 5)[0]
    (tmp_path / "prompt.txt").write_bytes(b"9 green\r\n")
    for arguments in (["--prompt-file", tmp_path / "prompt.txt"], ["-"], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", Stdin(b"9 green\n"))
        assert says(capsys, "generate", folder, *arguments, "--max-new-tokens", 5)[0] == wanted
    prompts = {b"two\n\n": "two\n", b" a ": " a "}  # one line break at the end, and nothing else, is left out
    for content, prompt in prompts.items():
        monkeypatch.setattr(sys, "stdin", Stdin(content))
        assert json.loads(says(capsys, "generate", folder, "-", "--max-new-tokens", 1, "--json")[0])["prompt"] == prompt


def test_a_prompt_that_is_missing_given_twice_or_no_text(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for arguments in ([], ["9", "--prompt-file", tmp_path / "latin.txt"]):
        assert "one prompt is expected. Fix: " in says(capsys, "generate", folder, *arguments, code=2)[1]
    words = "the prompt is not UTF-8: "
    assert words in says(capsys, "generate", folder, "--prompt-file", tmp_path / "latin.txt", code=2)[1]
    assert "no.txt: No such file" in says(capsys, "generate", folder, "--prompt-file", tmp_path / "no.txt", code=2)[1]
    monkeypatch.setattr(sys, "stdin", Stdin(b"\n"))
    assert (
        "the prompt in stdin is empty. Fix: at least one character" in says(capsys, "generate", folder, "-", code=2)[1]
    )


def test_the_mask_of_a_model_is_replaced_by_the_users(folder: Path, capsys: Any) -> None:
    arguments = ["generate", folder, "9 green bottles hanging on", "--max-new-tokens", 12]
    own, narrow = (says(capsys, *arguments, *more)[0] for more in ([], ["--mask", "window(1)"]))
    assert own != narrow
    assert says(capsys, *arguments, "--mask", "window(1)", "--no-cache")[0] == narrow
    assert "causl" in says(capsys, *arguments, "--mask", "causl", code=2)[1]


def test_a_gguf_file_and_a_model_of_the_hub_are_named_like_a_folder(
    text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTRI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "abba.txt").write_text("abbaabab")
    file = gguf_file(tmp_path / "m.gguf")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(converted(file)))
    for model in (file, "org/model"):
        assert "the mask" not in says(capsys, "generate", model, "ab", "--max-new-tokens", 2)[1]
        result = json.loads(says(capsys, "eval", model, tmp_path / "abba.txt", "--json")[0])
        assert result["mask"] == "causal" and 0 <= result["greatest_difference"] < 1e-4
        explained = json.loads(says(capsys, "explain", "ab", "--model", model, "--mask", "full", "--json")[0])
        assert explained["mask"] == "full"
        assert "no leak found" in says(capsys, "audit", model)[0]
        assert Decoder.from_pretrained(model, mask="causal & window(2)").config.mask == "causal & window(2)"
    with pytest.raises(DataError, match="no model is not a folder"):
        Decoder.from_pretrained("no model")
    for verb in ("eval", "explain"):
        more = ["x", "--model", "smolm2"] if verb == "explain" else ["smolm2", text]
        assert (
            "packaged weights are smollm2; models of the Hugging Face hub are named org/name"
            in says(capsys, verb, *more, code=2)[1]
        )


def test_a_cache_that_cannot_be_written_says_which(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOWTRI_CACHE", str(tmp_path / "file"))
    err = says(capsys, "generate", gguf_file(tmp_path / "m.gguf"), "ab", code=2)[1]
    assert f"{tmp_path / 'file' / 'gguf'} cannot be written: " in err and "Fix: LOWTRI_CACHE=/another" in err


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["a", "b", "c"], [], "abc"),
        (["a", "b", "c"], ["c"], "ab"),
        (["abc"], ["a"], ""),
        (["a", "b", "c", "d"], ["cx", "bcd"], "a"),
        (["ab", "ab", "ac"], ["abac"], "ab"),
        (["a", "", "b"], ["ba"], "ab"),
        (["xay", "b"], ["y", "a"], "x"),
    ],
)
def test_stop_texts_may_lie_across_pieces(pieces: list[str], stops: list[str], text: str) -> None:
    assert "".join(_until(pieces, stops)) == text
    assert "".join(_until("".join(pieces), stops)) == text


def test_text_that_cannot_be_a_stop_is_printed_at_once() -> None:
    given = []

    def pieces() -> Any:
        for character in "abcdef":
            given.append(character)
            yield character

    stream = _until(pieces(), ["xyz"])
    assert next(stream) == "a" and given == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["DIR", "9", "--stop", ""], "--stop is empty. Fix: at least one character"),
        (["DIR", "9 green bottles " * 20], "tokens, but the model's context has 48 positions.\nFix: a shorter prompt"),
        (["DIR", "9", "--max-new-tokens", "100"], "do not fit the context of 48 positions"),
        (["DIR", "9", "--temperature", "-1"], "temperature is -1.0"),
        (["DIR", "9", "--top-p", "2"], "top_p is 2.0"),
        (["DIR", "9", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["nowhere", "9"], "nowhere is not a folder: a checkpoint is a folder with config.json and model.safetensors"),
        (["BARE", "9"], "has no tokenizer.json, so it cannot read text"),
        (["BROKEN", "9"], "model.safetensors is damaged: "),
    ],
)
def test_generate_rejects_in_a_line(
    arguments: list[str], words: str, folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    places = {"DIR": folder, "BARE": tmp_path / "bare", "BROKEN": tmp_path / "broken"}
    out, err = says(capsys, "generate", *(places.get(word, word) for word in arguments), code=2)
    assert words in err and out == ""


# eval


def test_eval_at_once_and_step_by_step_agree(folder: Path, text: Path, capsys: Any) -> None:
    result = json.loads(says(capsys, "eval", folder, text, "--json")[0])
    at_once, stepwise = result["at_once"], result["stepwise"]
    assert result["bytes"] == len(TEXT.encode()) and result["mask"] == "causal"
    assert at_once["loss"] < 3.5
    assert at_once["perplexity"] == pytest.approx(math.exp(at_once["loss"]))
    assert at_once["bits_per_byte"] == pytest.approx(at_once["loss"] * result["tokens"] / math.log(2) / result["bytes"])
    assert stepwise["loss"] == pytest.approx(at_once["loss"], abs=1e-5)
    assert 0 < result["greatest_difference"] < 1e-4 and 0 < result["greatest_logit_difference"] < 1e-4


def test_eval_prints_a_table(folder: Path, text: Path, capsys: Any) -> None:
    out, _ = says(capsys, "eval", folder, text, text, "--limit", 60)
    lines = out.splitlines()
    assert lines[0].startswith("118 tokens, ") and lines[0].endswith("bytes, mask causal")
    assert lines[1].split() == ["teacher-forced", "step", "by", "step"]
    assert [line.split("  ")[0] for line in lines[2:5]] == ["loss, nats a token", "perplexity", "bits per byte"]
    assert lines[5].startswith("greatest difference of one position: ")
    short = says(capsys, "eval", folder, text, "--limit", 60, "--at-once")[0]
    assert "step by step" not in short and "difference" not in short


def test_eval_of_weights_that_are_not_numbers_says_so(folder: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    next(weights[name] for name in weights if "q_proj" in name).fill_(math.nan)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for options in ((), ("--json",)):
        out, error = says(capsys, "eval", broken, text, "--limit", 60, *options, code=2)
        assert out == "" and "the loss is nan" in error and "Fix:" in error


def test_eval_rejects_in_a_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert "cannot read" in says(capsys, "eval", folder, tmp_path / "no.txt", code=2)[1]
    (tmp_path / "empty.txt").touch()
    assert "has no text in it" in says(capsys, "eval", folder, tmp_path / "empty.txt", code=2)[1]
    assert "Missing argument" in says(capsys, "eval", folder, code=2)[1]


def decoder(mask: str) -> Decoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 10}
    model = Decoder(DecoderConfig(vocab_size=30, **sizes, mask=mask)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return model


def test_evaluating_is_the_mean_loss_of_each_token_given_those_before_it_in_its_row() -> None:
    model = decoder("causal & window(4)")
    texts = [torch.randint(30, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (34, 2, 1, 11, 10)]
    wanted = []
    with torch.no_grad():
        for text in texts:
            for at in range(1, len(text)):
                row = text[(at - 1) // 10 * 10 : at]
                wanted.append(-model(torch.tensor([row]))[0, -1].log_softmax(-1)[text[at]].item())
    seen: list[int] = []
    result = evaluate(model, texts, size_in_bytes=200, progress=seen.append)
    assert result.tokens == len(wanted) == seen[-1] == 33 + 1 + 0 + 10 + 9
    assert result.at_once.loss == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)
    assert result.stepwise is not None and result.stepwise.loss == pytest.approx(result.at_once.loss, abs=1e-5)
    assert result.at_once.bits_per_byte == pytest.approx(sum(wanted) / math.log(2) / 200, abs=1e-5)
    assert result.greatest_difference is not None and result.greatest_difference < 1e-4


def test_a_model_that_peeks_is_another_one_step_by_step() -> None:
    texts = [list(range(20))]
    result = evaluate(decoder("full"), texts, 20)
    assert result.greatest_difference is not None and result.greatest_difference > 0.1
    assert result.greatest_logit_difference is not None and result.greatest_logit_difference > 0.1
    assert evaluate(decoder("full"), texts, 20, stepwise=False).at_once == result.at_once


def test_evaluating_leaves_the_model_in_the_mode_it_was_in_and_needs_something_to_predict() -> None:
    model = decoder("causal").train()
    evaluate(model, [[1, 2]], 1)
    assert model.training
    with pytest.raises(DataError, match="there is nothing to predict: the text has no token after the first"):
        evaluate(model, [[1]], 1)


# a model without attention, on the same road


def test_a_recurrent_model_is_trained_written_with_scored_and_audited(text: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "lstm"
    sizes = [
        "--vocabulary",
        300,
        "--hidden",
        32,
        "--layers",
        1,
        "--context",
        32,
        "--batch",
        4,
        "--steps",
        40,
        "--lr",
        0.02,
    ]
    says(capsys, "train", text, "--out", folder, "--cell", "lstm", *sizes)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "lowtri_recurrent"
    out, _ = says(capsys, "generate", folder, "9 green", "--max-new-tokens", 8)
    assert out.startswith("9 green") and len(out) > len("9 green")
    result = json.loads(says(capsys, "eval", folder, text, "--json")[0])
    assert result["greatest_difference"] < 1e-5
    assert "no leak found" in says(capsys, "audit", folder)[0]


def test_recurrent_models_reject_options_of_decoders(text: Path, tmp_path: Path, capsys: Any) -> None:
    _, err = says(capsys, "train", text, "--out", tmp_path / "a", "--cell", "tanh", *SIZES, code=2)
    assert "cell is 'tanh'; expected one of lstm, gru, rnn" in err
    _, err = says(
        capsys, "train", text, "--out", tmp_path / "b", "--cell", "gru", "--mask", "window(3)", *SIZES, code=2
    )
    assert "a recurrent model is causal" in err
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_prompt_that_is_not_utf8_is_rejected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path), "caf\udce9"]) == 2
    assert "the prompt is not UTF-8" in capsys.readouterr().err
