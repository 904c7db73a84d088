"""Every control of the pages does what the sentence beside it says, at the first click, in four languages."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from lesson_pages import LessonPage, opened

import lowtri
from lowtri.lesson.languages import DECIMALS, LANGUAGES
from lowtri.lesson.page import file_name

PRESETS = ("causal", "full", "window", "sinks", "prefix", "documents")


@pytest.fixture(autouse=True)
def start_again(page: LessonPage) -> None:
    page.click("[data-action=reset]")


def steps(page: LessonPage) -> dict[str, Any]:
    found: dict[str, Any] = page.run("Lesson.bench.steps")
    return found


def test_the_sentence_is_cut_as_its_readers_cut_it(page: LessonPage) -> None:
    words = page.said("sentence.example").split()
    assert page.run("Lesson.bench.tokens") == words and len(words) == 3
    weights = [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]]
    assert np.allclose(steps(page)["weights"], weights, atol=6e-5), "the worked example, in every language"


def test_replace_the_last_word(page: LessonPage) -> None:
    before = steps(page)["weights"]
    seen = set()
    for _ in range(4):  # as many words as the page has to offer
        page.click("[data-action=replace]")
        assert page.run("Lesson.bench.tokens.slice(0, 2)") == page.said("sentence.example").split()[:2]
        after = steps(page)["weights"]
        assert after[:2] == before[:2] and page.text("[data-note=replaced]") == page.said("bench.replaced.last", rows=3)
        seen.add(str(after[2]))
        found = page.program("bench")["steps"]
        assert np.allclose(found["weights"].value, after, rtol=0, atol=1e-6)
    assert len(seen) == 4
    page.click("#mask-switch")
    assert page.text("[data-note=replaced]") == ""
    page.click("[data-action=replace]")
    assert page.text("[data-note=replaced]") == page.said("bench.replaced.all", rows="1, 2, 3")


def test_start_again_takes_back_everything(page: LessonPage) -> None:
    first = page.run("[Lesson.bench.sentence.value, Lesson.bench.steps]")
    page.click("[data-action=replace]")
    page.click("[data-preset=sinks]")
    page.click("[data-walk=start]")
    page.click("[data-action=replace]")
    page.click("[data-action=reset]")
    assert page.run("[Lesson.bench.sentence.value, Lesson.bench.steps]") == first
    assert page.text("[data-note=replaced]") == page.text("[data-note=mask]") == page.text("[data-note=walk]") == ""
    assert page.text("[data-walk=start]") == page.said("walk.start")


@pytest.mark.parametrize("name", PRESETS)
def test_the_masks_to_try(name: str, page: LessonPage) -> None:
    page.click(f"[data-preset={name}]")
    pressed = "[...document.querySelectorAll('[data-preset][aria-pressed=true]')].map((b) => b.dataset.preset)"
    assert page.run(pressed) == [name]
    found = page.program("bench")["steps"]
    assert np.allclose(found["weights"].value, steps(page)["weights"], rtol=0, atol=1e-6)
    page.type("sentence", " ".join("abcdefg"))
    assert page.text("[data-note=mask]") == ""
    found = page.program("bench")["steps"]
    assert np.allclose(found["weights"].value, steps(page)["weights"], rtol=0, atol=1e-6)
    page.click("#mask-switch")
    assert page.run(pressed) == []


def test_the_width_is_that_of_the_window_in_the_mask(page: LessonPage) -> None:
    disabled = "document.getElementById('window-width').disabled"
    assert page.run(disabled) and page.text("[data-note=width]") == page.said("bench.nowindow")
    page.click("[data-preset=sinks]")
    assert not page.run(disabled) and page.text("[data-note=width]") == "2"
    page.change("#window-width", 1)
    assert page.run("document.getElementById('mask-text').value") == "causal & (window(1) | first(1))"


def test_documents_that_the_sentence_does_not_have(page: LessonPage) -> None:
    page.type("mask-text", "causal & documents(lengths=[2, 8])")
    note = page.text("[data-note=mask]")
    assert note == f"{page.said('error.lengths', total=10, n=3)} {page.said('bench.inforce', mask='causal')}"
    assert page.program("bench")["steps"].mask == "causal"
    page.type("mask-text", "causal & documents(lengths=[1, 2])")
    assert page.text("[data-note=mask]") == ""
    page.type("sentence", "a b c d")
    assert page.said("error.lengths", total=3, n=4) in page.text("[data-note=mask]")
    assert page.program("bench")["steps"].mask == "causal"


def test_drawing_on_the_mask(page: LessonPage) -> None:
    page.click('[data-matrix="mask"] td[data-i="2"][data-j="0"]')
    assert page.run("Lesson.bench.maskText.value") == "causal & window(2)" and steps(page)["weights"][2][0] == 0
    page.click('[data-matrix="mask"] td[data-i="0"][data-j="2"]')  # no formula has this table
    assert page.text("[data-note=mask]") == page.said("bench.drawn")
    found = page.program("bench")["steps"]["weights"].value
    assert found[0, 2] > 0 and np.allclose(steps(page)["weights"], found, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "cell"), [("q", (1, 0)), ("k", (0, 2))])
def test_a_number_changed_by_hand(name: str, cell: tuple[int, int], page: LessonPage) -> None:
    page.run(f'document.querySelector(\'[data-matrix={name}] td[data-i="{cell[0]}"][data-j="{cell[1]}"]\').focus()')
    place = cell if name == "q" else cell[::-1]  # keys are shown transposed
    assert page.text("[data-note=nudge]") == f"{name}{place[0] + 1},{place[1] + 1}"
    page.change("#nudge", -3)
    assert page.run(f"Lesson.bench.{name}")[place[0]][place[1]] == -3
    found = page.program("bench")["steps"]
    assert np.allclose(found["output"].value, steps(page)["output"], rtol=0, atol=1e-6)


def test_step_by_step(page: LessonPage) -> None:
    page.click("[data-walk=start]")
    left = []
    for stage in ("scaled", "masked", "weights", "output"):
        for part in (1, 2, 3):
            assert page.text("[data-note=walk]") == page.said(f"walk.{stage}.{part}")
            assert page.text("[data-walk=start]") == page.said("walk.stop")
            left.append(page.count("[data-flow=attention] td.todo"))
            page.click("[data-walk=next]")
    assert left == sorted(left, reverse=True) and left[0] == 9 + 9 + 9 + 6 - 1 and left[-1] == 0
    assert page.text("[data-walk=start]") == page.said("walk.start"), "the last step ends the walk"
    page.click("[data-walk=start]")
    page.click("[data-walk=next]")
    page.click("[data-walk=back]")
    assert page.text("[data-note=walk]") == page.said("walk.scaled.1")


def test_cells_say_whether_a_query_sees_a_key(page: LessonPage) -> None:
    for j, key in ((0, "equation.sees"), (2, "equation.hides")):
        cell = f'[data-matrix="mask"] td[data-i="1"][data-j="{j}"]'
        assert page.run(f"document.querySelector('{cell}').getAttribute('aria-label')").endswith(
            page.said(key, q=2, k=j + 1)
        )
    page.focus('#weights td[data-i="2"][data-j="0"]')
    assert page.number(0.0722, 4) in page.text("#bench .equation")


def test_a_long_sentence_is_shown_in_part(page: LessonPage) -> None:
    page.type("sentence", " ".join(f"word{i}" for i in range(30)))
    shown = page.run("Lesson.bench.shown")
    page.change("#view-from", 11)
    values = {"n": 30, "cells": 900, "from": 11, "to": 10 + shown}
    assert page.text("[data-note=view]") == page.said("bench.view", **values)
    page.type("sentence", " ".join("ab" for _ in range(300)))
    assert page.text("#sentence-note") == page.said("bench.cut", n=256, all=300)
    page.type("sentence", "")
    assert page.text("#sentence-note") == page.said("bench.empty")


def test_a_score_and_its_exponential(page: LessonPage) -> None:
    for place in (0, 50, 100):
        page.change("#score", place)
        s = -math.inf if place == 0 else -10 + 12 * place / 100
        e, w = math.exp(s), math.exp(s) / (1 + math.exp(s))
        values = {"s": page.number(s, 1), "e": page.number(e, 5) if e else "0", "w": page.number(w, 5) if w else "0"}
        assert page.text("#exponential .says") == page.said("matrix.says", **values)
    page.change("#score", 85)


def test_a_number_instead_of_minus_infinity(page: LessonPage) -> None:
    for place, name, w32, half in (
        (2, "−10", page.number(4.5, 1) + "e−5", "ok"),
        (4, "−10000", "0", "ok"),
        (5, "−1e9", "0", "out"),
        (6, "−∞", "0", "ok"),
    ):
        page.change("#half-score", place)
        values = {"x": name, "w32": w32, "half": page.said(f"traps.3.half.{half}", w16=w32)}
        assert page.text(".half .says") == page.said("traps.3.says", **values)
    page.change("#half-score", 5)


def test_a_pair_in_the_encoder_and_in_the_decoder(page: LessonPage) -> None:
    full, causal = page.run("[Lesson.data.pair.full, Lesson.data.pair.causal]")
    words = page.run("Lesson.data.pair.tokens")
    for i, j in ((3, 1), (0, 2)):
        page.run(f'document.querySelector(\'[data-matrix=decoder] td[data-i="{i}"][data-j="{j}"]\').focus()')
        values = {"q": words[i], "k": words[j], "a": page.number(full[i][j], 4), "b": page.number(causal[i][j], 4)}
        assert page.text("#encoder-decoder .says") == page.said("pair.says" if j <= i else "pair.says.hidden", **values)
        assert page.count("#encoder-decoder td.self") == 2, "both sides"


def test_every_stage_of_the_whole_way(page: LessonPage) -> None:
    tokens = len(page.said("sentence.example").split())
    steps_of = {"mask": "walk.masked.1", "values": "walk.output.1"}
    for stage in page.run("[...document.querySelectorAll('[data-stage]')].map((b) => b.dataset.stage)"):
        page.click(f"[data-stage={stage}]")
        assert page.text("#flow-figure .says") == re.sub(r"\[[qkvw]:([^\]]+)\]", r"\1", page.said(f"flow.{stage}.p"))
        assert stage != "mask" or f"(1, {tokens}, {tokens})" in page.text("#flow-figure .shape")
        if not page.run("document.querySelector('#flow-figure [data-action=open]').hidden"):
            page.click("#flow-figure [data-action=open]")
            if stage in steps_of:
                assert page.text("[data-note=walk]") == page.said(steps_of[stage])
    assert page.run("document.querySelector('#bench .made').open"), "where q, k and v come from"
    page.click("[data-stage=words]")
    assert page.run("document.querySelector('#flow-figure [data-action=open]').hidden")


def test_what_three_models_wrote(page: LessonPage) -> None:
    prompt = len(page.run("Lesson.data.experiment.texts[2].prompt").encode())
    panel = "[...document.querySelectorAll('#written .written > div')].map((d) => d.querySelectorAll('.hint')[1].textContent)"
    for n in (0, 40, 96):
        page.change("#written-bytes", n)
        assert page.text("#written [data-note=bytes]") == str(n)
        kept = [page.run(f"Lesson.data.generators.{name}.carries") for name in ("rnn", "lstm", "attention")]
        numbers = [kept[0], kept[1], kept[2] * (prompt + n)]
        assert page.run(panel) == [page.said("recurrent.carries", n=count) for count in numbers]
        assert page.run("document.querySelector('#written pre > span').textContent.length") == n


def test_the_maps_answer(page: LessonPage) -> None:
    name = page.run("Lesson.data.maps[0].name")
    page.click('#maps [data-map="13,8"]')
    says = page.said("models.says", name=name, l=13, h=8, q="it", k="cat", w=page.number(0.66))
    assert page.text("#maps .says") == says, "layer and head as the program below counts them"
    assert "layer=13, head=8" in page.text('[data-python="maps"] code')
    page.focus('#maps .open td[data-i="3"][data-j="5"]')
    values = {"l": 13, "h": 8, "q": "sat", "k": "the", "w": page.said("word.hidden")}
    assert page.text("#maps .says") == page.said("models.cell", **values)


def test_the_counts_of_the_patterns(page: LessonPage) -> None:
    page.change("#patterns-n", 12)
    page.change("#patterns-w", 3)
    shown = page.run("[...document.querySelectorAll('#patterns-figure article')].map((a) => a.lastChild.textContent)")
    masks = page.texts("#patterns-figure article code")
    for mask, line, held in zip(masks, shown, (12, 3, 5, 9, 12), strict=True):
        pairs = lowtri.mask(mask).pairs(12, 12)
        assert line == page.said("patterns.count", pairs=pairs, all=144, held=held), mask
    assert len(shown) == 5
    page.change("#patterns-w", 6)
    page.change("#patterns-n", 24)


def test_no_label_of_a_drawing_is_cut_off(page: LessonPage) -> None:
    cut = page.run(
        "[...document.querySelectorAll('main svg text')].filter((text) => {"
        "const [a, b] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];"
        "return a.width && (a.right > b.right + 1 || a.left < b.left - 1) }).map((text) => text.textContent)"
    )
    assert cut == []


@pytest.mark.sweep
def test_the_copy_buttons(page: LessonPage) -> None:
    assert page.count("[data-copy]") == page.run("document.querySelectorAll('.python').length")
    button = "document.querySelector('[data-python=arcs] [data-copy]')"
    wait = "new Promise((done) => setTimeout(done, 100))"
    assert page.run(f"{button}.click(), {wait}.then(() => {button}.textContent)") == page.said("copied")
    assert page.run(f"new Promise((done) => setTimeout(done, 1600)).then(() => {button}.textContent)") == page.said(
        "copy"
    )


def test_the_first_figure_and_its_program(page: LessonPage, capsys: pytest.CaptureFixture[str]) -> None:
    words = page.said("sentence.cat").split()
    for n, word in enumerate(words[:-1]):
        page.click(f"#arcs .words button:nth-of-type({n + 1})")
        values = {"word": word, "n": n + 1, "all": len(words), "next": words[n + 1]}
        assert page.text("#arcs .says") == page.said("why.says.on", **values)
    page.program("arcs")
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert printed == f"{lowtri.causal().draw(len(words), tokens=words, ticks=True)}\n"
    page.click("#arcs-mask")
    assert page.text("#arcs .says") == page.said("why.says.off", **values | {"n": len(words)})
    page.program("arcs")
    assert capsys.readouterr().out == f"{lowtri.full().draw(len(words), tokens=words, ticks=True)}\n"
    page.click("#arcs-mask")


def test_figures_in_steps(page: LessonPage) -> None:
    words = page.said("sentence.forcing").split()
    page.click("#forcing-figure [data-action=next]")
    values = {"i": 3, "seen": " ".join(words[:3]), "next": words[3]}
    assert page.text("#forcing-figure .says") == page.said("forcing.says", **values)
    page.click("#forcing-figure [data-action=back]")
    words = page.said("sentence.nlp").split()
    page.click("#generators [data-action=back]")
    values = {"i": 2, "seen": " ".join(words[:2]), "next": words[2]}
    assert page.text("#generators .says") == page.said("recurrent.says", **values)
    page.click("#generators [data-action=next]")
    for mask, held in (("causal", 5), ("causal & window(3)", 3), ("causal & (window(2) | first(1))", 3)):
        page.change("#cache-figure select", mask, "change")
        assert page.text("#cache-figure .says") == page.said("cache.says", i=5, seen=held, held=held)
        page.program("cache")


def test_the_patterns_fit_the_tokens(page: LessonPage) -> None:
    page.change("#patterns-n", 8)
    page.change("#patterns-w", 24)
    for mask in page.texts("#patterns-figure code")[:5]:
        lowtri.explain(scores=np.zeros((8, 8)), mask=mask)
    page.program("patterns")


def test_the_maps_have_the_program_of_their_model(page: LessonPage) -> None:
    programs = []
    for n in (2, 1):
        page.click(f"#maps .chips button:nth-of-type({n})")
        programs.append(page.text('[data-python="maps"] code'))
    assert "whisper" in programs[0] and "smollm2" in programs[1]


def test_verdicts_agree_with_the_figures_beside_them(page: LessonPage) -> None:
    decimal = DECIMALS.get(page.language, ".")
    limit = re.escape(page.said("gallery.loss", loss="@")).replace("@", r"([\d.,]+)")
    for shown in page.run(
        "[...document.querySelectorAll('#gallery-figure article p:last-child')].map((p) => p.textContent)"
    ):
        if found := re.search(r"\d[.,]\d+", shown):
            assert (float(found[0].replace(decimal, ".")) < 0.99) == bool(re.fullmatch(limit, shown)), shown


def test_the_quiz_counts_first_answers_and_has_answers(page: LessonPage) -> None:
    rounds = page.count(".quiz fieldset")
    button = ".quiz fieldset:nth-of-type({}) > div:nth-of-type({}) button"
    says = "[...document.querySelectorAll('.quiz .says')].map((p) => p.textContent)"
    page.click(button.format(1, 1))
    page.click(button.format(1, 2))
    score = page.said("quiz.score", right=0, all=rounds)
    assert page.run(says)[0] == f"{page.said('quiz.right')} {score}", "the second try is right, and does not count"
    page.click(button.format(2, 1))
    score = page.said("quiz.score", right=1, all=rounds)
    assert page.run(says)[1] == f"{page.said('quiz.right')} {score}"
    answers = page.texts(".quiz details p")
    assert len(answers) == 3 and all(answers)


@pytest.mark.sweep
def test_the_state_is_in_the_address_and_survives_a_change_of_language(
    page: LessonPage, browser: Browser, folder: Path
) -> None:
    page.type("sentence", "one two three four")
    page.type("mask-text", "causal & window(2)")
    page.run("document.documentElement.dataset.theme = 'dark'; document.getElementById('cache').scrollIntoView()")
    page.run("new Promise((done) => setTimeout(done, 600))")
    links = page.run("[...document.querySelectorAll('.languages a')].map((a) => a.getAttribute('href'))")
    rest = "?sentence=one+two+three+four&mask=causal+%26+window%282%29&theme=dark#cache"
    assert links == [f"{file_name(other)}{rest}" for other in LANGUAGES]
    assert page.run("location.search + location.hash") == rest
    other = opened(browser, folder, "th", width=1200, query=rest)
    assert other.run("[Lesson.bench.sentence.value, Lesson.bench.maskText.value]") == [
        "one two three four",
        "causal & window(2)",
    ]
    assert other.run("document.documentElement.dataset.theme") == "dark"
    assert abs(other.run("document.getElementById('cache').getBoundingClientRect().top")) < 120
    assert other.run("Lesson.bench.steps.weights") == steps(page)["weights"]
    other.close()
    page.run("delete document.documentElement.dataset.theme; scrollTo(0, 0)")
    drawn = opened(browser, folder, "zh", width=1200, query="?drawn=101-110-011&switch=off")
    assert drawn.run("Lesson.bench.drawn") == [[True, False, True], [True, True, False], [False, True, True]]
    assert drawn.run("Lesson.bench.maskSwitch.checked") is False
    drawn.close()


@pytest.mark.sweep
def test_the_theme_and_motion_buttons(page: LessonPage) -> None:
    page.click("#theme")
    assert page.run("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")
    assert page.run("document.documentElement.dataset.theme") == "light"
    page.run("delete document.documentElement.dataset.theme")
    motion = (
        "new Promise((done) => setTimeout(done, 200)).then(() => {"
        "const b = document.getElementById('motion'); return [b.disabled, b.title, b.ariaPressed] })"
    )
    assert page.run(motion) == [True, page.said("nav.motion.system"), "false"], "the system asks for stillness"
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "no-preference"}])
    assert page.run(motion) == [False, page.said("nav.motion"), "true"]
    page.click("#motion")
    assert page.run(motion) == [False, page.said("nav.motion.off"), "false"]
    page.click("#motion")
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
