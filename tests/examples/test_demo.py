"""The demo: its cheap acts run for real, the trained ones on a small experiment; the whole of it is among the sweeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo import PARTS, context, page, paths, peeking, steps, tables, who, why, writing
from demo.context import Context, Result
from demo.run import main
from lowtri.cli.main import main as lowtri_main
from lowtri.training.corpus import Document
from lowtri.training.recipe import Recipe
from why_mask.experiment import Setting, why_mask


def named_in(page: str) -> set[str]:
    return {name for name in re.findall(r'(?:src|href)="([^"]+)"', page) if not name.startswith("#")}


def test_cheap_acts_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["--out", str(out), "--part", "who", "--part", "steps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"(\d+) of \1 checks passed", lines[-1])
    assert lines[-2] == str(out / "index.html")
    assert lines.index("1. Every step, with its numbers") < lines.index("2. Who sees whom")  # in their order
    html = (out / "index.html").read_text(encoding="utf-8")
    assert lines[-1] in html and "0.6394" in html and "✗" in html
    assert named_in(html) == {"steps.html", "steps.txt", "who-1.svg", "who-2.svg", "who-3.svg"}
    assert all((out / name).stat().st_size for name in named_in(html))
    assert "http" not in html  # nothing is fetched
    assert not list(out.glob(".*"))


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--part", "who", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [part["part"] for part in shown["parts"]] == ["who"]
    assert all(check["passed"] for check in shown["parts"][0]["checks"])


def test_a_broken_promise_and_an_act_that_breaks_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Context) -> Result:
        result = Result("nothing <b>")
        result.check("one is two", 1 == 2)
        return result

    monkeypatch.setattr(who, "run", broken)
    monkeypatch.setattr(paths, "run", lambda _: 1 / 0)
    assert main(["--out", str(tmp_path), "--part", "steps", "--part", "who", "--part", "paths"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "4 of 6 checks passed"
    assert "✗ FAILED: one is two" in out
    assert "✗ FAILED: it runs to its end: ZeroDivisionError" in out
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert '<li class="failed">one is two</li>' in html and "nothing &lt;b&gt;" in html


def test_the_page_fits_narrow_and_dark_screens_and_shows_what_is_invisible() -> None:
    result = Result("one\n\u202etwo\x1b[2J \ud800")
    result.check("kept \u2066", True)
    html = page.as_html([page.Part("x", "X", "A part.", result, 1.0)], "1 of 1", "a machine")
    assert "one\n\\u202etwo\\x1b[2J \\ud800" in html and "kept \\u2066" in html
    assert all(c == "\n" or c.isprintable() for c in html)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "img { max-width: 100%; height: auto" in style  # smaller in its own proportions
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"(--\w+):", light))
    assert names == set(re.findall(r"(--\w+):", dark)) == set(re.findall(r"var\((--\w+)\)", style))


def test_an_unknown_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "new"), "--part", "song"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "--part" in message and all(name in message for name in PARTS)
    assert not (tmp_path / "new").exists()


def test_the_folder_runs_as_a_program(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "examples" / "demo"
    command = [sys.executable, folder, "--out", tmp_path / "out", "--part", "who"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert re.fullmatch(r"(\d+) of \1 checks passed", done.stdout.splitlines()[-1])


def test_all_paths_lead_to_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_N", 160)
    result = paths.run(Context(tmp_path))
    assert len(result.checks) == 10 and all(check.passed for check in result.checks), result.checks
    assert "token by token with a cache" in result.text


def test_figures_that_are_not_the_notebooks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps._FIGURES, "output", [[0.6038, 0.7434], [-0.0062, 0.6074], [3.4989, 2.2427]])
    assert not steps.run(Context(tmp_path)).checks[0].passed


@pytest.mark.sweep
def test_the_acts_that_look_at_trained_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Setting(
        layers=2, hidden=32, rows=4, prompt=8, recipe=Recipe(steps=40, batch=8, context=48, lr=5e-3, validate_every=20)
    )
    text = [Document("rhyme", "the black cat sat on the mat and saw the dog.\n" * 400)]
    monkeypatch.setattr(context, "why_mask", lambda setting, note: why_mask(setting, documents=text, note=note))
    said: list[str] = []
    played = Context(tmp_path, said.append, tiny)
    shown = why.run(played)
    assert shown.pictures == ["why-mask.png"] and "Is a mask needed?" in shown.text
    assert shown.checks[0].passed  # that much holds for any weights
    assert any("mask full" in line for line in said)
    wrote = writing.run(played)
    assert all(check.passed for check in wrote.checks), wrote.checks
    assert "Does it need its own output?" in wrote.text
    caught = peeking.run(played)
    assert all(check.passed for check in caught.checks), caught.checks
    words = re.compile(r"caught, \d+ pairs, the first \(0, 1\) in model\.layers")
    assert any(words.search(check.text) for check in caught.checks), caught.checks
    counts = [re.search(r"(\d+) pairs", text) for text in (caught.checks[1].text, caught.text)]
    assert (
        len({count[1] for count in counts if count}) == 1
    )  # one count of the same pairs in the act and in its verdict
    for result in (shown, wrote, caught):
        assert all((tmp_path / name).stat().st_size for name in [*result.pictures, *result.files])
    assert lowtri_main(["generate", str(tmp_path / "with-the-mask"), "the black", "--max-new-tokens", "4"]) == 0


@pytest.mark.parametrize("pair", [tables.TIMES, tables.KIN], ids=["times", "kin"])
def test_the_tables_have_both_columns_whole(pair: tables.Pair) -> None:
    title, columns, rows = pair
    text = tables.as_text(pair)
    assert title in text and all(name in text for name in columns)
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.replace("│", " ").split())
    assert all(question.split()[0] in words for question, *_ in rows)
    assert {word for row in rows for cell in row for word in cell.split()} <= set(words.split())


@pytest.mark.sweep
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    assert re.fullmatch(r"(\d+) of \1 checks passed", capsys.readouterr().out.splitlines()[-1])
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert all((tmp_path / name).is_file() for name in named_in(html))
    assert all(f'id="{name}"' in html for name in PARTS)
