"""The demo: its cheap acts run for real, those of trained models on a small experiment; all of it is among the sweeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from corpus import Recipe
from demo import tour
from demo.asked import FIGURES, KIN, TIMES
from demo.stage import DEMO, TOUR, Act, Context, Result, Shown, as_html, main
from demo.tour import ACTS
from lowtri.cli.main import main as lowtri_main
from why_mask.experiment import Setting, why_mask

ROOT = Path(__file__).parents[2]
TINY = Setting(layers=2, hidden=32, rows=4, prompt=8, recipe=Recipe(steps=40, batch=8, context=48, lr=5e-3, every=20))
RHYME = ["the black cat sat on the mat and saw the dog.\n" * 400]


def named_in(page: str) -> set[str]:
    return {name for name in re.findall(r'(?:src|href)="([^"]+)"', page) if not name.startswith("#")}


def test_cheap_acts_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(ACTS, ["--out", str(out), "--part", "masks", "--part", "steps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"(\d+) of \1 checks passed", lines[-1])
    assert lines[-2] == str(out / "index.html")
    assert lines.index("1. Every step, with its numbers") < lines.index("2. Who sees whom")  # in their order
    html = (out / "index.html").read_text(encoding="utf-8")
    assert lines[-1] in html and "0.6394" in html and "✗" in html
    masks = {f"masks-{number}.svg" for number in range(1, 9)}
    assert named_in(html) == {"steps.svg", "steps.html", "steps.txt", *masks}
    assert all((out / name).stat().st_size for name in named_in(html))
    assert "http" not in html  # nothing is fetched
    assert not list(out.glob(".*"))


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ACTS, ["--out", str(tmp_path), "--part", "masks", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [part["part"] for part in shown["parts"]] == ["masks"]
    assert all(check["passed"] for check in shown["parts"][0]["checks"])


def test_a_check_that_fails_and_an_act_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(context: Context) -> Result:
        result = context.result()
        result.say("nothing <b>")
        result.check("one is two", 1 == 2)
        return result

    def raises(context: Context) -> Result:
        raise ZeroDivisionError

    acts = {"steps": ACTS["steps"], "fails": Act("A", "B.", fails), "raises": Act("C", "D.", raises)}
    assert main(acts, ["--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "4 of 6 checks passed"
    assert "✗ FAILED: one is two" in out
    assert "✗ FAILED: it runs to its end: ZeroDivisionError" in out
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert '<li class="failed">one is two</li>' in html and "nothing &lt;b&gt;" in html


def test_the_page_fits_narrow_and_dark_screens_and_shows_what_is_invisible(tmp_path: Path) -> None:
    result = Result(tmp_path)
    result.say("one\n\u202etwo\x1b[2J \ud800")
    result.table(("a", "b"), [("three\u2067", "4")])
    result.check("kept \u2066", True)
    html = as_html([Shown("x", "X", "A part.", result, 1.0)], "1 of 1", "a machine")
    assert "one\n\\u202etwo\\x1b[2J \\ud800" in html and "kept \\u2066" in html and "<td>three\\u2067</td>" in html
    assert all(c == "\n" or c.isprintable() for c in html)
    assert "img { max-width: 100%; height: auto" in html  # smaller in its own proportions
    assert "color-scheme: light dark" in html
    style = html[html.index("<style>") : html.index("</style>")]
    used = set(re.findall(r"var\((--\w+)\)", style[style.index("--good") :]))
    assert used <= set(re.findall(r"(--\w+):", style))


def test_a_picture_stands_for_its_text_on_the_page(tmp_path: Path) -> None:
    result = Result(tmp_path)
    (tmp_path / "there.svg").write_text("<svg/>")
    result.picture("there.svg", text="█·\n██")
    result.table(("name", "size"), [("a", "10"), ("long", "2")])
    assert result.text == "█·\n██\n\nname   size\na        10\nlong      2"
    assert '<img src="there.svg" alt="there"><details><summary>as text</summary><pre>█·' in result.html
    assert result.pictures == ["there.svg"]
    result.picture("there.svg", caption="what it says:\n1 < 2")
    assert result.text.endswith("2\n\nwhat it says:\n1 < 2")
    assert result.html.endswith("<figcaption>what it says:\n1 &lt; 2</figcaption></figure>")


def test_an_unknown_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(ACTS, ["--out", str(tmp_path / "new"), "--part", "song"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "--part" in message and all(name in message for name in ACTS)
    assert not (tmp_path / "new").exists()


def test_the_folder_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "demo", "--out", tmp_path / "out", "--part", "masks"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert re.fullmatch(r"(\d+) of \1 checks passed", done.stdout.splitlines()[-1])


def test_every_act_has_a_sentence_and_pages_name_acts_that_exist() -> None:
    assert all(act.title and act.sentence.endswith((".", "others")) for act in ACTS.values())
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    named = set(re.findall(r"examples/demo --part (\w+)", pages))
    assert named and named <= set(ACTS)


def test_the_tour_computes_more_than_the_demo() -> None:
    assert TOUR.setting == Setting() and DEMO.setting != TOUR.setting
    short, full = ((s.cached[1], s.speed, s.rounds, *s.shards, s.new_tokens) for s in (DEMO, TOUR))
    assert all(a < b for a, b in zip(short, full, strict=True))


def test_all_paths_lead_to_one_answer(tmp_path: Path) -> None:
    result = tour.paths(Context(tmp_path), n=160)
    assert len(result.checks) == 12 and all(check.passed for check in result.checks), result.checks
    assert "token by token with a cache" in result.text


def test_a_cache_keeps_what_later_queries_see(tmp_path: Path) -> None:
    result = tour.cache(Context(tmp_path, replace(DEMO, cached=(128, 300))))
    assert len(result.checks) == 4 and all(check.passed for check in result.checks), result.checks
    assert result.pictures == ["cache-1.svg", "cache-2.svg", "cache-3.svg"]


def test_figures_that_are_not_the_notebooks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, "output", [[0.6038, 0.7434], [-0.0062, 0.6074], [3.4989, 2.2427]])
    assert not tour.steps(Context(tmp_path)).checks[0].passed


@pytest.mark.sweep
def test_the_acts_that_look_at_trained_models(tmp_path: Path) -> None:
    notes: list[str] = []
    train = partial(why_mask, texts=RHYME)
    context = Context(tmp_path, replace(TOUR, setting=TINY), notes.append, train)
    why = tour.why(context)
    assert why.pictures == ["why-mask.png"] and "Is a mask needed?" in why.text
    assert why.checks[0].passed  # that much is true of any weights
    assert any("mask full" in line for line in notes)
    wrote = tour.writing(context)
    assert all(check.passed for check in wrote.checks), wrote.checks
    assert "Does it need its own output?" in wrote.text
    caught = tour.audit(context)
    assert all(check.passed for check in caught.checks), caught.checks
    words = re.compile(r"caught, \d+ pairs, the first \(0, 1\) in model\.layers")
    assert any(words.search(check.text) for check in caught.checks), caught.checks
    counts = [re.search(r"(\d+) pairs", text) for text in (caught.checks[3].text, caught.text)]
    assert len({count[1] for count in counts if count}) == 1  # the act and the verdict count the same pairs
    for result in (why, wrote, caught):
        assert all((tmp_path / name).stat().st_size for name in [*result.pictures, *result.files])
    assert lowtri_main(["generate", str(tmp_path / "with-the-mask"), "the black", "--max-new-tokens", "4"]) == 0


@pytest.mark.sweep
def test_the_act_about_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    context = Context(tmp_path, replace(TOUR, setting=TINY), train=partial(why_mask, texts=RHYME))
    result = tour.transformers_act(context)
    assert len(result.checks) == 16 and all(check.passed for check in result.checks), result.checks
    assert result.checks[5].text == "audited with lowtri's attention: no leak found"
    assert "LlamaForCausalLM" in result.text and "BART" in result.text
    assert all((tmp_path / name).stat().st_size for name in result.files)
    assert "Loading weights" not in capfd.readouterr().err  # no progress bar


def test_without_transformers_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "find_spec", lambda name: None)
    result = tour.transformers_act(Context(tmp_path))
    assert result.text.endswith("Fix: pip install transformers") and not result.checks


@pytest.mark.parametrize("pair", [TIMES, KIN], ids=["times", "kin"])
def test_the_tables_have_both_columns_whole(pair: tour.Pair) -> None:
    title, columns, rows = pair
    text = tour.table_text(pair)
    assert title in text and all(name in text for name in columns)
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.replace("│", " ").split())
    assert all(question.split()[0] in words for question, *_ in rows)
    assert {word for row in rows for cell in row for word in cell.split()} <= set(words.split())


@pytest.mark.sweep
@pytest.mark.parametrize("options", [[], ["--tour"]], ids=["demo", "tour"])
def test_all_of_it(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ACTS, ["--out", str(tmp_path), *options]) == 0
    assert re.fullmatch(r"(\d+) of \1 checks passed", capsys.readouterr().out.splitlines()[-1])
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert all((tmp_path / name).is_file() for name in named_in(html))
    assert all(f'id="{name}"' in html for name in ACTS)
