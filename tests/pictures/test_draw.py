"""Pictures of masks, and the command that prints them."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtri.cli.main import main
from lowtri.errors import DataError, LowtriError, MaskError
from lowtri.masks import (
    Mask,
    band,
    causal,
    chunks,
    documents,
    first,
    full,
    heads,
    keys,
    mask,
    strided,
    table,
    where,
    window,
)
from lowtri.pictures.grids import MAX_CELLS
from lowtri.pictures.labels import display_width, shortened, split
from lowtri.pictures.masks import MAX_PANELS, cells_of, draw, picture_size, svg
from lowtri.showing import show

# Text.


def test_a_table_of_tokens() -> None:
    """The two tables of the notebooks: all pairs, and the triangle."""
    drawn = draw(full(), 4, beside="causal", tokens="I love Machine Learning", ticks=True, titles=["no mask", "masked"])
    expected = """
        no mask                                 masked
                  I  love  Machine  Learning              I  love  Machine  Learning
        I         ✓   ✓       ✓        ✓        I         ✓   ✗       ✗        ✗
        love      ✓   ✓       ✓        ✓        love      ✓   ✓       ✗        ✗
        Machine   ✓   ✓       ✓        ✓        Machine   ✓   ✓       ✓        ✗
        Learning  ✓   ✓       ✓        ✓        Learning  ✓   ✓       ✓        ✓
    """
    assert drawn.splitlines() == cleandoc(expected).splitlines()


def test_tables_align_for_thai_and_chinese() -> None:
    lines = causal().draw(4, tokens=["ที่นี่", "黑猫", "cat", "กำลัง"], ticks=True).splitlines()
    assert lines == [
        "      ที่นี่  黑猫  cat  กำลัง",
        "ที่นี่    ✓    ✗     ✗    ✗",
        "黑猫  ✓    ✓     ✗    ✗",
        "cat   ✓    ✓     ✓    ✗",
        "กำลัง  ✓    ✓     ✓    ✓",
    ]
    for row in lines[1:]:  # in columns of a terminal, every mark stands at the same place
        assert [display_width(row[:i]) for i, c in enumerate(row) if c in "✓✗"] == [6, 11, 17, 22]


@pytest.mark.parametrize("text", ["ที่นี่", "กำลัง", "น้ำ", "黑猫，", "ガ", "한국어", "é", "e\u0301", "✓✗█·▒", "Türkçe"])
def test_display_width_agrees_with_the_terminal_library(text: str) -> None:
    from rich.cells import cell_len

    assert display_width(text) == cell_len(text)


def test_ticks_without_tokens_count_positions() -> None:
    expected = """
           0  1  2
        1  ✓  ✓  ✗
        2  ✓  ✓  ✓
    """
    assert draw(causal(), 2, 3, ticks=True).splitlines() == cleandoc(expected).splitlines()


def test_cross_attention_has_two_kinds_of_tokens() -> None:
    drawn = draw(first(1), 2, 3, tokens=["le", "chat", "noir"], query_tokens=["the", "cat"])
    expected = """
             le  chat  noir
        the  █    ·     ·
        cat  █    ·     ·
    """
    assert drawn.splitlines() == cleandoc(expected).splitlines()


def test_batch_rows_and_heads_one_after_the_other() -> None:
    rows = documents([[0, 0], [0, 1]]).draw(2)
    assert rows == "batch row 0\n██\n██\n\nbatch row 1\n█·\n·█"
    assert heads([full(), causal()]).draw(2).splitlines() == ["head 0", "██", "██", "", "head 1", "█·", "██"]
    both = heads([full(), causal()]) & keys(lengths=[1, 2])
    assert both.draw(2).splitlines()[-3:] == ["batch row 1, head 1", "█·", "██"]
    beside = draw(causal(), 2, beside=documents([[0, 0], [0, 1]])).splitlines()
    assert beside[5:] == ["batch row 1", beside[1], "█·        █·", "██        ·█"]


def test_many_batch_rows_are_counted() -> None:
    drawn = keys(lengths=[1] * 40).draw(2)
    assert drawn.count("batch row") == MAX_PANELS
    assert drawn.endswith("... and 24 more")


def test_large_masks_are_drawn_by_tiles() -> None:
    """A cell of 100 positions over 64 is 2 x 2 positions: the diagonal is partly visible."""
    lines = causal().draw(100).splitlines()
    assert len(lines) == 51 and lines[0] == "▒" + "·" * 49 and lines[2] == "██▒" + "·" * 47
    assert lines[-1] == "a cell: 2 x 2 of 100 x 100 pairs: █ all visible, ▒ some, · none"
    lines = (causal() & window(4)).draw(128).splitlines()
    assert lines[3].startswith("·▒█▒·")
    assert strided(2).draw(65).rpartition("\n")[0].count("▒") == 33 * 33 - 1  # 65 is odd: the last cell is one pair


def test_up_to_a_million_pairs_each_pair_is_read() -> None:
    """A formula without intervals answers PARTIAL for every tile; its picture is exact all the same."""
    visible = np.tri(1100, dtype=bool)
    formula = where(lambda q, k: visible[q, k])
    assert formula.draw(1000) == causal().draw(1000)
    assert set(formula.draw(1100).splitlines()[0]) == {"▒"}
    assert np.array_equal(cells_of(causal(), 3, 100, 2), [[2] * 49 + [1], [2] * 50])


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_cell_is_what_its_pairs_are(nq: int, more: int, step: int, seed: int) -> None:
    pairs = np.random.default_rng(seed).random((nq, nq + more)) < 0.8
    shown = cells_of(table(pairs), nq, nq + more, step)
    for (i, j), cell in np.ndenumerate(shown):
        block = pairs[i * step : (i + 1) * step, j * step : (j + 1) * step]
        assert cell == (2 if block.all() else int(block.any()))


@pytest.mark.parametrize("n", [64, 65, 1000, 262_144, 10_000_000])
def test_pictures_are_bounded(n: int) -> None:
    lines = (causal() & window(n // 2)).draw(n).splitlines()[: -1 if n > 64 else None]
    assert MAX_CELLS / 2 < len(lines) <= MAX_CELLS
    assert all(len(line) == len(lines) for line in lines)


def test_the_last_queries_of_many_keys() -> None:
    lines = causal().draw(10, 1000).splitlines()
    assert lines[:-1] == ["█" * 61 + "▒▒"]  # keys 976 .. 991 and 992 .. 999; the queries are 990 .. 999


def test_unprintable_tokens_are_written_out() -> None:
    drawn = draw(full(), 2, tokens=["a\n", "\x1b[31m"])
    assert "a\\n" in drawn and "\\x1b[31m" in drawn and "\x1b" not in drawn
    assert "…" in draw(full(), 1, tokens=["x" * 100])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: causal().draw(0), "draw: 0 queries and 0 keys: there is nothing to draw"),
        (lambda: causal().draw(3, tokens="a b"), "draw: got 2 tokens for 3 keys. Fix: one token for each key"),
        (lambda: full().draw(3, 2, tokens="a b"), "draw: 3 queries and 2 tokens. Fix: query_tokens= names the queries"),
        (
            lambda: full().draw(2, tokens="a b", query_tokens="c"),
            "draw: got 1 query_tokens; expected one for each of 2 queries",
        ),
        (lambda: full().draw(2, query_tokens="c d"), "draw: got query_tokens without tokens"),
        (lambda: full().draw(65, tokens=["a"] * 65), "draw: 65 tokens do not fit on a picture of 64 cells"),
        (lambda: full().draw(2, ticks=True, latex=True), "ticks, numbers and latex are three forms of one picture"),
        (lambda: full().draw(1, tokens="a", latex=True), "the LaTeX matrix has no labels"),
        (lambda: full().draw(65, numbers=True), "draw: 65 positions: a matrix has at most 64 each way"),
        (lambda: full().draw(1, 65, latex=True), "draw: 65 positions: a matrix has at most 64 each way"),
        (lambda: full().draw(2, titles=["a", "b"]), "draw: got 2 titles; expected one for each of 1 masks"),
        (lambda: full().draw(2, beside=np.ones((2, 2), bool)), "beside: got a bare ndarray"),
        (lambda: keys(lengths=[1, 2]).draw(2, beside=keys(lengths=[1, 2, 3])), "do not fit together"),
    ],
)
def test_errors(act, words: str) -> None:
    with pytest.raises(MaskError) as caught:
        act()
    assert words in str(caught.value)


def test_the_added_matrix_as_text_and_latex() -> None:
    named = causal().draw(2, tokens="a b", numbers=True)
    assert [line.split() for line in named.splitlines()] == [["a", "b"], ["a", "0", "-inf"], ["b", "0", "0"]]
    assert causal().draw(2, numbers=True) == "0  -inf\n0     0"
    rows = "  0 & -\\infty & -\\infty \\\\\n  0 & 0 & -\\infty \\\\\n  0 & 0 & 0\n"
    assert causal().draw(3, latex=True) == f"\\left[\\begin{{array}}{{rrr}}\n{rows}\\end{{array}}\\right]"
    assert full().draw(2, beside=causal(), latex=True).count("array") == 4
    assert "\\quad" in full().draw(2, beside=causal(), latex=True)
    heads_text = heads([full(), causal()]).draw(2, latex=True)
    assert [line for line in heads_text.splitlines() if line.startswith("%")] == ["% head 0", "% head 1"]
    assert keys(lengths=[1] * 40).draw(1, latex=True).endswith("% ... and 24 more")


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.sampled_from(["causal", "full", "window(2)", "causal - window(1)"]))
def test_the_matrix_is_the_one_that_is_added(nq: int, more: int, text: str) -> None:
    nk = nq + more
    expected = mask(text).additive(nq, nk, dtype=np.float64).tolist()
    printed = draw(text, nq, nk, numbers=True).splitlines()
    assert [[float(x) for x in line.split()] for line in printed] == expected
    body = draw(text, nq, nk, latex=True).replace("-\\infty", "-inf").splitlines()[1:-1]
    assert [[float(x) for x in line.removesuffix("\\\\").split("&")] for line in body] == expected


def test_the_command_prints_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal", "--n", "2", "--numbers"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == ["0  -inf", "0     0"]
    assert main(["mask", "causal", "--n", "2", "--latex"]) == 0  # everything but the matrix is a comment
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and line[0] != "%"] == causal().draw(2, latex=True).splitlines()


# Hostile labels.


@pytest.mark.parametrize(
    "c", ["\u202e", "\u2067", "\u200b", "\x07", "\x9b", "\u2028", "\ufeff", "\ud83d", "\ufffe", "\U000e0001"]
)
def test_no_label_reorders_or_breaks_a_picture(c: str) -> None:
    label = f"a{c}b"
    for make, times in ((svg, 4), (draw, 3)):
        text = make(causal(), 1, tokens=[label], titles=[label])
        assert c not in text and text.count("a" + c.encode("unicode_escape").decode() + "b") == times
        text.encode("utf-8")


def test_long_labels_are_cut_in_constant_time() -> None:
    assert shortened("x" * 10**7) == "x" * 23 + "…"
    assert len(shortened("a" + "\u0301" * 10**6)) <= 4 * 24 + 1  # marks take no column


@pytest.mark.sweep
@settings(deadline=None)
@given(st.text(st.characters(codec=None), max_size=60))
def test_any_text_is_a_label_and_a_sentence(text: str) -> None:
    label = shortened(text)
    assert label.isprintable() and display_width(label) <= 24
    ET.fromstring(svg(causal(), 1, tokens=[text], titles=[text]))
    tokens, how = split(text)
    assert "".join(tokens) == "".join(text.split()) and "" not in tokens
    assert how == "cut at spaces" or len(tokens) >= len(text.split())


# SVG.

SPACE = "{http://www.w3.org/2000/svg}"


def cells(text: str, fill: str) -> int:
    """How many cells have this fill; neighbours are one rectangle, so widths are counted."""
    rectangles = [r for r in ET.fromstring(text).iter(f"{SPACE}rect") if fill in ET.tostring(r, "unicode")]
    cells = [r for r in rectangles if "stroke" not in r.attrib and "%" not in r.get("width", "")]
    return round(sum(float(r.get("width", "0")) / float(r.get("height", "1")) for r in cells))


def test_svg_shows_every_cell() -> None:
    text = svg(causal(), 5)
    assert cells(text, "#7a3c9e") == 15
    assert cells(text, "url(#hidden)") == 10
    assert svg(causal() & window(300), 1000).count("#cdb4dc") > 60


def test_svg_names_tokens_on_both_axes_and_escapes_them() -> None:
    root = ET.fromstring(svg(causal(), 3, tokens=["<b>", "R&D", "黑\x00猫"], beside=full(), titles=["a<b", "c"]))
    texts = [node.text for node in root.iter(f"{SPACE}text")]
    assert texts.count("<b>") == texts.count("R&D") == 3  # the queries once, the keys of each mask
    assert "黑\\x00猫" in texts and "a<b" in texts
    assert root.find(f"{SPACE}title").text == "a<b beside c"


@pytest.mark.parametrize("options", [{}, {"tokens": "a b c"}, {"beside": "full"}, {"titles": ["x"]}])
def test_svg_names_its_axes(options: dict[str, Any]) -> None:
    root = ET.fromstring(svg(causal(), 3, **options))
    texts = [node.text for node in root.iter(f"{SPACE}text")]
    assert texts.count("queries →") == 1 and texts.count("keys →") == (2 if "beside" in options else 1)
    (rows,) = [node for node in root.iter(f"{SPACE}text") if node.text == "queries →"]
    assert "rotate(90)" in rows.get("transform", "")  # so the arrow points down


def class_and_fill(node: ET.Element) -> tuple[str | None, ...]:
    return tuple(node.get(name) for name in ("class", "fill"))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: svg(causal(), 4), ["may see", "hidden"]),
        (lambda: svg(causal(), 100), ["may see", "partly", "hidden"]),
    ],
)
def test_svg_legend_has_the_colours_that_are_drawn(make: Any, names: list[str]) -> None:
    root = ET.fromstring(make())
    swatches = [node for node in root.iter(f"{SPACE}rect") if "stroke" in node.attrib]
    texts = [node.text for node in root.iter(f"{SPACE}text")]
    assert [text for text in texts if text in names] == names and len(swatches) == len(names)
    drawn = {
        class_and_fill(node) for node in root.iter(f"{SPACE}rect") if "stroke" not in node.attrib and node.get("x")
    }
    assert drawn <= {class_and_fill(node) for node in swatches}


def test_svg_is_dark_on_dark_screens_and_keeps_its_proportions() -> None:
    root = ET.fromstring(svg(causal() & window(300), 1000, beside="full"))
    style = root.findtext(f"{SPACE}style") or ""
    assert style.startswith("@media (prefers-color-scheme: dark)")
    used = {node.get("class") for node in root.iter() if node.get("class")}
    assert used == {f"lowtri-{name}" for name in ("ink", "paper", "line", "hatch", "visible", "partly")}
    assert used == set(re.findall(r"\.([\w-]+)\{", style))
    assert root.get("style") == "max-width:100%;height:auto" and root.get("viewBox")


@pytest.mark.parametrize("n", [1, 2, 4, 64, 100, 10**7])
@pytest.mark.parametrize("options", [{}, {"beside": "full"}, {"titles": ["a title of some length, of sixty columns"]}])
def test_svg_draws_inside_its_frame(n: int, options: dict[str, Any]) -> None:
    root = ET.fromstring(svg(causal(), n, **options))
    wide, high = float(root.get("width", "0")), float(root.get("height", "0"))
    for node in root.iter(f"{SPACE}text"):
        if node.get("x"):
            length = 7.2 * len(node.text or "")
            start = float(node.get("x", "0")) - (length / 2 if node.get("text-anchor") == "middle" else 0)
            assert start >= 0 and start + length <= wide and 0 < float(node.get("y", "0")) <= high, node.text


def test_the_picture_in_the_documentation_is_up_to_date() -> None:
    titles = ["full: an encoder", "causal: a decoder"]
    text = svg(full(), 4, beside=causal(), tokens="The black cat <end>", titles=titles)
    assert (Path(__file__).parents[2] / "docs" / "who-sees-whom.svg").read_text(encoding="utf-8") == text


def test_svg_of_batches_shows_each() -> None:
    text = svg(heads([causal(), full()]) & keys(lengths=[3, 2]), 3)
    assert text.count("batch row 1, head 0") == 1
    assert "... and 24 more" in svg(keys(lengths=[1] * 40), 2)


def test_svg_is_self_contained() -> None:
    text = svg(causal() & window(3), 8, tokens=list("abcdefgh"))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in text and "<image" not in text
    assert len(svg(table(np.random.default_rng(0).random((64, 64)) < 0.5), 64)) < 300_000


def test_saving(tmp_path: Path) -> None:
    path = tmp_path / "mask.svg"
    path.write_text("old")
    causal().save(path, 4, tokens="The black cat <end>")
    assert path.read_text(encoding="utf-8") == svg(causal(), 4, tokens="The black cat <end>")
    assert [p.name for p in tmp_path.iterdir()] == ["mask.svg"]
    window(2).save(str(path))
    assert cells(path.read_text(encoding="utf-8"), "#7a3c9e") == 23  # 12 positions


def test_a_page(tmp_path: Path) -> None:
    causal().save(tmp_path / "mask.html", 4)
    page = (tmp_path / "mask.html").read_text(encoding="utf-8")
    picture = svg(causal(), 4).replace(' xmlns="http://www.w3.org/2000/svg"', "")
    assert page.startswith("<!doctype html>") and picture in page and "<title>causal</title>" in page


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_pictures_by_matplotlib(suffix: str, magic: bytes, tmp_path: Path) -> None:
    """Every element of the SVG is drawn; dollar signs and markup of labels are letters."""
    path = tmp_path / f"mask.{suffix}"
    labels = ["$x_1$", "<b>", "R&D"]
    for save in (
        partial(causal().save, path, 3, tokens=labels, beside="full"),
        partial(show(np.eye(3), labels, mask="causal").save, path),  # shaded cells
    ):
        save()
        first_content = path.read_bytes()
        assert first_content.startswith(magic) and len(first_content) < 200_000
        save()
        assert path.read_bytes() == first_content and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_raster_picture_has_the_cells_of_the_svg(tmp_path: Path) -> None:
    from matplotlib.image import imread

    causal().save(tmp_path / "mask.png", 8)
    red, green, blue = np.moveaxis(imread(tmp_path / "mask.png")[..., :3], -1, 0)
    root = ET.fromstring(svg(causal(), 8))
    scale = red.shape[1] / float(root.get("width", "0"))
    visible = 0
    for node in root.iter(f"{SPACE}rect"):
        if node.get("class") == "lowtri-visible" and "stroke" not in node.attrib:
            x, y, wide, high = (float(node.get(name, "0")) for name in ("x", "y", "width", "height"))
            i, j = int((y + high / 2) * scale), int((x + wide / 2 + 3) * scale)
            assert (round(red[i, j] * 255), round(green[i, j] * 255), round(blue[i, j] * 255)) == (122, 60, 158)
            visible += 1
    assert visible == 8


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DataError, match=r"mask.png needs matplotlib. Fix: pip install matplotlib, or mask.svg"):
        causal().save(tmp_path / "mask.png")
    assert list(tmp_path.iterdir()) == []


def test_notebooks_show_pictures() -> None:
    mask: Any = causal() & window(3)
    assert mask._repr_svg_() == svg(mask, 12)
    assert "<code>causal &amp; window(3)</code>" in mask._repr_html_() and len(mask._repr_html_()) < 20_000
    small: Any = table(np.ones((3, 4), bool))
    assert small._repr_svg_() == svg(small, 3, 4) and str(small).count("████") == 3
    assert str(table(np.ones((5, 5), bool)) & small).count("████") == 3
    neither: Any = table(np.ones((2, 6), bool)) & table(np.ones((4, 4), bool))  # the queries 4 and 5, and 0 to 3
    assert neither._repr_svg_() is None and neither._repr_html_() is None  # the text stands alone
    assert str(neither) == repr(neither)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mask.doc", "ends in none of .svg, .html, .png, .pdf, the formats that are written. Fix: mask.svg"),
        ("nowhere/mask.png", "cannot be written: No such file or directory. Fix: a file in a folder that exists"),
        ("nowhere/mask.svg", "cannot be written: No such file or directory. Fix: a file in a folder that exists"),
        ("folder.svg", "folder.svg cannot be written: "),
    ],
)
def test_saving_to_a_path_that_cannot_be_written(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(DataError) as caught:
        causal().save(tmp_path / name, 4)
    assert words in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.svg"]  # nothing half written


def test_a_picture_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "mask.svg"
    path.write_text("old")
    with pytest.raises(LowtriError):
        causal().save(path, 4, tokens="too few")
    assert path.read_text() == "old"


# lowtri mask.


def test_the_command_draws_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal & (window(2) | first(1))", "--n", "5"]) == 0
    out = capsys.readouterr().out
    expected = """
        causal & (window(2) | first(1))
        █····
        ██···
        ███··
        █·██·
        █··██

        12 of 25 pairs visible (48.0%); causal
    """
    assert out.splitlines() == cleandoc(expected).splitlines()


# How many positions, where nobody says.

_EXTENTS = [
    *((causal(), 12), (full(), 12), (window(1), 12), (window(8), 12), (window(9), 13), (window(64), 96)),
    *((band(30, 10), 61), (band(0, 20), 31), (first(20), 30), (chunks(16), 24), (strided(30), 45)),
    *((documents(lengths=[5, 9, 4]), 18), (documents(np.arange(70) // 10), 70), (documents(cu_seqlens=[0, 30]), 30)),
    *((documents([[0] * 20] * 2, [[0] * 25] * 2), 25), (keys(np.ones((2, 33), bool)), 33), (keys(lengths=[5, 40]), 60)),
    *((where(lambda q, k: k <= q), 12), (window(100_000), 150_000), (window(2**62), 2**62), (first(2**62), 2**62)),
]


@pytest.mark.parametrize(("mask", "n"), _EXTENTS, ids=lambda value: repr(value)[:30])
def test_a_mask_is_drawn_for_as_many_positions_as_show_it(mask: Mask, n: int) -> None:
    assert picture_size(mask) == (n, n)
    for joined in (~mask, mask & causal(), causal() | mask, causal() - mask, heads([causal(), mask])):
        assert picture_size(joined) == (n, n), joined
    lines = str(mask).splitlines()
    assert lines[0] == repr(mask) and (n <= MAX_CELLS or f"of {n:,} x {n:,} pairs" in lines[-1])
    assert len(svg(mask)) < 300_000


def test_a_table_is_drawn_whole() -> None:
    bools = np.tril(np.ones((3, 30), bool))
    assert picture_size(table(bools)) == picture_size(window(64) & ~table(bools)) == (3, 30)
    assert str(table(bools)).splitlines()[1:] == ["█" + "·" * 29, "██" + "·" * 28, "███" + "·" * 27]


def test_tokens_say_how_many_positions() -> None:
    assert draw("causal", tokens="a b c").splitlines()[0].split() == ["a", "b", "c"]
    assert draw("full", tokens="a b c", query_tokens="x y").count("█") == 6
    assert window(64).draw(nk=5) == window(64).draw(5)
    assert causal().draw(nk=3, ticks=True) == causal().draw(3, ticks=True)


@pytest.mark.parametrize("options", [[], ["--latex"], ["--numbers"], ["--ticks"], ["--json"]])
def test_the_command_says_how_many_positions_it_took(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal & window(64)", *options]) == 0
    out = capsys.readouterr().out
    n = 64 if options not in ([], ["--json"]) else 96
    assert f'"queries": {n}' in out if options == ["--json"] else f"of {n * n:,} pairs visible" in out
    assert ("a cell: 2 x 2 of 96 x 96 pairs" in out) == (options == [])
    assert main(["mask", "causal", "--queries", "20"]) == 0 and "210 of 400 pairs" in capsys.readouterr().out


def test_the_command_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal", "--beside", "full", "--tokens", "The black cat <end>", "--ticks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == ["cat", "✓", "✓", "✓", "✗", "cat", "✓", "✓", "✓", "✓"]
    assert lines[-2:] == [
        "causal: 10 of 16 pairs visible (62.5%); causal",
        "full: 16 of 16 pairs visible (100.0%); not causal: some query sees a later position",
    ]


def test_the_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mask", "causal & keys(lengths=[1, 3])", "--n", "3", "--queries", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "mask": "causal & keys(lengths=[1, 3])",
        "queries": 2,
        "keys": 3,
        "batch": [2],
        "pairs": [2, 5],
        "share": [2 / 6, 5 / 6],
        "causal": True,
        "table": [[[1, 0, 0], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]]],
    }


def test_the_command_shows_one_row_or_head(capsys: pytest.CaptureFixture[str]) -> None:
    row = ["mask", "heads([causal, full]) & keys(lengths=[1, 2])", "--n", "2", "--batch", "1"]
    assert main([*row, "--head", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:3] == ["██", "██"]
    assert main(row) == 0
    assert "head 1" in capsys.readouterr().out


def test_the_command_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.svg"
    assert main(["mask", "causal", "--svg", str(path), "--tokens", "a b"]) == 0
    assert path.read_text(encoding="utf-8") == svg(causal(), 2, tokens=["a", "b"])
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["causal &"], "mask: 'causal &' cannot be read"),
        (["windw(3)"], "there is no mask 'windw'"),
        (["causal", "--beside", "window(0)"], "window: n is 0"),
        (["causal", "--tokens", " "], "mask: --tokens is empty"),
        (["causal", "--n", "0"], "--n"),
        (["causal", "--n", "3", "--queries", "4"], "mask: --queries is 4, but there are 3 positions"),
        (["causal", "--svg", "nowhere/m.svg"], "there is no folder nowhere. Fix: make it first"),
        (["causal", "--svg", "m.doc"], "ends in none of .svg, .html, .png, .pdf"),
        (["heads([causal, full])", "--head", "2"], "head 2; the mask has the batch (1, 2). Fix: "),
        (["heads([causal, full]) & keys(lengths=[1, 2])", "--head", "0"], "Fix: say --batch as well"),
        (["causal", "--frobnicate"], "No such option"),
    ],
)
def test_the_command_reports_errors_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mask", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_an_unknown_option_names_the_function_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"draw\(\) got an unexpected keyword argument 'weights'"):
        causal().draw(3, weights=np.eye(3))
    with pytest.raises(TypeError, match=r"svg\(\) got an unexpected keyword argument 'ticks'"):
        causal().save("mask.svg", 3, ticks=True)
