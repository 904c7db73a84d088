"""What a cache shows of itself: held and evicted positions."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from lowtri import KVCache

SPACE = "{http://www.w3.org/2000/svg}"


def filled(mask: str, tokens: int, **options: Any) -> KVCache:
    cache = KVCache(mask, **{"block": 1, **options})
    for _ in range(tokens):
        cache.append(np.zeros((1, 2)), np.zeros((1, 2)))
    return cache


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("causal", "█" * 12),
        ("causal & window(4)", "········░▓▓▓"),
        ("causal & (window(4) | first(2))", "██······░▓▓▓"),
        ("causal & chunks(5)", "··········▓▓"),
        # Documents continue: the last one never ends.
        (
            "causal & documents(lengths=[5, 7], open_end=True)",
            "·····███████",
        ),
    ],
)
def test_a_sign_for_each_position(mask: str, expected: str) -> None:
    cache = filled(mask, 12)
    line = cache.draw().splitlines()[1]
    assert line == expected == str(cache).splitlines()[1]
    assert sum(sign != "·" for sign in line) == cache.held and line.count("·") == cache.evicted


def test_the_picture_has_the_same_states() -> None:
    cache = filled("causal & (window(4) | first(2))", 12)
    root = ET.fromstring(cache._repr_svg_())
    cells = [node for node in root.iter(f"{SPACE}rect") if float(node.get("height", "0").strip("%")) == 24]
    hidden = [
        node.get("fill") == "url(#hidden)" for node in cells for _ in range(round(float(node.attrib["width"]) / 24))
    ]
    assert hidden == [sign == "·" for sign in cache.draw().splitlines()[1]]
    words = [node.text for node in root.iter(f"{SPACE}text")]
    assert words[:3] == [repr(cache), "0", "11"] and "positions →" in words
    assert "stays: every later query sees it" in words and "not held: evicted, or padding" in words
    assert "6 of 6 slots hold a token, 6 tokens evicted" in cache._repr_html_()


def test_rows_of_a_batch_with_padding() -> None:
    cache = KVCache("causal")
    lengths = np.arange(20) % 5
    positions = np.where(np.arange(6) >= lengths[:, None], np.arange(6), -1)  # (20, 6), padding on the left
    cache.append(np.zeros((20, 1, 6, 2)), np.zeros((20, 1, 6, 2)), positions)
    lines = cache.draw().splitlines()
    assert lines[1:6] == ["██████", "·█████", "··████", "···███", "····██"] and lines[9] == "... and 12 more rows"
    assert "row 7" in cache._repr_svg_() and "row 8" not in cache._repr_svg_() and "12 more rows" in cache._repr_svg_()


def test_an_empty_cache() -> None:
    words = [node.text for node in ET.fromstring(KVCache()._repr_svg_()).iter(f"{SPACE}text")]
    assert words == ["KVCache(causal): 0 held, 0 evicted, 0 bytes", "nothing appended yet"]
    assert str(KVCache()).splitlines()[0] == words[0]


def test_pictures_are_bounded() -> None:
    cache = KVCache("causal & (window(1000) | first(4))", block=64)
    tokens = np.zeros((1, 100_000, 1), np.float32)
    cache.append(tokens, tokens)
    cache.append(tokens[:, :1], tokens[:, :1])
    line = cache.draw().splitlines()[1]
    assert line == "█" + "·" * 62 + "▓" and cache.held < 1100
    assert "a sign: 1,563 positions" in cache.draw() and len(cache._repr_svg_()) < 12_000


def test_after_crop_and_shift_the_positions_are_those_of_the_cache() -> None:
    cache = filled("causal & (window(4) | first(2))", 12, rewind=2)
    cache.crop(11)
    assert len(cache.draw().splitlines()[1]) == 11
    cache.shift(2)
    line = cache.draw().splitlines()[1]
    assert len(line) == cache.length and sum(sign != "·" for sign in line) == cache.held
