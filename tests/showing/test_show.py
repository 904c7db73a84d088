"""Attention weights as pictures: what is shown, and that it stays bounded."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtri
from lowtri.errors import CallError, DataError
from lowtri.pictures.labels import display_width
from lowtri.showing import MAX_HEADS, SMALL, pool

SPACE = "{http://www.w3.org/2000/svg}"


def causal_weights(heads: int, n: int, seed: int = 0) -> Any:
    weights = np.tril(np.random.default_rng(seed).random((heads, n, n))) + np.eye(n) * 1e-3
    return weights / weights.sum(-1, keepdims=True)


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(picture).iter(f"{SPACE}text")]


def test_all_heads_then_one() -> None:
    weights = causal_weights(4, 3)
    shown = lowtri.show(weights, tokens=["<b>", "R&D", "猫"], mask="causal", head=2)
    words = texts(shown.to_svg())
    assert [word for word in words if word.startswith("head")] == ["head 0", "head 1", "head 2", "head 3", "head 2"]
    assert words.count("<b>") == words.count("R&D") == words.count("猫") == 2  # once on each axis
    assert "keys →" in words and "queries →" in words and "hidden" in words and "weight 0" in words
    numbers = [word for word in words if re.fullmatch(r"\.\d\d|1", word)]
    assert numbers == ["1", *(f"{weights[2, i, j]:.2f}"[1:] for i, j in ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2)))]
    lines = str(shown).splitlines()
    assert lines[0].split() == ["head", "0", "head", "1", "head", "2", "head", "3"]
    assert [line.split()[0] for line in lines if line.startswith(("<b>", "R&D", "猫"))] == ["<b>", "R&D", "猫"]
    assert repr(shown) == "<WeightMaps of 4 x 3 x 3 weights>"


def test_arrays_tensors_and_lists_are_the_same() -> None:
    weights = causal_weights(2, 5).astype(np.float32)
    pictures = {
        lowtri.show(x).to_svg()
        for x in (weights, torch.tensor(weights, requires_grad=True), weights.tolist(), weights[None])
    }
    assert len(pictures) == 1
    assert lowtri.show(torch.eye(3, dtype=torch.bfloat16)).to_svg() == lowtri.show(np.eye(3, dtype=bool)).to_svg()


@settings(deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_pooled_rows_keep_their_sum(nq: int, nk: int, most: int, seed: int) -> None:
    weights = np.random.default_rng(seed).random((1, nq, nk))
    cells = pool(weights, 0, most)
    step = -(-max(nq, nk) // most)
    assert cells.step == step and max(cells.values.shape) <= most
    means = [weights[0, i : i + step].mean(0).sum() for i in range(0, nq, step)]
    np.testing.assert_allclose(cells.values.sum(1), means, rtol=1e-12)


def test_maps_of_all_lines_stand_below_one_another() -> None:
    lines = str(lowtri.show(causal_weights(20, 3))).splitlines()
    titles = [line for line in lines if line.startswith("head ")][:2]
    assert [title.index("head 1") for title in titles] == [9, 0] and titles[1].index("head 11") == 9


def test_of_large_heads_some_queries_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtri.showing._AT_ONCE", 64 * 640 * 3)
    weights = np.repeat(np.arange(640.0)[:, None], 640, axis=1)[None] / 640
    cells = pool(weights, 0)
    assert cells.rows_read == 3
    np.testing.assert_allclose(
        cells.values[:, 0], (10 * np.arange(64) + 4) * 10 / 640
    )  # queries 0, 4 and 8 of each ten
    assert "3 queries of it read" in lowtri.show(weights).to_svg()


@pytest.mark.parametrize(
    ("weights", "most"),
    [
        (np.random.default_rng(0).random((1000, 64, 64)), 300_000),
        (np.broadcast_to(np.float32(1e-5), (1000, 1, 100_000)), 60_000),  # one query, as in decoding
        (np.broadcast_to(np.float32(1e-5), (2, 100_000, 100_000)), 60_000),  # a stride of 0: no memory
    ],
    ids=["heads", "keys", "pairs"],
)
def test_pictures_are_bounded(weights: Any, most: int) -> None:
    shown = lowtri.show(weights)
    picture = shown.to_svg()
    root = ET.fromstring(picture)
    assert len(picture) < most and len(str(shown)) < 30_000
    assert float(root.attrib["width"]) < 1000 and float(root.attrib["height"]) < 1600
    more = f"... and {len(weights) - MAX_HEADS} more heads"
    assert (len(weights) > MAX_HEADS) == (more in picture) == (more in str(shown))
    assert all(len(line) <= 100 for line in str(shown).splitlines())


def test_hidden_pairs_and_zero_weights_and_nan_look_different() -> None:
    weights = np.array([[1, 0, 0], [1, 0, 0], [np.nan] * 3])
    shown = lowtri.show(weights, mask="causal")
    picture = shown.to_svg()
    assert picture.count("url(#hidden)") == 2  # the cells and the legend
    assert {"hidden", "not a number", "NaN"} <= set(texts(picture)) and "lowtri-leak" in picture
    assert [line.split()[1:] for line in str(shown).splitlines()[1:4]] == [
        ["1", "╱", "╱"],
        ["1", "0", "╱"],
        ["NaN"] * 3,
    ]
    assert "hidden" not in texts(lowtri.show(weights[:2]).to_svg())


def test_a_weight_on_a_hidden_pair_is_drawn_as_a_weight() -> None:
    """A picture with the mask's hatching over every hidden pair would conceal a leak."""
    shown = lowtri.show(np.full((3, 3), 1 / 3), mask="causal")
    assert "url(#hidden)" not in ET.tostring(ET.fromstring(shown.to_svg()).find(f"{SPACE}path"), "unicode")
    assert str(shown).count(".33") == 9 + 1  # and the legend's


def test_a_mask_of_several_heads() -> None:
    shown = lowtri.show(np.stack([np.eye(3), np.eye(3)]), mask="heads([causal, full])", head=1)
    assert "╱" not in str(shown).split("\n\n")[1].rpartition("\n")[0]
    assert str(shown).splitlines()[1].startswith("█╱╱")


@pytest.mark.parametrize("n", [1, 2, 12, 13, 65, 300])
@pytest.mark.parametrize("heads", [1, 3, 70])
def test_texts_stay_inside_the_frame(n: int, heads: int) -> None:
    tokens = ["a token of some length, cut"] * n
    root = ET.fromstring(lowtri.show(np.broadcast_to(np.eye(n), (heads, n, n)), tokens=tokens).to_svg())
    wide, high = float(root.attrib["width"]), float(root.attrib["height"])
    for node in root.iter(f"{SPACE}text"):
        if node.get("x"):
            length = float(node.get("font-size", "12")) * 0.6 * display_width(node.text or "")
            anchor = {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor", ""), 0.0)
            start = float(node.attrib["x"]) - anchor * length
            assert start >= 0 and start + length <= wide + 1 and 0 < float(node.attrib["y"]) <= high, node.text


def test_labels_are_escaped_and_markup_is_text(tmp_path: Path) -> None:
    tokens = ["<script>alert(1)</script>", "a\u202eb", '" onload="x']
    shown = lowtri.show(np.eye(3), tokens=tokens)
    page = shown.save(tmp_path / "maps.html").read_text(encoding="utf-8")
    for text in (shown.to_svg(), shown._repr_html_(), page):
        assert "<script" not in text and "\u202e" not in text and '" onload="' not in text
    assert "http" not in page
    assert "\u202e" not in str(shown) and "\\u202e" in str(shown)


def test_dark_screens() -> None:
    picture = lowtri.show(causal_weights(2, 4), mask="causal").to_svg()
    used = set(re.findall(r'class="lowtri-(\w+)"', picture))
    style = ET.fromstring(picture).findtext(f"{SPACE}style") or ""
    assert style.startswith("@media (prefers-color-scheme: dark)") and used == set(re.findall(r"lowtri-(\w+)\{", style))


@pytest.mark.parametrize(
    ("suffix", "start"),
    [("svg", b"<svg"), ("html", b"<!doctype"), ("txt", b"head 0"), ("png", b"\x89PNG"), ("pdf", b"%PDF")],
)
def test_saving_by_the_name_of_the_file(suffix: str, start: bytes, tmp_path: Path) -> None:
    path = lowtri.show(causal_weights(2, 4), tokens="a b c d", mask="causal").save(tmp_path / f"maps.{suffix}")
    assert path.read_bytes().startswith(start) and [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (np.ones((2, 3, 4, 5)), {}, r"\(2, 3, 4, 5\), with a batch of 2 in front. Fix: show\(weights\[0\]\)"),
        (np.ones(3), {}, r"\(3,\), but expected \(H, Nq, Nk\) or \(Nq, Nk\)"),
        (np.ones((0, 3)), {}, "with no empty side"),
        ([[1, 2], [3]], {}, "weights is not an array|real numbers"),
        (np.array([["a"]]), {}, "expected real numbers"),
        ([[-0.5]], {}, "got a weight of -0.5; expected at least 0, and finite.\nFix: pass them after the softmax"),
        ([[np.inf]], {}, "got a weight of inf; expected at least 0, and finite"),
        (np.eye(2), {"head": 1}, "there is no head 1 among 1. Fix: head from 0 to 0"),
        (np.eye(2), {"tokens": "a"}, "got 1 tokens for 2 keys. Fix: one token for each key"),
        (np.ones((2, 1)), {"tokens": "a"}, "2 queries and 1 tokens. Fix: query_tokens="),
        (np.eye(2), {"tokens": "a b", "query_tokens": "c"}, "got 1 query_tokens; expected one for each of 2 queries"),
        (np.eye(2), {"query_tokens": "c d"}, "got query_tokens without tokens"),
        (np.eye(2), {"mask": lowtri.keys(lengths=[1, 2])}, r"the mask has the batch \(2,\)"),
    ],
)
def test_errors(arguments: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CallError, match=words):
        lowtri.show(arguments, **options)


def test_no_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of .svg, .html, .txt, .png, .pdf"):
        lowtri.show(np.eye(2)).save(tmp_path / "maps.gif")
    assert list(tmp_path.iterdir()) == [] and SMALL < MAX_HEADS
