"""What reaches the terminal: control characters are spelled out in everything that a verb writes, and ASCII has a sign for each."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import decoder_folder

from lowtri.cli import main as frame
from lowtri.cli import terminal

# A title, a cleared screen, a colour of one character, an order that is turned round, a new line, and what hides.
HOSTILE = "\x1b]0;t\x07\x1b[2J\x9b31m\u202e\u200b\rx\udc80"


def is_clean(text: str) -> bool:
    return terminal.clean(text) == text and not {"\x1b", "\x07", "\x9b", "\r", "\x7f", "\u202e"} & set(text)


def run(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int | None = None) -> str:
    """stdout and stderr of a call, both clean."""
    capsys.readouterr()
    ended = frame.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert is_clean(out) and is_clean(err), (out, err)
    assert ended not in (70, 130) and code in (None, ended), err
    return out + err


@given(st.text())
def test_what_is_clean_stays_and_nothing_else_passes(text: str) -> None:
    shown = terminal.clean(text)
    assert terminal.clean(shown) == shown
    assert all(c in "\n\t\u200c\u200d" or c.isprintable() or c.isspace() for c in shown)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    if text.isprintable():
        assert shown == text


@given(
    st.recursive(
        st.text() | st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_is_read_as_before(data: Any) -> None:
    written = terminal.clean_json(json.dumps(data, ensure_ascii=False, indent=2))
    assert json.loads(written) == data and is_clean(written)


def test_texts_of_every_script_stay() -> None:
    for text in ("黑\u3000猫 ที่นี่", "می\u200cخواهم", "👩\u200d💻", "\tprix\u00a0: 3\u202f€", "a\r\nb"):
        assert terminal.clean(text) == text.replace("\r\n", "\n")
    assert terminal.clean("a\x1b[2J\u202eb\x85\rc\x7f") == r"a\x1b[2J\u202eb\x85\rc\x7f"


def test_what_libraries_write_on_stderr_is_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    with terminal.streams():
        print(f"a library names {HOSTILE}", file=sys.stderr)
        sys.stderr.writelines(["\r\x1b[K50 %", "\n"])
        assert sys.stderr.isatty() is before.isatty()
    assert sys.stderr is before
    assert capsys.readouterr().err == (
        "a library names \\x1b]0;t\\x07\\x1b[2J\\x9b31m\\u202e\\u200b\rx\\udc80\n\r\x1b[K50 %\n"
    )


def test_a_traceback_that_is_asked_for_is_cleaned(tmp_path: Path) -> None:
    environment = os.environ | {"LOWTRI_TRACEBACK": "1"}
    command = [sys.executable, "-m", "lowtri", "mask", "causal \x1b[2J"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "Traceback" in ran.stderr and is_clean(ran.stderr)


def test_errors_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([HOSTILE], ["--" + HOSTILE], ["lesson", "--lang", HOSTILE]):
        assert r"\x1b[2J" in run(capsys, *arguments, code=2)
    run(capsys, "bench", "--threads", "\x1b[2J", code=2)


def test_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert r"\x1b[2J" in run(capsys, "mask", f"causal & {HOSTILE}", code=2)
    assert r"\x1b" in run(capsys, "mask", "causal", "--tokens", f"{HOSTILE} cat", "--ticks", code=0)
    assert r"\x1b[2J" in run(capsys, "mask", "causal", "--svg", f"{tmp_path}/{HOSTILE}/m.svg", code=2)
    assert r"\x1b[2J" in run(capsys, "mask", "causal", "--svg", f"{tmp_path}/\x1b[2J.svg", code=0)


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "explain", f"a {HOSTILE}", code=0)
    assert r"\x1b" in said
    shown = run(capsys, "explain", f"a {HOSTILE}", "--json", code=0)
    assert json.loads(shown)["tokens"][1].startswith("\x1b]0;t")
    for option in ("--encodings", "--scores", "--model"):
        assert r"\x1b]0;t" in run(capsys, "explain", "a b", option, f"{tmp_path}/{HOSTILE}", code=2)
    assert r"\x1b]0;t" in run(capsys, "explain", "a b", "--mask", HOSTILE, code=2)
    (tmp_path / "\x1b[2J.txt").write_text("\x1b[2J", encoding="utf-8")
    assert r"\x1b[2J" in run(capsys, "explain", "a b", "--scores", tmp_path / "\x1b[2J.txt", code=2)


def test_colours_of_our_own_pass(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write("\x1b[1mbold\x1b[0m \x1b[31mred", colours=True)
    assert capsys.readouterr().out == "\x1b[1mbold\x1b[0m \\x1b[31mred\n"


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer whose tokens clear the terminal, in a folder whose name does, and a prompt that does."""
    folder = tmp_path / "\x1b[2Jmodel"
    decoder_folder(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["vocab"] = {f"{t}\x1b[2J": i for t, i in content["model"]["vocab"].items()}
    content["model"].pop("merges", None)
    content["model"].pop("unk_token", None)
    known = [token["content"] for token in content["added_tokens"]]
    content["model"]["vocab"] |= {name: i for i, name in enumerate(known)}
    path.write_text(json.dumps(content), encoding="utf-8")
    run(capsys, "generate", folder, "9 green", "--max-new-tokens", 4)
    run(capsys, "generate", folder, "9 green", "--chat", code=2)
    assert r"\x1b[2J" in run(capsys, "generate", tmp_path / HOSTILE, "9", code=2)


@pytest.mark.parametrize("verb", ["audit", "verify"])
def test_audit_and_verify(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert r"\x1b[2J" in run(capsys, verb, f"{tmp_path}/{HOSTILE}.py:f", code=2)
    file = tmp_path / "\x1b[2J.py"
    file.write_text('def f(*args, **kwargs):\n    raise RuntimeError("\\x1b[2J\\u202e")\n', encoding="utf-8")
    options = ["--dtypes", "float32", "--cases", "window"] if verb == "verify" else []
    said = run(capsys, verb, f"{file}:f", *options)
    assert r"\x1b[2J" in said
    assert r"\x1b[2J" in run(capsys, verb, f"{file}:\x1b[2J", code=2)
    json_of = run(capsys, verb, f"{file}:f", *options, "--json")
    assert is_clean(json_of)


def test_audit_of_a_module_with_a_hostile_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        'class Net(torch.nn.Module):\n    """Sees the future."""\n'
        '    def __init__(self):\n        super().__init__()\n        self.add_module("\\x1b[2J", torch.nn.Linear(4, 4))\n'
        '    def forward(self, x):\n        return self._modules["\\x1b[2J"](x.flip(1))\n'
        'Net.__name__ = Net.__qualname__ = "\\x1b[2JNet"\n'
        "def make():\n    return Net(), torch.randn(1, 6, 4)\n",
        encoding="utf-8",
    )
    assert "leak" in run(capsys, "audit", f"{file}:make", code=1)
    out = run(capsys, "audit", f"{file}:make", "--json", code=1)
    assert json.loads(out)["ok"] is False


def test_lesson_and_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert r"\x1b[2J" in run(capsys, "lesson", "--out", f"{tmp_path}/{HOSTILE}/x.html", code=2)
    monkeypatch.setattr("lowtri.doctor.cpu_name", lambda: f"CPU {HOSTILE}")
    assert r"CPU \x1b]0;t\x07" in run(capsys, "doctor", "--no-measure", code=0)
    assert json.loads(run(capsys, "doctor", "--no-measure", "--json", code=0))["cpu"]["name"] == f"CPU {HOSTILE}"


def test_verbs_print_with_the_one_function_alone() -> None:
    for path in Path(terminal.__file__).parent.glob("*.py"):
        calls = [x for x in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(x, ast.Call)]
        names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
        assert names.count("print") == (path.name == "terminal.py"), path


def in_ascii(*arguments: str, encoding: str = "ascii") -> str:
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "lowtri", *arguments]
    ran = subprocess.run(command, capture_output=True, env=environment, check=True)
    return ran.stdout.decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_encoding_without_the_signs_gets_one_for_each(encoding: str) -> None:
    picture = in_ascii("mask", "causal & window(9)", "--n", "128", encoding=encoding).splitlines()[1:65]
    empty = "." if encoding == "ascii" else "·"
    assert {sign for line in picture for sign in line} == {"#", "+", empty}
    table = in_ascii("mask", "causal", "--tokens", "a 黑 猫", "--ticks", encoding=encoding)
    rows = table[: table.index("\n\n")]
    assert rows.count("v") == 6 and rows.count("x") == 3 and "\\u9ed1" in table and "\\u732b" in table


def test_no_two_signs_are_one_in_ascii() -> None:
    signs = "·░▒▓█╱?✓✗…─␣⏎⇥→∅×"
    shown = signs.translate(terminal._ASCII_SIGNS)
    assert shown.isascii() and len(set(shown)) == len(signs)
