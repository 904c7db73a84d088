"""Bad options and files on the command line: exit code 2, a line that names the argument and the fix, and no file written."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import refused

from demo.stage import main as demo


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
    assert words in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_the_demo_reports_an_out_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(SystemExit) as ended:
        demo({}, ["--out", str(file)])
    assert ended.value.code == 2 and file.read_text() == "kept"
    assert f"--out {file}: File exists. Fix: a folder" in capsys.readouterr().err
