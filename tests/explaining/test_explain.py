"""explain: every step comes out with its number, hidden is told from 0, and bad input ends in one clear line."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import lowtri
from lowtri.errors import CallError, MaskError
from lowtri.explaining.example import worked
from lowtri.nn import Decoder, DecoderConfig, MaskedSelfAttention, MultiHeadAttention

ALL_STEPS = (
    *("tokens", "embedding", "position", "encoding", "W_q^T", "W_k^T", "W_v^T", "q", "k", "v"),
    *("scores", "scaled", "mask", "masked", "weights", "output"),
)


def qkv(n: int = 4, heads: int = 1, kv_heads: int = 1, d: int = 3) -> list[Any]:
    draw = np.random.default_rng(0).normal
    return [draw(size=(h, n, d)) for h in (heads, kv_heads, kv_heads)]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Decoder(DecoderConfig(vocab_size=300, hidden_size=32, intermediate_size=48, **sizes)).eval()


# The numbers.


def test_the_worked_example_has_every_step_in_order() -> None:
    explanation = worked()
    assert tuple(step.name for step in explanation.steps) == ALL_STEPS
    assert explanation.tokens == ("Write", "a", "poem")
    np.testing.assert_allclose(
        explanation["encoding"].value, explanation["embedding"].value + explanation["position"].value
    )
    assert explanation["masked"].value[0].tolist()[1:] == [-1e9, -1e9]


MASKS = ["causal", "full", "window(2) & causal", "causal - first(1)", "heads([causal, full, window(2), first(1)])"]


@pytest.mark.parametrize("mask", MASKS)
def test_steps_agree_with_attention_itself(mask: str) -> None:
    q, k, v = qkv(n=5, heads=4, kv_heads=2)
    explanation = lowtri.explain((q, k, v), mask=mask)
    output, weights = lowtri.attention(q, k, v, mask, return_weights=True)
    np.testing.assert_allclose(explanation["output"].value, output, atol=1e-12)
    np.testing.assert_allclose(explanation["weights"].value, weights, atol=1e-12)
    hidden = explanation["masked"].value == -np.inf  # as a hidden score is written by default
    np.testing.assert_array_equal(~hidden, explanation.visible)
    np.testing.assert_allclose(explanation["output"].unmasked, lowtri.attention(q, k, v, "full"), atol=1e-12)
    assert explanation["joined"].value.shape == (5, 12)


def test_fewer_queries_than_keys_are_the_last_tokens() -> None:
    q, k, v = qkv(n=4)
    explanation = lowtri.explain((q[:, 2:], k, v), mask="causal", tokens=["a", "b", "c", "d"])
    assert explanation["weights"].rows == ("c", "d") and explanation["weights"].columns == ("a", "b", "c", "d")
    assert explanation.visible.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_hidden_weight_is_exactly_0_and_distinct_from_a_visible_0() -> None:
    q, k, v = np.array([[0.0], [1.0]]), np.array([[0.0], [5000.0]]), np.eye(2)
    explanation = lowtri.explain((q, k, v), mask="causal")
    # (0, 1) is hidden; (1, 0) is visible, and underflows.
    assert explanation["weights"].value.tolist() == [[1, 0], [0, 1]]
    weights = str(explanation)[str(explanation).index("weights = ") :].splitlines()
    assert weights[5].split()[:4] == ["0", "1.0000", "▒", "0"]
    assert weights[6].split()[:3] == ["1", "0.0000", "1.0000"]
    assert explanation.as_dict()["visible"] == [[True, False], [True, True]]
    page = explanation.to_html()
    row = page[page.index("<h2>weights") :]
    assert '<td class="hidden" title="hidden">0</td>' in row and ">0.0000</td>" in row


def test_hidden_garbage_leaves_no_trace() -> None:
    q, k, v = qkv(n=3)
    clean = lowtri.explain((q, k, v), mask="causal")
    k[:, 2], v[:, 2] = np.nan, np.inf
    dirty = lowtri.explain((q, k, v), mask="causal")
    np.testing.assert_array_equal(dirty["output"].value[:2], clean["output"].value[:2])
    assert json.loads(dirty.to_json())["steps"][2]["value"][2] == ["nan", "nan", "nan"]


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_plain_module_cut_into_heads(heads: int) -> None:
    torch.manual_seed(1)
    module, x = MaskedSelfAttention(4), torch.randn(5, 4)
    explanation = lowtri.explain(module, x, heads=heads)
    q, k, v = (w(x).unflatten(1, (heads, -1)).transpose(0, 1) for w in (module.W_q, module.W_k, module.W_v))
    expected = lowtri.attention(q, k, v, "causal").transpose(0, 1).flatten(1).detach()
    np.testing.assert_allclose(explanation["joined" if heads > 1 else "output"].value, expected, atol=1e-6)
    one = lowtri.explain(module, x, heads=heads, head=heads - 1)
    np.testing.assert_array_equal(
        one["weights"].value, explanation["weights"].value[-1] if heads > 1 else explanation["weights"].value
    )


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "bias": True}, {"rope_theta": 10000.0, "mask": "window(2)"}]
)
def test_multi_head_attention_agrees_with_its_own_output(options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    module, x = MultiHeadAttention(16, 4, **options), torch.randn(6, 16)
    explanation = lowtri.explain(module, x)
    own = module.o_proj(torch.as_tensor(explanation["joined"].value, dtype=torch.float32))
    torch.testing.assert_close(own, module(x), atol=1e-5, rtol=1e-5)
    assert float(re.findall(r"differs by (\S+)\.$", explanation.note)[0]) < 1e-6
    _, weights = module(x, return_weights=True)
    np.testing.assert_allclose(explanation["weights"].value, weights.detach(), atol=1e-6)


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 3)])
def test_a_decoder_shows_one_head_of_one_layer(decoder: Decoder, layer: int, head: int) -> None:
    explanation = lowtri.explain(decoder, [5, 6, 7, 8], layer=layer, head=head, mask="causal & window(2)")
    assert float(re.findall(r"differs by (\S+)\.$", explanation.note)[0]) < 1e-6
    assert explanation["W_q^T"].value.shape == (32, 8) and explanation["embedding"].value.shape == (4, 32)
    assert explanation.visible.sum() == 7
    rows = decoder.model.layers[layer].self_attn.k_proj.weight[head // 2 * 8 :][:8].detach()
    np.testing.assert_array_equal(explanation["W_k^T"].value, rows.T)  # query heads 2 and 3 share key head 1
    assert not decoder.model.layers[layer].self_attn.q_proj._forward_hooks  # nothing stays behind


def by_its_formula(explanation: Any, step: Any) -> Any:
    """The step recomputed from the steps before it, as its formula says; None where it has no formula."""
    names = "|".join(sorted((re.escape(one.name) for one in explanation.steps), key=len, reverse=True))
    parts = re.fullmatch(rf"({names}) ({names})(?: \+ ({names}))?", step.formula)
    if parts:
        left, right, bias = (None if name is None else explanation[name].value for name in parts.groups())
        return left @ right + (0 if bias is None else bias)
    if step.formula == "q k^T":
        return explanation["q"].value @ explanation["k"].value.swapaxes(-1, -2)
    if step.name == "scaled":
        return explanation["scores"].value / float(re.fullmatch(r"scores / sqrt\((\d+)\)", step.formula)[1]) ** 0.5
    return None


@pytest.mark.parametrize(
    "what",
    [
        lambda: (MaskedSelfAttention(4), {"heads": 1}),
        lambda: (MaskedSelfAttention(4), {"heads": 2}),
        lambda: (MultiHeadAttention(4, 2, num_kv_heads=1, bias=True), {}),
        lambda: (MultiHeadAttention(4, 2), {"head": 1}),
    ],
)
def test_each_formula_is_true_of_the_matrices_that_are_shown(what: Any) -> None:
    torch.manual_seed(3)
    module, options = what()
    explanation = lowtri.explain(module, torch.randn(5, 4), mask="causal", **options)
    checked = {step.name: by_its_formula(explanation, step) for step in explanation.steps}
    found = {name: value for name, value in checked.items() if value is not None}
    assert set(found) == {*"qkv", "scores", "scaled", "output"}
    for name, value in found.items():
        np.testing.assert_allclose(explanation[name].value, value, atol=1e-6, err_msg=name)
    # The weight itself is the transpose of what multiplies.
    assert "W_q" not in [step.name for step in explanation.steps]


def test_formulas_name_the_norm_and_the_rotation() -> None:
    module = MultiHeadAttention(8, 2, rope_theta=10000.0, bias=True)
    explanation = lowtri.explain(module, torch.randn(3, 8))
    assert [explanation[name].formula for name in "qkv"] == [
        "rotary(encoding W_q^T + b_q)",
        "rotary(encoding W_k^T + b_k)",
        "encoding W_v^T + b_v",
    ]
    assert explanation["b_q"].rows == ("bias",) and explanation["b_q"].value.shape == (2, 1, 4)


def test_one_row_of_a_batch() -> None:
    q, k, v = np.random.default_rng(1).normal(size=(3, 2, 3, 4, 2))  # (B, H, T, d)
    mask = lowtri.causal() & lowtri.keys(lengths=[4, 2])
    output, weights = lowtri.attention(q, k, v, mask, return_weights=True)
    for row in (0, 1):
        explanation = lowtri.explain((q, torch.from_numpy(k), v), mask=mask, batch=row)
        np.testing.assert_allclose(explanation["output"].value, output[row], atol=1e-12)
        np.testing.assert_allclose(explanation["weights"].value, weights[row], atol=1e-12)
        assert explanation.note == f"Batch row {row} of 2."
    np.testing.assert_array_equal(lowtri.explain((q, k, v), mask=mask)["q"].value, q[0])
    assert lowtri.explain((q[:1], k[:1], v[:1]), mask="causal").note == ""


def test_a_module_and_a_decoder_read_one_row_of_a_batch(decoder: Decoder) -> None:
    module, x = MaskedSelfAttention(4), torch.randn(2, 5, 4)
    explanation, alone = lowtri.explain(module, x, batch=1), lowtri.explain(module, x[1])
    np.testing.assert_array_equal(explanation["output"].value, alone["output"].value)
    place = np.random.default_rng(2).normal(size=(2, 5, 4))
    explanation = lowtri.explain(module, x, position=place, batch=1)
    np.testing.assert_allclose(explanation["encoding"].value, x[1].numpy() + place[1])
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    explanation = lowtri.explain(decoder, ids, batch=1)
    assert explanation.tokens == ("8", "9", "10") and explanation.note.startswith("Batch row 1 of 2. Computed anew")


@pytest.mark.sweep
@settings(deadline=None)
@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4)),
    mask=st.sampled_from(["causal", "full", "causal & window(2)", "causal - first(1)"]),
)
def test_any_batch_agrees_with_attention(data: Any, shape: tuple[int, ...], mask: str) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q, k, v = rng.normal(size=(3, *shape))
    row, fewer = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[2] - 1))
    output, weights = lowtri.attention(q[:, :, fewer:], k, v, mask, return_weights=True)
    explanation = lowtri.explain((q[:, :, fewer:], k, v), mask=mask, batch=row)
    scores = q[:, :, fewer:] @ k.swapaxes(-1, -2) / shape[3] ** 0.5
    given = lowtri.explain(scores=scores, values=v, mask=mask, batch=row)
    for one in (explanation, given):
        np.testing.assert_allclose(one["output"].value, output[row][0] if shape[1] == 1 else output[row], atol=1e-12)
        np.testing.assert_allclose(one["weights"].value, weights[row][0] if shape[1] == 1 else weights[row], atol=1e-12)


def test_given_scores_are_masked_and_go_through_softmax() -> None:
    scores = np.random.default_rng(3).normal(size=(4, 4))
    explanation = lowtri.explain(scores=scores, mask="causal", hidden=-1e9, tokens=list("abcd"))
    assert [step.name for step in explanation.steps] == ["tokens", "scores", "mask", "masked", "weights"]
    np.testing.assert_array_equal(explanation["scores"].value, scores)  # not scaled again
    assert explanation["masked"].formula == "scores where visible, else -1e9"
    expected = np.exp(scores) * np.tri(4)
    np.testing.assert_allclose(explanation["weights"].value, expected / expected.sum(1, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(explanation["weights"].unmasked.sum(1), 1)
    heads = lowtri.explain(scores=np.stack([scores, scores * 2]), values=np.eye(4), mask="causal")
    assert [step.name for step in heads.steps][-3:] == ["v", "output", "joined"]
    np.testing.assert_array_equal(heads["output"].value, heads["weights"].value)
    assert explanation.to_html() and str(explanation) and explanation.to_json()


# Text, JSON and the page.


def test_tables_stand_in_line_for_thai_and_chinese() -> None:
    tokens = ["ฉันรักน้ำ", "我爱你", "cat"]
    text = str(lowtri.explain(tuple(qkv(n=3)), mask="causal", tokens=tokens))
    scores = text[text.index("scores = ") :].splitlines()[2:7]
    assert len({cell_len(line) for line in scores}) == 1, scores
    assert all(len(token.split()) == 1 for token in tokens) and all(token in scores[0] for token in tokens)


# A direction override, a bell, an escape sequence, a line separator, a byte-order mark, half a surrogate pair.
HOSTILE = ["\u202eabc", "\u2066x", "a\x07\x1b[2J", "\u2028", "\ufeff", "\ud800", "\u200f\u061c", "\x85", "\U000e0041"]
MARKUP = ["[bold]", ":cat:", "<script>alert(1)</script>", "a\nb"]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(HOSTILE, ["\\u202eabc", "\\x1b[2J"]), ([*MARKUP, "x" * 1_000_000], ["[bold]", ":cat:", "a⏎b"])],
    ids=["characters", "markup"],
)
def test_no_token_breaks_or_reorders_the_page_or_reaches_the_terminal(tokens: list[str], words: list[str]) -> None:
    n = len(tokens)
    explanation = lowtri.explain(scores=np.zeros((n, n)), mask="causal", tokens=tokens)
    for text in (explanation.to_html(), str(explanation)):
        assert [c for c in text if c not in "\n" and not c.isprintable()] == []
        assert all(word in text for word in words) and len(text.encode("utf-8")) < 100_000
    assert "<script" not in explanation.to_html()


@pytest.mark.sweep
@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec=None), max_size=40), min_size=1, max_size=5))
def test_any_tokens_leave_a_whole_page(tokens: list[str]) -> None:
    explanation = lowtri.explain(tuple(qkv(n=len(tokens))), mask="causal", tokens=tokens)
    for text in (explanation.to_html(), str(explanation)):
        assert all(c == "\n" or c.isprintable() for c in text)
    json.loads(explanation.to_json())


def test_the_page_names_its_axes_and_its_colours() -> None:
    page = worked().to_html()
    sections = {text.split("<", 1)[0].split(" ")[0]: text for text in page.split("<h2>")[1:]}
    for name in ("scores", "scaled", "mask", "masked", "weights"):
        assert "queries ↓ keys →" in sections[name], name
    assert all("queries ↓" not in sections[name] for name in ("q", "W_q^T", "output"))
    legend = page.split("<h2>")[0]
    drawn = set(re.findall(r'style="--weight:(\S+)"', sections["weights"]))
    named = set(re.findall(r'style="--weight:(\S+)"', legend))
    assert {"0.000", "0.500", "1.000"} == named and "1.000" in drawn  # weight 1 is drawn as the legend has it
    assert 'class="key hidden"' in legend


def test_the_page_fits_a_narrow_screen_and_a_dark_one() -> None:
    page = worked().to_html()
    style = page[page.index("<style>") : page.index("</style>")]
    assert page.count('<div class="scroll"><table>') == page.count("<table>")  # a wide table scrolls by itself
    assert ".scroll { max-width: 100%; overflow-x: auto }" in style and "overflow-wrap: anywhere" in style
    assert "color-scheme: light dark" in style and "--ink: light-dark(" in style
    assert set(re.findall(r"var\((--[\w-]+)", page)) <= set(re.findall(r"(--[\w-]+): ?", page))


SPACE = "{http://www.w3.org/2000/svg}"


def words_of(picture: str) -> list[str | None]:
    return [node.text for node in ET.fromstring(picture).iter(f"{SPACE}text")]


def test_the_picture_reads_as_the_equation() -> None:
    words = words_of(worked().to_svg())
    names = [
        word for word in words if word in ("q", "·", "k^T", "=", "scores", "masked", "→", "weights", "v", "output")
    ]
    assert names == ["q", "·", "k^T", "=", "scores", "masked", "→", "weights", "·", "v", "=", "output"]
    weights = worked()["weights"].value
    assert all(f"{weights[pair]:.2f}" in words for pair in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)))
    assert words.count("-1e9") == 3 and words.count("0") == 3  # the hidden pairs of masked and of weights
    assert words.count("Write") == 2 + 4  # the queries of two rows; the keys of k^T, scores, masked and weights
    assert words_of(lowtri.explain(scores=np.zeros((2, 2)), mask="causal").to_svg()).count("weights") == 1


@pytest.mark.parametrize("n", [1, 7, 200])
def test_the_picture_is_bounded_and_draws_inside_its_frame(n: int) -> None:
    explanation = lowtri.explain(tuple(qkv(n=n, heads=2, kv_heads=2)), mask="causal", tokens=["<script>&\u202e"] * n)
    picture: Any = explanation._repr_svg_()
    assert len(picture) < 60_000 and "<script" not in picture and "\u202e" not in picture
    root = ET.fromstring(picture)
    assert "the first of 2 heads" in (root.findtext(f"{SPACE}title") or "")
    wide = float(root.attrib["width"])
    for node in root.iter(f"{SPACE}text"):
        if node.get("x") and node.get("text-anchor") is None:
            assert float(node.attrib["x"]) + 7.2 * len(node.text or "") <= wide + 1, node.text


@pytest.mark.parametrize("suffix", ["svg", "html", "json", "txt", "png"])
def test_an_explanation_is_saved_by_the_name_of_the_file(suffix: str, tmp_path: Path) -> None:
    content = worked().save(tmp_path / f"steps.{suffix}").read_bytes()
    starts = {"svg": b"<svg", "html": b"<!doctype html>", "json": b"{", "txt": b"mask causal", "png": b"\x89PNG"}
    assert content.startswith(starts[suffix])


def test_long_sentences_are_cut_where_they_are_shown_and_whole_in_json() -> None:
    explanation = lowtri.explain(tuple(qkv(n=60)), mask="causal")
    assert "…" in str(explanation) and len(str(explanation)) < 30_000 and len(explanation.to_html()) < 100_000
    assert len(json.loads(explanation.to_json())["steps"][-1]["value"]) == 60


def test_the_page_is_one_whole_file_without_network() -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.tags: set[str] = set()

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.tags.add(tag)
            if tag not in ("meta", "br"):
                self.open.append(tag)
            assert not {"src", "href"} & {name for name, _ in attrs}

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    reader = Reader()
    page = worked().to_html()
    reader.feed(page)
    assert reader.open == [] and not {"script", "link", "img"} & reader.tags
    assert (
        "http" not in page
        and set(re.findall(r"url\((.*?)\)", page)) == {"#hidden"}
        and "repeating-linear-gradient" in page
    )
    for name in ALL_STEPS:
        assert f"<h2>{name}" in page


SELF = MaskedSelfAttention(2)
ONES = np.ones((1, 3, 4))
NO_MASK = "mask: got None; expected a mask. Fix: lowtri.full()"


ERRORS = [
    ([qkv()], {}, MaskError, NO_MASK),
    ([], {"scores": np.eye(2)}, MaskError, NO_MASK),
    ([(1, 2)], {"mask": "full"}, CallError, "got 2 arrays, but (q, k, v) are three"),
    ([(np.eye(2), np.eye(3), np.eye(2))], {"mask": "full"}, CallError, "do not fit together"),
    ([qkv(heads=3, kv_heads=2)], {"mask": "full"}, CallError, "do not fit together"),
    ([(np.eye(3, 2), np.eye(2), np.eye(2))], {"mask": "full"}, CallError, "3 queries and 2 keys"),
    ([(np.ones(2),) * 3], {"mask": "full"}, CallError, "q is (2,), but expected (N, D)"),
    ([(np.ones((2, 1, 3, 4)), ONES, ONES)], {"mask": "full"}, CallError, "batch sizes differ: q 2, k 1, v 1"),
    ([qkv()], {"mask": "full", "tokens": ["a"]}, CallError, "1 tokens for 4 keys"),
    ([qkv()], {"mask": "full", "head": 1}, CallError, "there is no head 1 among 1"),
    ([qkv()], {"mask": "full", "batch": 1}, CallError, "there is no batch row 1 among 1"),
    ([qkv()], {"mask": "heads([full, causal])"}, MaskError, "is for 2 heads, but there are 1"),
    ([qkv()], {"mask": lowtri.keys([[True] * 4] * 2)}, MaskError, "differs between 2 batch rows"),
    ([qkv()], {"mask": "full", "scores": np.eye(2)}, CallError, "scores stand alone"),
    ([], {"mask": "full", "values": np.eye(2)}, CallError, "values go with scores"),
    ([], {"mask": "full", "scores": np.ones((3, 2))}, CallError, "scores are (1, 3, 2): a row for each"),
    ([], {"mask": "full", "scores": np.eye(2), "values": np.eye(3)}, CallError, "values are (1, 3, 3) for scores"),
    ([torch.nn.Linear(2, 2), 1], {}, CallError, "Linear has no attention that explain can open"),
    ([SELF], {}, CallError, "inputs are missing"),
    ([SELF, np.eye(3)], {}, CallError, "but the module reads (N, 2)"),
    ([SELF, np.ones((2, 2, 2, 2))], {}, CallError, "encodings are (N, d_model)"),
    ([SELF, np.ones((2, 2, 2))], {"batch": 2}, CallError, "there is no batch row 2"),
    ([SELF, np.eye(2)], {"position": np.eye(3)}, CallError, "position is (3, 3), but inputs are (2, 2)"),
    ([MaskedSelfAttention(3), np.eye(3)], {"heads": 2}, CallError, "2 heads do not divide d_model 3"),
    ([MultiHeadAttention(4, 2), np.eye(4)], {"heads": 2}, CallError, "position and heads are for"),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "words"), ERRORS, ids=[row[-1][:40] for row in ERRORS])
def test_errors(arguments: list[Any], options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        lowtri.explain(*arguments, **options)


def test_errors_of_ids(decoder: Decoder) -> None:
    with pytest.raises(CallError, match="ids are missing"):
        lowtri.explain(decoder)
    with pytest.raises(CallError, match="one sequence is \\(N,\\) whole numbers"):
        lowtri.explain(decoder, [0.5])
    with pytest.raises(KeyError, match="no step 'lse'; there are tokens, q, k"):
        lowtri.explain(tuple(qkv()), mask="full")["lse"]
