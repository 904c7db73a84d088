"""The pages in a real browser, headless: every figure answers, nothing is fetched, no error reaches the console."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from lesson_pages import LessonPage, opened

from lowtri.lesson.languages import LANGUAGES, texts
from lowtri.lesson.page import file_name

AXE = Path(__file__).parents[1] / "data" / "axe.min.js"
WEIGHTS = "[...document.querySelectorAll('#weights tbody tr')].map(r => [...r.querySelectorAll('td')].map(c => Number(c.textContent)))"


@pytest.fixture(scope="module")
def page(browser: Browser, folder: Path) -> Iterator[LessonPage]:
    page = opened(browser, folder, width=1200)
    yield page
    assert page.problems() == []


def weights(page: LessonPage) -> np.ndarray:
    return np.asarray(page.run(WEIGHTS))


def test_the_switch_and_the_weights(page: LessonPage) -> None:
    page.click("[data-action=reset]")
    assert np.allclose(weights(page), [[1, 0, 0], [0.3606, 0.6394, 0], [0.0722, 0.0320, 0.8959]], atol=0.006)
    page.click("#mask-switch")
    assert np.allclose(
        weights(page), [[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]], atol=0.006
    )
    page.click("#mask-switch")
    assert weights(page)[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("mask", ["causal", "causal & window(2)", "causal | first(2)", "~causal", "causal - window(1)"])
def test_typing_and_the_program_agree(mask: str, page: LessonPage) -> None:
    page.click("[data-action=reset]")
    page.type("sentence", "The black cat <end>")
    page.type("mask-text", mask)
    steps = page.program("bench")["steps"]
    assert steps.tokens == ("The", "black", "cat", "<end>") and repr(steps.mask)
    assert np.allclose(page.run("Lesson.bench.steps.weights"), steps["weights"].value, rtol=0, atol=1e-6)
    assert np.allclose(page.run("Lesson.bench.steps.output"), steps["output"].value, rtol=0, atol=1e-6)
    assert np.allclose(weights(page), steps["weights"].value, atol=0.0051)


def test_a_mask_that_cannot_be_read_keeps_the_last_one(page: LessonPage) -> None:
    page.click("[data-action=reset]")
    page.type("mask-text", "causal & wndow(2)")
    assert "There is no mask “wndow”" in page.text("#mask-note")
    assert weights(page)[0].tolist() == [1, 0, 0]
    assert page.run("document.getElementById('mask-text').getAttribute('aria-invalid')") == "true"
    assert page.program("bench")["steps"].mask == "causal"
    page.type("mask-text", "full")
    assert page.text("#mask-note") == "" and weights(page)[0, 2] > 0


def test_links_and_keys(page: LessonPage) -> None:
    page.click("[data-action=reset]")
    page.focus('#weights td[data-i="1"][data-j="0"]')
    page.press("ArrowDown")
    assert page.run("[document.activeElement.dataset.i, document.activeElement.dataset.j]") == ["2", "0"]
    assert page.run("[...document.querySelectorAll('[data-matrix=masked] td.from')].map(c => c.dataset.i)") == ["2"] * 3
    assert "a3,1" in page.text(".equation") and "0.0722" in page.text(".equation")
    page.focus('[data-matrix="scaled"] td[data-i="2"][data-j="1"]')
    assert page.count("[data-matrix=k] td.from") == 2
    assert "−0.4725" in page.text(".equation")


HOSTILE = {
    "empty": "",
    "blank": "   ",
    "emoji": "👩‍👩‍👧 loves 🇹🇭 🎉",
    "right to left": "أحب تعلم الآلة كثيرا",
    "override": "abc \u202ecba\u202c def",
    "markup": "<script>document.title='gone'</script> <img src=x onerror=alert(1)> & \"quotes\"",
    "200 tokens": " ".join(f"word{i}" for i in range(200)),
    "1000 tokens": "的" * 1000,
    "one long word": "a" * 3000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_any_sentence(name: str, page: LessonPage) -> None:
    page.click("[data-action=reset]")
    page.type("sentence", HOSTILE[name])
    n = page.run("Lesson.bench.n")
    assert n == min(256, page.run("Lesson.tokens(document.getElementById('sentence').value).length"))
    found = weights(page) if n else np.zeros((0, 0))
    assert len(found) == page.run("Lesson.bench.shown") <= 10 and np.all(np.isfinite(found))
    if n and n <= 8:
        assert np.allclose(found.sum(1), 1, atol=0.05)
    assert page.run("document.querySelector('.overview').hidden") == (n <= page.run("Lesson.bench.shown"))
    assert page.run("document.title") == texts("en")["title"] and page.count("#bench img") == 0
    assert page.run("document.documentElement.scrollWidth") <= 1200
    if name == "empty":
        assert "No words yet" in page.text("#sentence-note")
    if name == "200 tokens":
        assert "40000" in page.text("[data-note=view]")
        assert page.program("bench")["steps"]["weights"].value.shape == (200, 200)
    page.click("[data-action=reset]")


@pytest.mark.sweep
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_renders_and_fits_a_phone(language: str, browser: Browser, folder: Path) -> None:
    page = opened(browser, folder, language, width=390, dark=True)
    assert page.problems() == []
    assert page.run("document.documentElement.scrollWidth") == 390
    empty = "[...document.querySelectorAll('main > section')].filter(s => s.getBoundingClientRect().height < 120).map(s => s.id)"
    assert page.run(empty) == []
    missing = (
        "[...document.querySelectorAll('main, nav')].map(e => { const c = e.cloneNode(true);"
        "c.querySelectorAll('code').forEach(x => x.remove()); return c.textContent }).join(' ')"
        ".match(/\\b(?:why|bench|walk|quiz|gallery|models|cache|forms|without)\\.[a-z0-9.]+\\b/g)"
    )
    assert page.run(missing) is None, "a text without its key"
    assert not re.search(r"\{\w+\}", str(page.run("document.querySelector('main').innerText")))
    assert page.count("#weights tbody td") == 9
    page.close()


@pytest.mark.sweep
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 820, 1440])
@pytest.mark.parametrize("language", LANGUAGES)
def test_accessible_in_every_language(language: str, width: int, dark: bool, browser: Browser, folder: Path) -> None:
    page = opened(browser, folder, language, width=width, dark=dark)
    page.run(AXE.read_text(encoding="utf-8") + ";0")
    found = page.run(
        "axe.run(document, {resultTypes: ['violations']})"
        ".then(r => r.violations.map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 200))]))"
    )
    assert found == []
    assert page.run("document.documentElement.scrollWidth") == width
    page.close()


@pytest.mark.sweep
def test_it_answers_quickly_on_a_slow_machine(browser: Browser, folder: Path, record_property: Any) -> None:
    """Recorded rather than asserted tightly: other programs share the machine."""
    page = opened(browser, folder, width=390, slower=4)
    paint = page.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.run("document.getElementById('mask-switch').scrollIntoView()")
    press = (
        "(() => { const t = performance.now(); document.getElementById('mask-switch').click();"
        "document.body.offsetHeight; return performance.now() - t })()"
    )
    clicks = sorted(page.run(press) for _ in range(9))
    record_property("first paint, ms", paint)
    record_property("click, ms", clicks[4])
    assert paint < 5000 and clicks[4] < 1000
    page.close()


def test_what_scrolls_has_a_shadow_and_code_keeps_its_lines(browser: Browser, folder: Path) -> None:
    page = opened(browser, folder, width=390)
    wide = "[...document.querySelectorAll('.python pre, .formula, .arcs, .tablebox')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    assert page.run(f"{wide}.length") > 0, "something is wider than a telephone"
    assert page.run(f"{wide}.every((e) => getComputedStyle(e).backgroundImage.split('linear-gradient').length === 5)")
    assert page.run(
        "[...document.querySelectorAll('.python pre')].every((e) => getComputedStyle(e).whiteSpace === 'pre')"
    )
    page.close()


def test_on_paper(browser: Browser, folder: Path) -> None:
    """In light colours whatever the screen shows, with every figure; headings stay with what follows; nothing to press."""
    page = opened(browser, folder, width=760, dark=True, whole=False)
    page.send("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.run("getComputedStyle(document.body).backgroundColor") == page.run(
        "(() => { const e = document.createElement('i'); e.style.color = 'var(--paper)'; document.body.append(e);"
        "const c = getComputedStyle(e).color; e.remove(); return c })()"
    )
    light = page.run("getComputedStyle(document.documentElement).getPropertyValue('--paper')").strip()
    assert int(light[1:3], 16) > 200, "paper is light"
    shown = "[...document.querySelectorAll('main > section')].map((s) => [getComputedStyle(s).contentVisibility, s.offsetHeight > 60])"
    assert all(section == ["visible", True] for section in page.run(shown))
    assert page.run("[...document.querySelectorAll('h2')].every((h) => getComputedStyle(h).breakAfter === 'avoid')")
    hatched = "getComputedStyle(document.querySelector('#weights td.hidden'))"
    assert "gradient" in page.run(f"{hatched}.backgroundImage") and page.run(f"{hatched}.printColorAdjust") == "exact"
    visible = "[...document.querySelectorAll('main button')].filter((b) => b.checkVisibility() && b.closest('.bar, .controls, .walk'))"
    assert page.run(f"{visible}.length") == 0
    assert page.run("document.getElementById('live-text').checkVisibility()"), "the sentence that its figures are about"
    assert page.run("[...document.querySelectorAll('canvas')].every((c) => getComputedStyle(c).maxWidth === '100%')")
    page.close()


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_scripts(language: str, browser: Browser, folder: Path) -> None:
    """A sentence says so, and the first figures are there as pictures."""
    page = browser.open(folder / file_name(language), width=900, scripts=False)
    document = page.send("DOM.getDocument", depth=-1)["root"]["nodeId"]

    def seen(selector: str) -> list[dict[str, Any]]:
        nodes = page.send("DOM.querySelectorAll", nodeId=document, selector=selector)["nodeIds"]
        boxes = []
        for node in nodes:
            try:
                boxes.append(page.send("DOM.getBoxModel", nodeId=node)["model"])
            except RuntimeError:  # it is not laid out
                continue
        return boxes

    assert len(seen("main > noscript > p")) == 1
    assert all(box["height"] > 100 for box in seen("figure noscript svg")) and len(seen("figure noscript svg")) == 2
    assert seen("#live") == seen(".controls") == seen(".walk") == [] and len(seen("main > section > h2")) == 18
    page.close()
