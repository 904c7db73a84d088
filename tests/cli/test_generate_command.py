"""generate and audit from the command line, with a model in every form, and what each says when it cannot go on."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import outcome, printed, refused
from model_files import (
    SIZES,
    decoder_folder,
    gguf_file,
    hub_cache,
    recurrent_folder,
    tokenizer,
    transformers_folder,
    varied,
)

import lowtri
from lowtri.cli.models import _until
from lowtri.cli.terminal import clean
from lowtri.integrations.transformers import load_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    window = transformers_folder(root / "window", "Mistral", sliding_window=3)
    return {
        "transformers": transformers_folder(root / "llama"),
        "window": window,
        "hub": window,
        "gguf": gguf_file(root / "m.gguf"),
        "decoder": decoder_folder(root / "decoder", mask="causal & window(4)"),
        "recurrent": recurrent_folder(root / "recurrent"),
    }


@pytest.fixture
def folder(models: dict[str, Any]) -> Path:
    path: Path = models["decoder"]
    return path


FORMS = ["transformers", "window", "hub", "gguf", "decoder", "recurrent"]


@pytest.mark.parametrize("form", FORMS)
def test_both_verbs_read_each_form(
    form: str, models: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = models[form]
    if form == "hub":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub_cache(tmp_path, models[form])))
        name = "some-org/a.model_1"
    expected = "".join(lowtri.generate(load_model(models[form]).model, "9 green", 6))
    out, err = outcome(capsys, "generate", name, "9 green", "--max-new-tokens", 6)
    assert out == f"9 green{clean(expected)}\n" and "tokens, " in err.splitlines()[-1]
    assert printed(capsys, "generate", name, "9 green", "--max-new-tokens", 6, "--no-cache") == out
    reached = {"window": "causal & window(3) x 2 layers", "decoder": "causal & window(4) x 2 layers"}
    out = printed(capsys, "audit", name, "--length", 12, "--probes", "change")
    out = out.partition("\n")[2]  # behind the measured mask
    assert out.startswith(f"no leak found against {reached.get('window' if form == 'hub' else form, 'causal')}"), out


def test_an_encoder_sees_both_directions_and_generate_refuses_a_model_that_does(tmp_path: Path, capsys: Any) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    varied(transformers.BertModel(transformers.BertConfig(**sizes))).save_pretrained(tmp_path / "encoder")
    audit = "audit", tmp_path / "encoder", "--probes", "change"
    assert printed(capsys, *audit).startswith("measured mask: full\nno leak found against full: ")
    assert "leak against causal: " in outcome(capsys, *audit, "--mask", "causal", code=1)[0]
    both = varied(transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=False)))
    both.save_pretrained(tmp_path / "both")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer()).save_pretrained(tmp_path / "both")
    err = refused(capsys, "generate", tmp_path / "both", "9 green")
    assert "BertLMHeadModel sees tokens that are generated later: it cannot write a text.\nFix: " in err


@pytest.mark.parametrize("form", ["transformers", "decoder"])
@pytest.mark.parametrize("mask", ["full", "causal | first(9)", "band(1, 1)", "causal & window(3) | chunks(5)"])
def test_generating_with_a_mask_that_shows_the_future_is_an_error(
    mask: str, form: str, models: dict[str, Any], capsys: Any
) -> None:
    err = refused(capsys, "generate", models[form], "9", "--mask", mask)
    assert f"the mask {mask} shows tokens that are generated later" in err
    assert "Fix: --mask with a causal mask" in err


def test_a_folder_whose_own_mask_shows_the_future_is_refused(tmp_path: Path, capsys: Any) -> None:
    err = refused(capsys, "generate", decoder_folder(tmp_path / "full", mask="full"), "9")
    assert "generate: the mask full shows tokens that are generated later: a model cannot write with it" in err


@pytest.mark.parametrize("form", ["transformers", "decoder"])
def test_a_prefix_within_the_prompt_may_be_seen_from_both_sides(form: str, models: dict[str, Any], capsys: Any) -> None:
    """The tokenizer begins with a token of its own."""
    out = printed(capsys, "generate", models[form], "9 gr", "--mask", "causal | first(5)", "--max-new-tokens", 2)
    assert out[:4] == "9 gr"


@pytest.mark.parametrize("form", ["transformers", "gguf", "decoder"])
def test_the_mask_of_a_model_is_replaced_by_the_users(form: str, models: dict[str, Any], capsys: Any) -> None:
    arguments = ["generate", models[form], "9 green bottles hanging on", "--max-new-tokens", 12]
    own, narrow = (printed(capsys, *arguments, *more) for more in ([], ["--mask", "window(1)"]))
    assert own != narrow
    assert printed(capsys, *arguments, "--mask", "window(1)", "--no-cache") == narrow
    assert "causl" in refused(capsys, *arguments, "--mask", "causl")


# Chat templates


@pytest.mark.parametrize("form", ["transformers", "gguf"])
def test_chat_prints_the_answer_to_the_template_alone(form: str, models: dict[str, Any], capsys: Any) -> None:
    prompt = "[user] Why?\n[assistant] "
    model, its_tokenizer, _ = load_model(models[form])
    ids = its_tokenizer.encode(prompt, add_special_tokens=False)
    tokens = list(lowtri.generate(model, ids, 5))
    out, err = outcome(capsys, "generate", models[form], " Why? ", "--chat", "--max-new-tokens", 5, "--stats")
    assert out.rstrip("\n") in clean(its_tokenizer.decode(tokens, skip_special_tokens=True))
    assert f"{len(ids)} tokens" in err.splitlines()[-2]


def with_template(folder: Path, path: Path, template: str | None) -> Path:
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").unlink()
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template: the model continues texts.\nFix: leave --chat out"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses: roles must alternate\nFix: leave --chat out, or an",
        ),
        ("{{ messages.__class__.__mro__ }}", "refuses: access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__.os.system('touch ran') }}", "refuses: access to attribute '__init__'"),
        ("{% for", "refuses: "),
    ],
)
def test_a_template_runs_in_a_sandbox(
    template: str | None,
    words: str,
    models: dict[str, Any],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = with_template(models["transformers"], tmp_path / "model", template)
    err = refused(capsys, "generate", changed, "9", "--chat")
    assert words in err and not (tmp_path / "ran").exists()


# What generate prints


def test_one_token_is_one_token(folder: Path, capsys: Any) -> None:
    err = outcome(capsys, "generate", folder, "9", "--max-new-tokens", 1, "--stats")[1]
    begun, second = err.splitlines()  # the tokenizer puts its own token in front of the "9"
    assert begun.startswith("prompt       2 tokens, ") and second == "decode        1 token,      0.0 a second"
    assert outcome(capsys, "generate", folder, "9", "--max-new-tokens", 1)[1].startswith("1 token, ")


@pytest.mark.sweep
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
    options = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.9, "--json", "--max-new-tokens", 12]
    drawn = [printed(capsys, "generate", folder, "9", *options, "--seed", seed) for seed in (1, 1, 2)]
    texts = [json.loads(one)["text"] for one in drawn]
    assert texts[0] == texts[1] != texts[2]
    result = json.loads(drawn[0])
    assert result["prompt"] == "9" and 0 < result["tokens"] <= 12 and result["tokens_per_second"] > 0


def test_generate_ends_before_a_stop_text(folder: Path, capsys: Any) -> None:
    whole = "9 green" + "".join(lowtri.generate(load_model(folder).model, "9 green", 20))
    stop = whole[12:15]
    out, _ = outcome(capsys, "generate", folder, "9 green", "--max-new-tokens", 20, "--stop", "never", "--stop", stop)
    assert out == clean(whole[: whole.index(stop, 7)]) + "\n"


class Stdin:
    """A stdin that holds these bytes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_a_prompt_comes_from_a_file_or_from_stdin(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = printed(capsys, "generate", folder, "9 green", "--max-new-tokens", 5)
    (tmp_path / "prompt.txt").write_bytes(b"9 green\r\n")
    for arguments in (["--prompt-file", tmp_path / "prompt.txt"], ["-"], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", Stdin(b"9 green\n"))
        assert printed(capsys, "generate", folder, *arguments, "--max-new-tokens", 5) == wanted
    prompts = {b"two\n\n": "two\n", b" a ": " a "}  # one line break at the end, and nothing else, is left out
    for content, prompt in prompts.items():
        monkeypatch.setattr(sys, "stdin", Stdin(content))
        assert json.loads(printed(capsys, "generate", folder, "-", "--max-new-tokens", 1, "--json"))["prompt"] == prompt


def test_a_prompt_that_is_missing_given_twice_or_no_text(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for arguments in ([], ["9", "--prompt-file", tmp_path / "latin.txt"]):
        assert "one prompt is expected. Fix: " in refused(capsys, "generate", folder, *arguments)
    words = "the prompt is not UTF-8: "
    assert words in refused(capsys, "generate", folder, "--prompt-file", tmp_path / "latin.txt")
    assert "no.txt: No such file" in refused(capsys, "generate", folder, "--prompt-file", tmp_path / "no.txt")
    monkeypatch.setattr(sys, "stdin", Stdin(b"\n"))
    assert "the prompt in stdin is empty. Fix: at least one character" in refused(capsys, "generate", folder, "-")


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


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not weights")


@pytest.mark.parametrize(
    ("harm", "arguments", "words"),
    [
        (None, ["9", "--stop", ""], "--stop is empty. Fix: at least one character"),
        (None, ["9 green bottles " * 20], "tokens, but the model's context has 64 positions.\nFix: a shorter prompt"),
        (None, ["9", "--max-new-tokens", "100"], "do not fit the context of 64 positions"),
        (None, ["9", "--temperature", "-1"], "temperature is -1.0"),
        (None, ["9", "--temperature", "1", "--top-p", "2"], "top_p is 2.0"),
        (None, ["9", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (None, ["9", "--dtype", "int8"], "dtype is 'int8'. Fix: float32, bfloat16, float16, float64"),
        (shutil.rmtree, ["9"], "is not a folder or a GGUF file. Fix: "),
        (
            without_tokenizer,
            ["9"],
            "has no tokenizer, so it cannot read text. Fix: its tokenizer.json in the same folder",
        ),
        (without_weights, ["9"], "model.safetensors is damaged: "),
    ],
)
def test_generate_rejects_in_a_line(
    harm: Callable[[Path], None] | None, arguments: list[str], words: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    if harm is not None:
        harm(copied)
    err = refused(capsys, "generate", copied, *arguments)
    assert words in err


def test_a_misspelt_model_is_suggested(models: dict[str, Any], capsys: Any) -> None:
    for verb in (["generate", "{}", "x"], ["audit", "{}"]):
        for name, meant in (("smolm2", "smollm2"), (models["decoder"].parent / "decodr", models["decoder"])):
            err = refused(capsys, *(word.format(name) for word in verb))
            assert err.endswith(f"\nDid you mean {meant}?\n")
        err = refused(capsys, *(word.format("nowhere") for word in verb))
        assert "nowhere is not a folder" in err and "Did you mean" not in err


def test_an_empty_prompt_begins_a_text_where_the_tokenizer_can(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert printed(capsys, "generate", folder, "", "--max-new-tokens", 5).endswith("\n")
    shutil.copytree(folder, tmp_path / "bare")
    file = tmp_path / "bare" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    err = refused(capsys, "generate", tmp_path / "bare", "")
    assert "the prompt is empty, and " in err and "has no token that begins a text. Fix: at least one character" in err


def test_a_tokenizer_that_fails_on_a_text_is_an_error_in_a_line(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Such as one of whole words, without a token for those that it does not know."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    shutil.copytree(folder, tmp_path / "words")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="d"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    err = refused(capsys, "generate", tmp_path / "words", "9 green")
    assert "cannot read this text: WordLevel error: " in err and "Fix: another text" in err


def test_thai_never_ends_in_half_a_character(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of bytes: a Thai letter is three tokens."""
    ids = tokenizer().encode("สวัสดี", add_special_tokens=False).ids
    assert len(ids) == 18
    for n in range(1, 19):
        monkeypatch.setattr(lowtri, "generate", lambda *_, n=n, **__: iter(ids[:n]))
        out, err = outcome(capsys, "generate", folder, "x", "--max-new-tokens", n)
        assert out == f"x{'สวัสดี'[: n // 3]}\n" and err.startswith(f"{n} token")


def test_logits_that_are_no_numbers_are_an_error_on_a_line_of_its_own(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    model = load_model(folder).model
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    out, err = outcome(capsys, "generate", tmp_path, "hello", "--max-new-tokens", 2, code=2)
    assert out == "hello\n" and "logits hold nan" in err


@pytest.mark.sweep
def test_ctrl_c_keeps_the_figures(folder: Path) -> None:
    """The model generates without end, in a context that does not end."""
    program = """
import signal, sys, itertools, time, lowtri
from lowtri.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored
lowtri.generate = lambda *_, **__: (time.sleep(0.01) or 70 for _ in itertools.count())
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, "generate", str(folder), "x", "--stats"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.read(4)[0] == "x"
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    lines = err.splitlines()
    assert [line[:8] for line in lines] == ["prompt  ", "decode  ", "lowtri: "] and "a second" in lines[1]
    assert lines[2] == "lowtri: interrupted"
