"""Bad options and files on the command line: exit code 2, a line that names the argument and the fix, and no file written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lowtri
from demo.stage import main as demo
from lowtri.cli import main as frame
from lowtri.errors import DataError
from lowtri.files import write_text, writing


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr shows of a call that must end in exit code 2 with an empty stdout."""
    assert frame.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "unforeseen" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "--heads", "100000"], "'--heads': Input should be less than or equal to 64"),
        (["explain", "word " * 5000], "explain: 5,000 queries and 5,000 keys in 1 head have 25,000,000 pairs"),
        (["explain", "--seed", str(2**64)], "'--seed': Input should be less than or equal to"),
        (["explain", "--out", "steps.xyz"], "steps.xyz ends in none of .html, .json, .txt, .svg, .png, .pdf. Fix: steps.html"),
        (["explain", "--html", "steps"], "steps ends in none of .html"),
        (["lesson", "--out", "les.svg"], "les.svg ends in none of .html. Fix: les.html"),
        (["mask", "causal", "--out", "m."], "m. ends in none of .svg, .html, .png, .pdf. Fix: m.svg"),
        (["mask", "heads([causal, full])", "--n", "4", "--head", "5"], "Fix: a row from 0 to 0, a head from 0 to 1."),
        (["mask", "window(-1)"], "window: n is -1, but it must lie in 1 .. 2**62. Fix: n=1."),
        (["bench", "--threads", "100000"], "bench: --threads is 100000, but this process may use"),
    ],
)  # fmt: skip
def test_bad_options_name_themselves_and_the_fix(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in error_of(arguments, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "scores.txt is empty. Fix: a row of numbers for each token"),
        ("1 nan\n2 3\n", "scores.txt: the number at (0, 1) is nan. Fix: finite numbers; --mask hides pairs"),
        ("1 2\n2 -inf\n", "scores.txt: the number at (1, 1) is -inf."),
        ("[1, 2]", "an array of the shape (2,). Fix: an array of the shape (rows, columns) or"),
        ("1 2\n3\n", "scores.txt is no table of numbers. Fix: a row for each token"),
    ],
)
def test_scores_that_are_no_table_say_what_is_wrong(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scores.txt"
    file.write_text(content, encoding="utf-8")
    assert words in error_of(["explain", "--scores", str(file)], capsys)


@pytest.mark.parametrize("ending", [".html", ".json", ".txt", ".svg"])
def test_explain_writes_what_the_ending_names(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"steps{ending}"
    assert frame.main(["explain", "--out", str(file)]) == 0
    start = {".html": "<!doctype html>", ".json": "{", ".txt": "mask", ".svg": "<svg"}[ending]
    assert start in file.read_text(encoding="utf-8")[:200]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; expected a number, at least 0. Fix: 0 for greedy"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 2.0}, "top_p is 2.0; expected a probability above 0, at most 1. Fix: top_p=None keeps all"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_sampling_options_out_of_range_have_a_fix(option: dict[str, float], words: str) -> None:
    with pytest.raises(lowtri.CallError) as error:
        list(lowtri.generate(lambda ids: np.zeros((*ids.shape, 4)), [1], max_new_tokens=1, **option))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("number", "fix"), [(28, "free some space, or write to another disk"), (13, "a file in a folder that exists")]
)
def test_the_fix_of_a_file_that_cannot_be_written_depends_on_the_reason(number: int, fix: str) -> None:
    with pytest.raises(DataError, match=rf"save: m.svg cannot be written: .*\. Fix: {fix}"), writing("save", "m.svg"):
        raise OSError(number, "why")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: you tried")])
def test_sizes_that_do_not_fit_into_memory_are_bad_input(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame._report(error) == 2
    assert "not enough memory for these sizes. Fix: smaller ones" in capsys.readouterr().err


def test_the_demo_reports_an_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    write_text(file, "kept")
    with pytest.raises(SystemExit) as ended:
        demo({}, ["--out", str(file)])
    assert ended.value.code == 2 and file.read_text() == "kept"
    assert f"--out {file}: File exists. Fix: a folder" in capsys.readouterr().err
