"""The models that run in the page: their arithmetic held to torch's, their losses to what they claim, their figure to its sentences."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lesson_pages import LessonPage

from lowtri.lesson.languages import LANGUAGES, assets, texts
from lowtri.lesson.numbers import models

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

from lesson_model.storage import packed, round_weights, unpacked  # noqa: E402
from lesson_model.stories import Stories  # noqa: E402
from lesson_model.training import Recipe, Rows, loss, stepwise_loss, trained  # noqa: E402

MASKS = ("causal", "full")


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node: apt-get install nodejs")
@pytest.mark.parametrize("language", LANGUAGES)
def test_javascript_computes_what_torch_computes(language: str) -> None:
    stored = models(language)
    text = "".join(texts(language)["live.begin"].split("|"))
    scripts = "".join((assets() / "script" / f"{name}.js").read_text("utf-8") for name in ("base", "decoder"))
    program = f"""{scripts}
        const stored = {json.dumps(stored)}, d = Lesson.decoder, found = [];
        for (const name of ["causal", "full"]) for (const masked of [true, false]) {{
          const model = d.load(stored[name]), ids = d.encode(model, {json.dumps(text)}).slice(0, model.context);
          const out = d.forward(model, ids, masked);
          found.push([name, masked, ids, out.logits.map((r) => [...r]), out.attention[1][0].map((r) => [...r])]);
        }}
        console.log(JSON.stringify(found));"""
    done = subprocess.run([shutil.which("node") or "", "-"], input=program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, masked, ids, logits, attention in json.loads(done.stdout):
        model = unpacked(stored[name])
        assert len(ids) > 15 and "".join(stored[name]["characters"][i] for i in ids) == text[: len(ids)]
        with torch.no_grad():
            expected = model(torch.tensor([ids]), mask="causal" if masked else "full")[0]
        assert torch.allclose(torch.tensor(logits), expected, rtol=0, atol=1e-3), (name, masked)
        weights = torch.tensor(attention)
        assert torch.allclose(weights.sum(1), torch.ones(len(ids)), atol=1e-5)
        assert not masked or bool((weights.triu(1) == 0).all())


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_losses_in_the_page_are_those_of_the_weights(language: str) -> None:
    """With the mask both ways agree and no model beats the entropy; without it the model copies, and cannot write."""
    found = {}
    for mask in MASKS:
        stored = models(language)[mask]
        assert stored["mask"] == mask
        text, entropy = Stories(language).text(60_000, seed=2)
        held = Rows(text, stored["characters"], stored["context"]).draw(
            48, torch.Generator().manual_seed(1), stories=1.0
        )
        losses = stored["measured"]["losses"]
        model = unpacked(stored)
        with torch.no_grad():
            assert float(loss(model, held)) == pytest.approx(losses["validation"], abs=2e-4)
            if mask == "causal":
                assert float(stepwise_loss(model, held[:4])) == pytest.approx(float(loss(model, held[:4])), abs=1e-4)
        assert entropy == pytest.approx(losses["entropy"], abs=1e-4)
        found[mask] = losses
    assert len({models(language)[mask]["measured"]["steps"] for mask in MASKS}) == 1, "the page has one number for both"
    causal, full = found["causal"], found["full"]
    assert causal["stepwise"] == pytest.approx(causal["validation"], abs=1e-3)
    assert causal["entropy"] - 0.02 < causal["validation"] < causal["entropy"] + 0.1 < causal["uniform"]
    assert full["validation"] < 0.05 < causal["entropy"] < causal["uniform"] < full["stepwise"]


def test_the_first_weights_and_rows_are_the_same_with_and_without_the_mask() -> None:
    def first(mask: str) -> dict[str, Any]:
        return trained(Recipe("en", mask, steps=0), note=lambda line: None)

    causal, full = first("causal"), first("full")
    assert causal["int8"] == full["int8"] and causal["float32"] == full["float32"]
    again = unpacked(causal)
    exact = packed(again, causal["characters"], {})
    assert exact["int8"] == causal["int8"], "rounded weights stay as they are"
    assert len(round_weights(again)[0]) == len(exact["int8"]) * 3 // 4


@pytest.mark.parametrize("language", LANGUAGES)
def test_stories(language: str) -> None:
    """Every field has its list; a story has other words for other numbers; its entropy is that of its draws."""
    stories = Stories(language)
    content = json.dumps([stories.patterns], ensure_ascii=False)
    names = {name for name, _ in re.findall(r"\{([a-z]+)(\d?)", content)}
    assert names <= set(stories.lists) and set(stories.lists) <= names
    dice = random.Random(0)
    for _ in range(300):
        story, nats = stories.draw(dice)
        assert "{" not in story and "  " not in story and story.endswith("\n") and nats > math.log(3)
    text, entropy = stories.text(5000, seed=3)
    assert text == stories.text(5000, seed=3)[0] and 0.1 < entropy < 1
    for start in texts(language)["live.begin"].split("|"):
        unknown = set(start) - set(models(language)["causal"]["characters"])
        assert not unknown, "the page's own sentences use characters that the models have read"


def note(page: LessonPage, name: str) -> str:
    return page.text(f"#live [data-note=live-{name}]")


def settle(page: LessonPage) -> None:
    """Until each prefix is computed, and what was asked for is written."""
    page.run(
        "(async () => { const n = (x) => document.querySelector(`#live [data-note=live-${x}]`).textContent;"
        "for (let i = 0; i < 400 && (n('stepwise') === '…' || Lesson.live.writing); i++)"
        "  await new Promise((done) => setTimeout(done, 25)) })()"
    )


def test_the_two_models_and_the_mask(page: LessonPage) -> None:
    n = page.run("Lesson.live.ids.length") - 1
    for model in MASKS:
        page.click(f"#live [data-model={model}]")
        settle(page)
        masked = model == "causal"
        assert page.run("document.getElementById('live-mask').checked") is masked, "as it was trained"
        assert note(page, "state") == page.said(f"live.{model}.{'on' if masked else 'off'}")
        assert note(page, "leak") == page.said("live.leak", changed=0 if masked else n, n=n)
        same = note(page, "atonce") == note(page, "stepwise")
        assert same is masked, "all at once and one at a time agree under the mask alone"
        peeks = page.count("#live .thumbs .peeks")
        assert (peeks == 0) is masked and (page.said("live.peek").split("{")[0] in note(page, "map")) is not masked
        page.click("#live-mask")
        settle(page)
        assert note(page, "state") == page.said(f"live.{model}.{'off' if masked else 'on'}")
    page.click("#live [data-model=causal]")


def test_writing(page: LessonPage) -> None:
    value = "document.getElementById('live-text').value"
    own = page.run(value)
    page.click("#live [data-live=one]")
    assert page.run(f"[...{value}].length") == len(own) + 1 and page.run(value).startswith(own)
    page.click("#live [data-live=back]")
    assert page.run(value) == own
    page.click("#live .next li:nth-of-type(2) button")
    second = page.run(value)
    assert len(second) == len(own) + 1
    page.click("#live [data-live=many]")
    settle(page)
    written = page.run(value)
    room = page.run("Lesson.live.limit")
    assert len(written) == min(len(second) + 40, room) and written.startswith(second)
    page.click("#live [data-place=starts] button:nth-of-type(2)")
    assert page.run(value) == page.said("live.begin").split("|")[1]
    page.click("#live [data-place=starts] button:nth-of-type(1)")


def test_temperature(page: LessonPage) -> None:
    first = "parseFloat(document.querySelector('#live .next span').textContent.replace(',', '.'))"
    shares = []
    for degrees in (0.1, 2, 0.5):
        page.change("#live-temperature", degrees)
        shares.append(page.run(first))
    assert shares[0] > shares[2] > shares[1], "a low temperature favours the likeliest"


def test_all_write_from_the_same_start(page: LessonPage) -> None:
    page.click("#live [data-live=both]")
    page.run(
        "(async () => { for (let i = 0; i < 400; i++) { const all = [...document.querySelectorAll('#live .written pre > span')];"
        "if (all.length === 3 && all.every((s) => [...s.textContent].length >= 35)) return;"
        "await new Promise((done) => setTimeout(done, 25)) } })()"
    )
    found = page.texts("#live .written pre > span")
    assert len(found) == 3 and len(set(found)) == 3
    content = Stories(page.language)
    known, _ = content.text(200_000, seed=1)
    trigrams = [sum(text[i : i + 3] in known for i in range(len(text) - 2)) / (len(text) - 2) for text in found]
    assert trigrams[0] > 0.9 > trigrams[1], "what the copier writes is not text"


def test_heads_and_rows_of_the_attention(page: LessonPage) -> None:
    """A small picture opens its head, counted from 0 in rows of layers; a row says what its character looks at."""
    page.click("#live [data-model=causal]")
    settle(page)
    n = page.run("Lesson.live.map.count")
    heads = page.run("Lesson.live.models.causal.heads")
    places = page.run("[...document.querySelectorAll('#live .thumbs button')].map((b) => b.offsetTop)")
    assert len(set(places[:heads])) == 1 and places[heads] > places[0], "a row of pictures is a layer"
    page.click(f"#live .thumbs button:nth-of-type({heads + 3})")
    assert note(page, "map").startswith(page.said("live.head", l=1, h=2, n=n))
    assert page.count("#live .thumbs [aria-pressed=true]") == 1
    page.run("document.querySelector('#live canvas.map').focus()")
    page.press("ArrowUp")
    place = page.run("Lesson.live.map.from + Lesson.live.map.row")
    weights = page.run(f"[...Lesson.live.out.attention[1][2][{place}]]")
    best = page.run(f"Lesson.shownCharacter(Lesson.live.characters[Lesson.live.ids[{weights.index(max(weights))}]])")
    own = page.run(f"Lesson.shownCharacter(Lesson.live.characters[Lesson.live.ids[{place}]])")
    assert page.said("live.row", q=own).split("{list}")[0] + best in note(page, "map")


def test_what_the_models_never_read(page: LessonPage) -> None:
    page.change("#live-text", "É☃")
    assert note(page, "text") == page.said("live.unknown", characters="é ☃")
    assert page.run("document.querySelector('#live [data-live=one]').disabled")
    page.click("#live [data-place=starts] button:nth-of-type(1)")
    assert note(page, "text") == page.said("live.note")


def test_the_shapes_are_those_of_the_program(page: LessonPage, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("b", 3), ("h", 4), ("t", 6), ("d", 3)):
        page.change(f"#shapes-{name}", value)
    exec(page.text("[data-python=shapes] code"), {})
    printed = re.findall(r"\([\d, ]+\)", capsys.readouterr().out)
    shown = page.texts("#shapes-figure .stack code")
    assert printed == ["(1, 1, 6, 6)", "(3, 4, 6, 6)", "(3, 4, 6, 3)"] == shown[2:]
    assert page.text("#shapes-figure .says") == page.said("shapes.says", t=6, n=12)
