"""The page's JavaScript in Node, beside lowtri: masks from text, tokens, and every step of attention to 1e-6."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest

import lowtri
from lowtri.explaining.example import ENCODINGS
from lowtri.lesson.languages import LANGUAGES, assets
from lowtri.lesson.numbers import example
from lowtri.pictures.labels import split

NODE = shutil.which("node")
if NODE is None:
    pytest.skip("no Node: apt-get install nodejs", allow_module_level=True)

MASKS = [
    *("causal", "full", "window(3)", "band(1, 2)", "first(2)", "chunks(3)", "strided(2)", "~causal"),
    *("causal()", "(causal)", "causal & window(2)", "causal & (window(2) | first(1))", "causal | first(3)"),
    *("causal - window(2)", "~causal | first(2)", "causal - window(2) & full", "full - causal - window(1)"),
    *("causal & ~(window(2) | first(1))", "~~causal", "window(n=3)", "documents([0, 0, 1, 1])"),
    *("causal & documents(lengths=[2, 3])", "documents(cu_seqlens=[0, 2, 5])", "window(0x3)"),
    *("documents(lengths=[2, 9])", "documents(lengths=[2, 1], open_end=True)"),
    *("documents(cu_seqlens=[0, 2, 5], open_end=False)", "keys([True, False, True])"),
    *("causal & keys(lengths=[3])", "band(after=1, before=2)", "window(1_0)"),
    *("documents([3, 1, 3], [1, 3, 1, 1])", " causal&window( 2 )", "documents((0, 1, 1))"),
]
WRONG = [
    *("", " ", "causal &", "causal,", "causal and full", "not causal", "window(0)", "window(-1)", "window"),
    *("window(2, 3)", "band(1)", "0x3", "3", "[causal]", "chunks(2)()", "causal causal", "cuasal"),
    *("table([[True]])", "keys([1, 0])", "documents()", "window(n=2, n=3)", "window(m=2)", "(causal"),
    *("causal)", "~", "1 - causal", "window(2.5)", "'causal'", "window(" * 101, "<script>alert(1)</script>"),
    *("causal; full", "heads([causal", "first(0)", "causal & 3", "documents(lengths=[2, 0, 9])"),
    *("documents(lengths=[2, 3], open_end=1)", "documents([0, 1], open_end=True)"),
]
SENTENCES = [
    *("Write a poem", "  spaces   here ", "", "我爱 NLP", "ที่นี่ น้ำ", "شكرا لك", "👩‍👩‍👧 hi 🇹🇭"),
    *("<script>alert(1)</script> x", "é e\u0301 ก็", "的".join("abcdefgh")),
]


def in_node(expression: str, value: Any) -> Any:
    """The value of a JavaScript expression over ``value``, with the page's scripts loaded."""
    scripts = "\n".join(
        (assets() / "script" / f"{name}.js").read_text("utf-8") for name in ("base", "masks", "attention")
    )
    program = f"{scripts}\nconst value = {json.dumps(value)};\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([NODE or "", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_masks_are_lowtri_s() -> None:
    n = 9
    tables = in_node(f"value.map((text) => Lesson.table(Lesson.mask(text), {n}))", MASKS)
    for text, table in zip(MASKS, tables, strict=True):
        expected = lowtri.mask(text).dense(n, n)
        assert np.array_equal(table, expected.reshape(n, n)), text


def test_what_lowtri_refuses_the_page_refuses() -> None:
    tries = "value.map((text) => { try { Lesson.mask(text); return 'read'; } catch (error) { return error.key ?? String(error); } })"
    for text, answer in zip(WRONG, in_node(tries, WRONG), strict=True):
        with pytest.raises(lowtri.MaskError):
            lowtri.mask(text)
        assert answer.startswith("error."), (text, answer)


def test_a_drawn_mask_gets_its_name() -> None:
    named = [
        text
        for text in ("causal", "full", "causal & window(2)", "causal | first(2)", "causal & (window(2) | first(1))")
    ]
    tables = [lowtri.mask(text).dense(6, 6).tolist() for text in named]
    assert in_node("value.map(Lesson.nameOf)", tables) == named
    assert in_node("Lesson.nameOf(value)", [[True, False], [True, False]]) == "first(1)"
    assert in_node("Lesson.nameOf(value)", [[True, True, False], [False, True, False], [True, False, True]]) is None


def test_characters_are_lowtri_s() -> None:
    assert in_node("value.map(Lesson.characters)", SENTENCES) == [split(text)[0] for text in SENTENCES]


def test_words_are_those_of_the_readers() -> None:
    """At spaces; where the script has none, into the page's own words, or by the dictionary."""
    assert in_node("value.map(Lesson.tokens)", ["Write a poem", "  a  b ", "", "é <b>x</b>"]) == [
        ["Write", "a", "poem"],
        ["a", "b"],
        [],
        ["é", "<b>x</b>"],
    ]
    for language, given, words in (
        ("th", ["ลอง", "เขียน", "บทกวี"], ["ลอง", "เขียน", "บทกวี"]),
        ("zh", ["詩", "我", "寫"], ["我", "寫", "詩"]),
    ):
        data = {"words": given, "language": LANGUAGES[language]}
        found = in_node("(Lesson.data = value.data, Lesson.tokens(value.text))", {"data": data, "text": "".join(words)})
        assert found == words
    mixed = in_node("(Lesson.data = {language: 'th'}, Lesson.tokens(value))", "ฉัน รักNLP")
    assert mixed == ["ฉัน", "รัก", "NLP"]
    without_dictionary = in_node("(Intl.Segmenter = undefined, Lesson.tokens(value))", "我爱 NLP")
    assert without_dictionary == ["我", "爱", "NLP"]


def test_a_word_has_the_same_numbers_whatever_stands_beside_it() -> None:
    data = {"example": example()["example"], "sentences": {"example": ["Write", "a", "poem"]}}
    found = in_node(
        "(Lesson.data = value.data, value.texts.map((text) => Lesson.encodings(text)))",
        {"data": data, "texts": [["Write", "a", "poem"], ["Write", "a", "song"], ["song", "a"]]},
    )
    assert found[0] == ENCODINGS and found[1][:2] == ENCODINGS[:2] and found[1][2] != ENCODINGS[2]
    assert found[2][1] == ENCODINGS[1]


@pytest.mark.parametrize("text", ["causal & documents(lengths=[2, 8])", "documents(cu_seqlens=[0, 2, 3]) | full"])
def test_lengths_that_the_sentence_does_not_have_are_refused(text: str) -> None:
    tries = "[3, 10].map((n) => { try { Lesson.mask(value, n); return n; } catch (error) { return error.key; } })"
    fits = 10 if "8" in text else 3
    assert in_node(tries, text) == [n if n == fits else "error.lengths" for n in (3, 10)]


@pytest.mark.parametrize("mask", ["causal", "full", "causal & window(2)", "causal - window(2)", "~causal | first(1)"])
def test_steps_are_lowtri_s(mask: str) -> None:
    n = 7
    q, k, v = np.random.default_rng(0).standard_normal((3, n, 2)) * 4
    value = {"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), "mask": mask, "n": n}
    steps = in_node("Lesson.attend(value, Lesson.table(Lesson.mask(value.mask), value.n))", value)
    expected = lowtri.explain((q, k, v), mask=mask)
    for name in ("scores", "scaled", "weights", "output"):
        assert np.allclose(steps[name], expected[name].value, rtol=0, atol=1e-6), name
    hidden = ~np.asarray(expected.visible)
    assert all(steps["masked"][i][j] is None for i, j in zip(*np.nonzero(hidden), strict=True))  # JSON has no -Infinity
    assert np.all(np.asarray(steps["weights"])[hidden] == 0)


def test_the_worked_example() -> None:
    worked = example()["example"]
    value = {"x": ENCODINGS, "maps": worked["maps"]}
    steps = in_node(
        "(() => { const [q, k, v] = ['q', 'k', 'v'].map((n) => Lesson.product(value.x, value.maps[n]));"
        "return { q, k, v, ...Lesson.attend({ q, k, v }, Lesson.table(Lesson.mask('causal'), 3)) }; })()",
        value,
    )
    for name, expected in worked["steps"].items():
        assert np.allclose(steps[name], expected, rtol=0, atol=1e-6), name
    assert np.allclose(steps["output"], [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]], atol=6e-5)
