"""Every control of the pages does what the sentence beside it says, at the first click, in four languages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, Page, chromium

import lowtri
from lowtri.lesson.languages import DECIMALS, LANGUAGES, texts
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


def number(page: Page, x: float, digits: int = 2) -> str:
    """A number as the page of this language writes it."""
    decimal = DECIMALS.get(page.language, ".")  # type: ignore[attr-defined]
    return "−∞" if x == -math.inf else f"{x:.{digits}f}".replace("-", "−").replace(".", decimal)


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


def test_drawing_on_the_mask(page: Page) -> None:
    click(page, '[data-matrix="mask"] td[data-i="2"][data-j="0"]')
    assert page.run("Lesson.bench.maskText.value") == "causal & window(2)" and steps(page)["weights"][2][0] == 0
    click(page, '[data-matrix="mask"] td[data-i="0"][data-j="2"]')  # no formula has this table
    assert text(page, "[data-note=mask]") == said(page, "bench.drawn")
    found = run_program(page, "bench")["steps"]["weights"].value
    assert found[0, 2] > 0 and np.allclose(steps(page)["weights"], found, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "cell"), [("q", (1, 0)), ("k", (0, 2))])
def test_a_number_changed_by_hand(name: str, cell: tuple[int, int], page: Page) -> None:
    page.run(f'document.querySelector(\'[data-matrix={name}] td[data-i="{cell[0]}"][data-j="{cell[1]}"]\').focus()')
    place = cell if name == "q" else cell[::-1]  # keys are shown transposed
    assert text(page, "[data-note=nudge]") == f"{name}{place[0] + 1},{place[1] + 1}"
    slide(page, "#nudge", -3)
    assert page.run(f"Lesson.bench.{name}")[place[0]][place[1]] == -3
    found = run_program(page, "bench")["steps"]
    assert np.allclose(found["output"].value, steps(page)["output"], rtol=0, atol=1e-6)


def test_step_by_step(page: Page) -> None:
    click(page, "[data-walk=start]")
    left = []
    for stage in ("scaled", "masked", "weights", "output"):
        for part in (1, 2, 3):
            assert text(page, "[data-note=walk]") == said(page, f"walk.{stage}.{part}")
            assert text(page, "[data-walk=start]") == said(page, "walk.stop")
            left.append(page.run("document.querySelectorAll('[data-flow=attention] td.todo').length"))
            click(page, "[data-walk=next]")
    assert left == sorted(left, reverse=True) and left[0] == 9 + 9 + 9 + 6 - 1 and left[-1] == 0
    assert text(page, "[data-walk=start]") == said(page, "walk.start"), "the last step ends the walk"
    click(page, "[data-walk=start]")
    click(page, "[data-walk=next]")
    click(page, "[data-walk=back]")
    assert text(page, "[data-note=walk]") == said(page, "walk.scaled.1")


def test_cells_say_whether_a_query_sees_a_key(page: Page) -> None:
    for j, key in ((0, "equation.sees"), (2, "equation.hides")):
        cell = f'[data-matrix="mask"] td[data-i="1"][data-j="{j}"]'
        assert page.run(f"document.querySelector('{cell}').getAttribute('aria-label')").endswith(
            said(page, key, q=2, k=j + 1)
        )
    page.run('document.querySelector(\'#weights td[data-i="2"][data-j="0"]\').focus()')
    assert number(page, 0.0722, 4) in text(page, "#bench .equation")


def test_a_long_sentence_is_shown_in_part(page: Page) -> None:
    page.type("sentence", " ".join(f"word{i}" for i in range(30)))
    shown = page.run("Lesson.bench.shown")
    slide(page, "#view-from", 11)
    values = {"n": 30, "cells": 900, "from": 11, "to": 10 + shown}
    assert text(page, "[data-note=view]") == said(page, "bench.view", **values)
    page.type("sentence", " ".join("ab" for _ in range(300)))
    assert text(page, "#sentence-note") == said(page, "bench.cut", n=256, all=300)
    page.type("sentence", "")
    assert text(page, "#sentence-note") == said(page, "bench.empty")


def test_a_score_and_its_exponential(page: Page) -> None:
    for place in (0, 50, 100):
        slide(page, "#score", place)
        s = -math.inf if place == 0 else -10 + 12 * place / 100
        e, w = math.exp(s), math.exp(s) / (1 + math.exp(s))
        values = {"s": number(page, s, 1), "e": number(page, e, 5) if e else "0", "w": number(page, w, 5) if w else "0"}
        assert text(page, "#exponential .says") == said(page, "matrix.says", **values)
    slide(page, "#score", 85)


def test_a_number_instead_of_minus_infinity(page: Page) -> None:
    for place, name, w32, half in (
        (2, "−10", number(page, 4.5, 1) + "e−5", "ok"),
        (4, "−10000", "0", "ok"),
        (5, "−1e9", "0", "out"),
        (6, "−∞", "0", "ok"),
    ):
        slide(page, "#half-score", place)
        values = {"x": name, "w32": w32, "half": said(page, f"traps.3.half.{half}", w16=w32)}
        assert text(page, ".half .says") == said(page, "traps.3.says", **values)
    slide(page, "#half-score", 5)


def test_a_pair_in_the_encoder_and_in_the_decoder(page: Page) -> None:
    full, causal = page.run("[Lesson.data.pair.full, Lesson.data.pair.causal]")
    words = page.run("Lesson.data.pair.tokens")
    for i, j in ((3, 1), (0, 2)):
        page.run(f'document.querySelector(\'[data-matrix=decoder] td[data-i="{i}"][data-j="{j}"]\').focus()')
        values = {"q": words[i], "k": words[j], "a": number(page, full[i][j], 4), "b": number(page, causal[i][j], 4)}
        assert text(page, "#encoder-decoder .says") == said(
            page, "pair.says" if j <= i else "pair.says.hidden", **values
        )
        assert page.run("document.querySelectorAll('#encoder-decoder td.self').length") == 2, "both sides"


def test_every_stage_of_the_whole_way(page: Page) -> None:
    for stage in page.run("[...document.querySelectorAll('[data-stage]')].map((b) => b.dataset.stage)"):
        click(page, f"[data-stage={stage}]")
        assert text(page, "#flow-figure .says") == re.sub(r"\[[qkvw]:([^\]]+)\]", r"\1", said(page, f"flow.{stage}.p"))
        if not page.run("document.querySelector('#flow-figure [data-action=open]').hidden"):
            click(page, "#flow-figure [data-action=open]")
    assert page.run("document.querySelector('#bench .made').open"), "where q, k and v come from"


def test_what_three_models_wrote(page: Page) -> None:
    prompt = len(page.run("Lesson.data.experiment.texts[2].prompt").encode())
    panel = "[...document.querySelectorAll('#written .written > div')].map((d) => d.querySelectorAll('.hint')[1].textContent)"
    for n in (0, 40, 96):
        slide(page, "#written-bytes", n)
        assert text(page, "#written [data-note=bytes]") == str(n)
        kept = [page.run(f"Lesson.data.generators.{name}.carries") for name in ("rnn", "lstm", "attention")]
        numbers = [kept[0], kept[1], kept[2] * (prompt + n)]
        assert page.run(panel) == [said(page, "recurrent.carries", n=count) for count in numbers]
        assert page.run("document.querySelector('#written pre > span').textContent.length") == n


def test_the_maps_answer(page: Page) -> None:
    name = page.run("Lesson.data.maps[0].name")
    click(page, '#maps [data-map="13,8"]')
    says = said(page, "models.says", name=name, l=13, h=8, q="it", k="cat", w=number(page, 0.66))
    assert text(page, "#maps .says") == says, "layer and head as the program below counts them"
    assert "layer=13, head=8" in text(page, '[data-python="maps"] code')
    page.run('document.querySelector(\'#maps .open td[data-i="3"][data-j="5"]\').focus()')
    values = {"l": 13, "h": 8, "q": "sat", "k": "the", "w": said(page, "word.hidden")}
    assert text(page, "#maps .says") == said(page, "models.cell", **values)


def test_the_counts_of_the_patterns(page: Page) -> None:
    slide(page, "#patterns-n", 12)
    slide(page, "#patterns-w", 3)
    shown = page.run("[...document.querySelectorAll('#patterns-figure article')].map((a) => a.lastChild.textContent)")
    masks = page.run("[...document.querySelectorAll('#patterns-figure article code')].map((c) => c.textContent)")
    for mask, line, held in zip(masks, shown, (12, 3, 5, 9, 12), strict=True):
        pairs = lowtri.mask(mask).pairs(12, 12)
        assert line == said(page, "patterns.count", pairs=pairs, all=144, held=held), mask
    assert len(shown) == 5
    slide(page, "#patterns-w", 6)
    slide(page, "#patterns-n", 24)


def test_the_copy_buttons(page: Page) -> None:
    assert page.run("document.querySelectorAll('[data-copy]').length") == page.run(
        "document.querySelectorAll('.python').length"
    )
    button = "document.querySelector('[data-python=arcs] [data-copy]')"
    wait = "new Promise((done) => setTimeout(done, 100))"
    assert page.run(f"{button}.click(), {wait}.then(() => {button}.textContent)") == said(page, "copied")
    assert page.run(f"new Promise((done) => setTimeout(done, 1600)).then(() => {button}.textContent)") == said(
        page, "copy"
    )


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
