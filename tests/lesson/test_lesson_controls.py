"""Every control of the pages does what the sentence beside it says, at the first click, in four languages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, Page, chromium

import lowtri
from lowtri.lesson.languages import LANGUAGES, texts
from lowtri.lesson.page import file_name

if chromium() is None:
    pytest.skip("no browser: apt-get install chromium", allow_module_level=True)

PRESETS = ("causal", "full", "window", "sinks", "prefix", "documents")


@pytest.fixture(scope="module", params=LANGUAGES)
def page(request: pytest.FixtureRequest, browser: Browser, folder: Path) -> Iterator[Page]:
    page = browser.open_lesson(folder / file_name(request.param), width=1200)
    page.language = request.param  # type: ignore[attr-defined]
    yield page
    assert page.problems() == []
    page.close()


@pytest.fixture(autouse=True)
def start_again(page: Page) -> None:
    click(page, "[data-action=reset]")


def click(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def slide(page: Page, selector: str, value: float) -> None:
    page.run(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {value};"
        "e.dispatchEvent(new Event('input', {bubbles: true})) })()"
    )


def text(page: Page, selector: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def said(page: Page, key: str, **values: object) -> str:
    """A text of the page's language, filled in."""
    content = texts(page.language)[key]  # type: ignore[attr-defined]
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), content)


def steps(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.run("Lesson.bench.steps")
    return found


def run_program(page: Page, figure: str) -> dict[str, Any]:
    code = text(page, f'[data-python="{figure}"] code')
    names: dict[str, Any] = {}
    exec(compile(code.replace("print(lowtri.explain(", "steps = (lowtri.explain("), figure, "exec"), names)
    return names


def test_the_sentence_is_cut_as_its_readers_cut_it(page: Page) -> None:
    words = said(page, "sentence.example").split()
    assert page.run("Lesson.bench.tokens") == words and len(words) == 3
    weights = [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]]
    assert np.allclose(steps(page)["weights"], weights, atol=6e-5), "the worked example, in every language"


def test_replace_the_last_word(page: Page) -> None:
    before = steps(page)["weights"]
    seen = set()
    for _ in range(4):  # as many words as the page has to offer
        click(page, "[data-action=replace]")
        assert page.run("Lesson.bench.tokens.slice(0, 2)") == said(page, "sentence.example").split()[:2]
        after = steps(page)["weights"]
        assert after[:2] == before[:2] and text(page, "[data-note=replaced]") == said(
            page, "bench.replaced.last", rows=3
        )
        seen.add(str(after[2]))
        found = run_program(page, "bench")["steps"]
        assert np.allclose(found["weights"].value, after, rtol=0, atol=1e-6)
    assert len(seen) == 4
    click(page, "#mask-switch")
    assert text(page, "[data-note=replaced]") == ""
    click(page, "[data-action=replace]")
    assert text(page, "[data-note=replaced]") == said(page, "bench.replaced.all", rows="1, 2, 3")


def test_start_again_takes_back_everything(page: Page) -> None:
    first = page.run("[Lesson.bench.sentence.value, Lesson.bench.steps]")
    click(page, "[data-action=replace]")
    click(page, "[data-preset=sinks]")
    click(page, "[data-walk=start]")
    click(page, "[data-action=replace]")
    click(page, "[data-action=reset]")
    assert page.run("[Lesson.bench.sentence.value, Lesson.bench.steps]") == first
    assert text(page, "[data-note=replaced]") == text(page, "[data-note=mask]") == text(page, "[data-note=walk]") == ""
    assert text(page, "[data-walk=start]") == said(page, "walk.start")


@pytest.mark.parametrize("name", PRESETS)
def test_the_masks_to_try(name: str, page: Page) -> None:
    click(page, f"[data-preset={name}]")
    pressed = "[...document.querySelectorAll('[data-preset][aria-pressed=true]')].map((b) => b.dataset.preset)"
    assert page.run(pressed) == [name]
    found = run_program(page, "bench")["steps"]
    assert np.allclose(found["weights"].value, steps(page)["weights"], rtol=0, atol=1e-6)
    page.type("sentence", " ".join("abcdefg"))
    assert text(page, "[data-note=mask]") == ""
    found = run_program(page, "bench")["steps"]
    assert np.allclose(found["weights"].value, steps(page)["weights"], rtol=0, atol=1e-6)
    click(page, "#mask-switch")
    assert page.run(pressed) == []


def test_the_width_is_that_of_the_window_in_the_mask(page: Page) -> None:
    disabled = "document.getElementById('window-width').disabled"
    assert page.run(disabled) and text(page, "[data-note=width]") == said(page, "bench.nowindow")
    click(page, "[data-preset=sinks]")
    assert not page.run(disabled) and text(page, "[data-note=width]") == "2"
    slide(page, "#window-width", 1)
    assert page.run("document.getElementById('mask-text').value") == "causal & (window(1) | first(1))"


def test_documents_that_the_sentence_does_not_have(page: Page) -> None:
    page.type("mask-text", "causal & documents(lengths=[2, 8])")
    note = text(page, "[data-note=mask]")
    assert note == f"{said(page, 'error.lengths', total=10, n=3)} {said(page, 'bench.inforce', mask='causal')}"
    assert run_program(page, "bench")["steps"].mask == "causal"
    page.type("mask-text", "causal & documents(lengths=[1, 2])")
    assert text(page, "[data-note=mask]") == ""
    page.type("sentence", "a b c d")
    assert said(page, "error.lengths", total=3, n=4) in text(page, "[data-note=mask]")
    assert run_program(page, "bench")["steps"].mask == "causal"


def test_the_first_figure_and_its_program(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    words = said(page, "sentence.cat").split()
    for n, word in enumerate(words[:-1]):
        click(page, f"#arcs .words button:nth-of-type({n + 1})")
        values = {"word": word, "n": n + 1, "all": len(words), "next": words[n + 1]}
        assert text(page, "#arcs .says") == said(page, "why.says.on", **values)
    run_program(page, "arcs")
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert printed == f"{lowtri.causal().draw(len(words), tokens=words, ticks=True)}\n"
    click(page, "#arcs-mask")
    assert text(page, "#arcs .says") == said(page, "why.says.off", **values | {"n": len(words)})
    run_program(page, "arcs")
    assert capsys.readouterr().out == f"{lowtri.full().draw(len(words), tokens=words, ticks=True)}\n"
    click(page, "#arcs-mask")


def test_figures_in_steps(page: Page) -> None:
    words = said(page, "sentence.forcing").split()
    click(page, "#forcing-figure [data-action=next]")
    values = {"i": 3, "seen": " ".join(words[:3]), "next": words[3]}
    assert text(page, "#forcing-figure .says") == said(page, "forcing.says", **values)
    click(page, "#forcing-figure [data-action=back]")
    words = said(page, "sentence.nlp").split()
    click(page, "#generators [data-action=back]")
    values = {"i": 2, "seen": " ".join(words[:2]), "next": words[2]}
    assert text(page, "#generators .says") == said(page, "recurrent.says", **values)
    click(page, "#generators [data-action=next]")
    for mask, held in (("causal", 5), ("causal & window(3)", 3), ("causal & (window(2) | first(1))", 3)):
        page.run(
            f"(() => {{ const e = document.querySelector('#cache-figure select'); e.value = {json.dumps(mask)};"
            "e.dispatchEvent(new Event('change')) })()"
        )
        assert text(page, "#cache-figure .says") == said(page, "cache.says", i=5, seen=held, held=held)
        run_program(page, "cache")


def test_the_patterns_fit_the_tokens(page: Page) -> None:
    slide(page, "#patterns-n", 8)
    slide(page, "#patterns-w", 24)
    for mask in page.run("[...document.querySelectorAll('#patterns-figure code')].map((c) => c.textContent)")[:5]:
        lowtri.explain(scores=np.zeros((8, 8)), mask=mask)
    run_program(page, "patterns")


def test_the_maps_have_the_program_of_their_model(page: Page) -> None:
    programs = []
    for n in (2, 1):
        click(page, f"#maps .chips button:nth-of-type({n})")
        programs.append(text(page, '[data-python="maps"] code'))
    assert "whisper" in programs[0] and "smollm2" in programs[1]


def test_verdicts_agree_with_the_figures_beside_them(page: Page) -> None:
    decimal = "," if page.language == "id" else "."  # type: ignore[attr-defined]
    limit = re.escape(said(page, "gallery.loss", loss="@")).replace("@", r"([\d.,]+)")
    for shown in page.run(
        "[...document.querySelectorAll('#gallery-figure article p:last-child')].map((p) => p.textContent)"
    ):
        if found := re.search(r"\d[.,]\d+", shown):
            assert (float(found[0].replace(decimal, ".")) < 0.99) == bool(re.fullmatch(limit, shown)), shown


def test_the_quiz_counts_first_answers_and_has_answers(page: Page) -> None:
    rounds = page.run("document.querySelectorAll('.quiz fieldset').length")
    button = ".quiz fieldset:nth-of-type({}) > div:nth-of-type({}) button"
    says = "[...document.querySelectorAll('.quiz .says')].map((p) => p.textContent)"
    click(page, button.format(1, 1))
    click(page, button.format(1, 2))
    score = said(page, "quiz.score", right=0, all=rounds)
    assert page.run(says)[0] == f"{said(page, 'quiz.right')} {score}", "the second try is right, and does not count"
    click(page, button.format(2, 1))
    score = said(page, "quiz.score", right=1, all=rounds)
    assert page.run(says)[1] == f"{said(page, 'quiz.right')} {score}"
    answers = page.run("[...document.querySelectorAll('.quiz details p')].map((p) => p.textContent)")
    assert len(answers) == 3 and all(answers)


def test_the_state_is_in_the_address_and_survives_a_change_of_language(
    page: Page, browser: Browser, folder: Path
) -> None:
    page.type("sentence", "one two three four")
    page.type("mask-text", "causal & window(2)")
    page.run("document.documentElement.dataset.theme = 'dark'; document.getElementById('cache').scrollIntoView()")
    page.run("new Promise((done) => setTimeout(done, 600))")
    links = page.run("[...document.querySelectorAll('.languages a')].map((a) => a.getAttribute('href'))")
    rest = "?sentence=one+two+three+four&mask=causal+%26+window%282%29&theme=dark#cache"
    assert links == [f"{file_name(other)}{rest}" for other in LANGUAGES]
    assert page.run("location.search + location.hash") == rest
    other = browser.open_lesson(folder / file_name("th"), width=1200, query=rest)
    assert other.run("[Lesson.bench.sentence.value, Lesson.bench.maskText.value]") == [
        "one two three four",
        "causal & window(2)",
    ]
    assert other.run("document.documentElement.dataset.theme") == "dark"
    assert abs(other.run("document.getElementById('cache').getBoundingClientRect().top")) < 120
    assert other.run("Lesson.bench.steps.weights") == steps(page)["weights"]
    other.close()
    page.run("delete document.documentElement.dataset.theme; scrollTo(0, 0)")
    drawn = browser.open_lesson(folder / file_name("zh"), width=1200, query="?drawn=101-110-011&switch=off")
    assert drawn.run("Lesson.bench.drawn") == [[True, False, True], [True, True, False], [False, True, True]]
    assert drawn.run("Lesson.bench.maskSwitch.checked") is False
    drawn.close()


def test_the_theme_and_motion_buttons(page: Page) -> None:
    click(page, "#theme")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    click(page, "#theme")
    assert page.run("document.documentElement.dataset.theme") == "light"
    page.run("delete document.documentElement.dataset.theme")
    motion = (
        "new Promise((done) => setTimeout(done, 200)).then(() => {"
        "const b = document.getElementById('motion'); return [b.disabled, b.title, b.ariaPressed] })"
    )
    assert page.run(motion) == [True, said(page, "nav.motion.system"), "false"], "the system asks for stillness"
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "no-preference"}])
    assert page.run(motion) == [False, said(page, "nav.motion"), "true"]
    click(page, "#motion")
    assert page.run(motion) == [False, said(page, "nav.motion.off"), "false"]
    click(page, "#motion")
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
