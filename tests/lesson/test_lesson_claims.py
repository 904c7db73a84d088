"""What docs/claims.md measures, the lesson says in its four languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowtri.lesson.languages import LANGUAGES, markup, texts
from lowtri.lesson.page import lesson_page

CLAIMS = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8").split("## Two pairs")[0]
SAYS = {  # the beginning of a claim -> the sentences of the lesson about it
    "position i sees 1 to i": ("why.p2",),
    "the worked numbers of": ("bench.caption",),
    "the worked NumPy numbers": ("shapes.p1",),
    "a hidden token gets weight 0": ("matrix.caption",),
    "-1e9, -1e20 and -9e15": ("quiz.2.b", "traps.3.p"),
    "a large negative number": ("traps.4.p",),
    "without a mask the last row": ("pair.caption",),
    "True marks what is hidden": ("traps.1.p",),
    "subtracting the maximum": ("matrix.p3",),
    "additive, boolean": ("forms.p1",),
    "eight heads of 64": ("flow.heads.p",),
    "`is_causal=True` is faster": ("forms.fused.p",),
    "masked self-attention trains in parallel": ("forcing.p1", "kin.6a"),
    "the mask costs nothing": ("patterns.caption",),
    "training needs the mask": ("forcing.training.3",),
    "inference has the same information": ("forcing.inference.1",),
    "at inference the mask": ("forcing.inference.2", "cache.p2"),
    "generation goes [START]": ("recurrent.p1",),
    "it cheats": ("without.c1", "without.c1.p"),
    "it overfits": ("without.c2", "without.c2.p"),
    "it writes in the wrong order": ("without.c3", "without.c3.p"),
    "it cannot generate": ("without.c4", "without.c4.p"),
    "the training loss looks excellent": ("without.caption",),
    "GPT and the decoders": ("kin.3a",),
    "the encoder's matrix is full": ("pair.p1",),
    "autoregressive models need": ("kin.3b", "recurrent.p1"),
    "the next token is the argmax": ("flow.next.p",),
    "encodings are embedding plus position": ("bench.made.p", "flow.embedding.p"),
}


def test_every_claim_has_its_sentence() -> None:
    claims = re.findall(r"^\| (?!claim |---)(.+?) \|", CLAIMS, re.M)
    assert len(claims) == len(SAYS)
    for claim, start in zip(claims, SAYS, strict=True):
        assert claim.startswith(start)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_has_these_sentences(language: str) -> None:
    own, page = texts(language), lesson_page(language)
    for keys in SAYS.values():
        for key in keys:
            html = all(part in page for part in re.split(r"\{\w+\}", markup(own[key])))
            of_scripts = own[key].replace("<", "\\u003c") in page
            assert html or of_scripts, key
    table = [own[f"kin.q{n}"] for n in range(1, 7)] + [own[f"forcing.q{n}"] for n in range(1, 4)]
    assert all(question in page for question in table), "the two pairs that are easily confused"
