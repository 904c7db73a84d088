"""What a call refuses, and in which words: the argument, what it got, what was expected, the fix."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import lowtri
from lowtri import CallError, EngineError, MaskError, attention
from lowtri.masks import as_mask
from lowtri.ops.arguments import describe

X = np.ones((2, 4, 5, 8), np.float32)
T = torch.ones(2, 4, 5, 8)
KV = np.ones((2, 2, 5, 8), np.float32)


def of(x: Any, **changes: Any) -> dict[str, Any]:
    """The arguments of a call of one array, but for what is changed."""
    return {"q": x, "k": x, "v": x, **changes}


# Arguments and the words.
REFUSED = [
    # q, k, v
    (of(X, q=X.tolist()), r"q is list, but it takes NumPy arrays or torch tensors\. Fix: np\.asarray\(q\)"),
    (of(X, q=X.astype(int)), r"q is int64, but attention takes float16, bfloat16, float32, float64\. Fix: q\.astype"),
    (
        of(np.zeros((5, 8), ml_dtypes.bfloat16)),
        r"q is bfloat16 in NumPy.*\. Fix: a torch tensor, or q\.astype\(np\.float32\)",
    ),
    (of(X, q=X.astype(complex)), "q is complex128, but attention takes"),
    (of(T, q=T.bool()), "q is bool, but attention takes"),
    (of(X, q=X[0, 0, 0]), r"q is \(8,\), but it is \(N, D\), \(H, N, D\) or \(\.\.\., H, N, D\)"),
    (of(X, q=np.ones((), np.float32)), r"q is \(\), but it is \(N, D\)"),
    (of(X, k=T), "q is a NumPy array and k is a torch tensor. Fix: pass all of one kind"),
    (of(T, v=X), "q is a torch tensor and v is a NumPy array. Fix: pass all of one kind"),
    (of(X, v=X.tolist()), "q is a NumPy array and v is list. Fix: pass all of one kind"),
    (of(X, k=X.astype(np.float64)), r"q is float32 and k is float64\. Fix: cast them to one dtype"),
    (of(T, v=T.bfloat16()), r"q is float32 and v is bfloat16\. Fix: cast them to one dtype"),
    (of(X, k=X[0]), r"q has 4 dimensions, \(2, 4, 5, 8\), and k has 3, \(4, 5, 8\)"),
    (of(X, v=X[0]), r"q has 4 dimensions, \(2, 4, 5, 8\), and v has 3, \(4, 5, 8\)"),
    (of(X, k=X[..., :4]), r"q and k differ in head size D, or it is 0: q \(2, 4, 5, 8\), k \(2, 4, 5, 4\)"),
    (of(X[..., :0], v=X), "q and k differ in head size D, or it is 0"),
    (of(X, v=X[:, :, :3]), r"k and v differ in length Nk: .*v \(2, 4, 3, 8\)"),
    (of(KV, q=X[:, :3]), r"serves a whole number of query heads\.\nFix: the heads stand third from the end"),
    (of(X, q=KV), "each key/value head serves a whole number of query heads"),
    (of(X, k=None), "q is a NumPy array and k is NoneType. Fix: pass all of one kind"),
    (of(X, k=KV), "each key/value head serves a whole number of query heads"),
    (of(X[:, :0], q=X), "each key/value head serves a whole number of query heads"),
    (of(X, q=X[:, :0]), "each key/value head serves a whole number of query heads"),
    (of(X[:1], q=X), r"the batch dimensions differ: q \(2, 4, 5, 8\), k \(1, 4, 5, 8\).*Fix: expand them"),
    (of(X[:, None], q=X[None]), "the batch dimensions differ"),
    (of(T, k=T.to("meta")), r"q is on cpu and k on meta\. Fix: k\.to\(q\.device\)"),
    # bias
    (
        of(X, bias=np.ones((5, 5), bool)),
        r"bias is bool, but numbers are added to the scores\. "
        r"Fix: a table of bools is a mask: lowtri\.table\(m\) or lowtri\.hidden\(m\)",
    ),
    (of(X, bias=np.ones((5, 5), int)), r"bias is int64, but numbers are added to the scores\.$"),
    (of(X, bias=[[0.0]]), "q is a NumPy array and bias is list. Fix: pass all of one kind"),
    (of(T, bias=np.ones((5, 5))), "q is a torch tensor and bias is a NumPy array"),
    (of(T, bias=torch.ones(5, device="meta")), r"q is on cpu and bias on meta\. Fix: bias\.to"),
    (
        of(X, bias=np.ones((5, 4))),
        r"bias is \(5, 4\), which does not broadcast against \(B, Hq, Nq, Nk\) = \(2, 4, 5, 5\)",
    ),
    (
        of(X[:, :, :3], q=X, bias=np.ones((5, 4))),
        r"bias is \(5, 4\), which does not broadcast against \(B, Hq, Nq, Nk\) = \(2, 4, 5, 3\)",
    ),
    (of(X, bias=np.ones((4, 2, 5, 5))), r"bias is \(4, 2, 5, 5\), which does not broadcast"),
    (of(X, bias=np.ones((1, 2, 4, 5, 5))), r"bias is \(1, 2, 4, 5, 5\), which does not broadcast"),
    (of(X[None], bias=np.ones((3, 2, 4, 5, 5))), r"bias is \(3, 2, 4, 5, 5\), which does not"),
    # sinks
    (of(X, sinks=np.ones(3)), r"sinks is float64 \(3,\), but it holds one logit for each query head: floats, \(4,\)"),
    (of(KV, q=X, sinks=np.ones(2)), r"sinks is float64 \(2,\).*\(4,\)"),
    (of(X, sinks=np.ones((1, 4))), r"sinks is float64 \(1, 4\), but it holds one logit"),
    (of(X, sinks=np.ones(4, int)), r"sinks is int64 \(4,\), but it holds one logit"),
    (of(X, sinks=[0.0] * 4), "q is a NumPy array and sinks is list"),
    # numbers
    (of(X, scale=float("nan")), "scale is nan, but scores are multiplied by a finite number"),
    (of(X, scale=float("inf")), "scale is inf, but scores are multiplied by a finite number"),
    (
        of(T, scale=torch.ones((), requires_grad=True)),
        r"scale is a torch tensor, but it takes one plain number\. Fix: float\(scale\)",
    ),
    (of(X, scale="auto"), "scale is str, but it takes one plain number"),
    (of(X, softcap=0), r"softcap is 0, but scores are capped at a positive number\. Fix: softcap=None for no cap"),
    (of(X, softcap=-1.0), "softcap is -1.0, but scores are capped at a positive number"),
    (of(X, softcap=float("inf")), "softcap is inf, but scores are capped"),
    (of(X, softcap=float("nan")), "softcap is nan, but scores are capped"),
    (
        of(X, scale=1e39),
        r"scale is 1e\+39, but scores of float32 times more than 7.92282e\+28 overflow\. "
        "Fix: a smaller scale, or q, k and v in float64",
    ),
    (of(T, softcap=torch.ones(())), "softcap is a torch tensor, but it takes one plain number"),
    (of(T, dropout=1.5), r"dropout is 1\.5, but it is a probability, 0 \.\. 1"),
    (of(T, dropout=-0.1), r"dropout is -0\.1, but it is a probability"),
    (of(T, dropout=float("nan")), "dropout is nan, but it is a probability"),
    (of(T, dropout=None), r"dropout is NoneType, but it takes one plain number"),
    # positions
    (
        of(X, q_positions=[0, 1]),
        r"q_positions is int64 \(2,\), but it holds whole numbers, \(5,\) or \(2, 5\): "
        r"the position of each token in the sequence, -1 for padding",
    ),
    (of(X, k_positions=np.zeros((3, 5), int)), r"k_positions is int64 \(3, 5\), but it holds whole numbers"),
    (of(X, k_positions=np.arange(5.0)), r"k_positions is float64 \(5,\), but it holds whole numbers"),
    (of(X, k_positions=np.ones(5, bool)), r"k_positions is bool \(5,\), but it holds whole numbers"),
    (of(X, q_positions=[[0, 1], [0]]), "q_positions is not an array, but it holds whole numbers"),
    (of(X, q_positions=3), r"q_positions is int64 \(\), but it holds whole numbers"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_arguments_that_do_not_fit(arguments, words):
    with pytest.raises(CallError, match=f"^attention: .*{words}") as caught:
        attention(**arguments, mask="full")
    assert isinstance(caught.value, ValueError) and len(str(caught.value).splitlines()) <= 3
    with pytest.raises(CallError):  # asking which engine would run checks as running does
        lowtri.which_engine(**arguments, mask="full")


MASKS_REFUSED = [
    (None, r"mask: got None; expected a mask\. Fix: lowtri\.full\(\)"),
    (
        torch.ones(5, 5).bool(),
        r"mask: got a bare Tensor\. True hides in many notebooks and in nn\.MultiheadAttention, and shows in SDPA:"
        r"\nwrite lowtri\.table\(m\) if True = may see, lowtri\.hidden\(m\) if True = hidden",
    ),
    (lambda q, k: k <= q, r"mask: got a bare function\. Fix: lowtri\.where\(f\)"),
    (np.ones((5, 5), bool), r"mask: got a bare ndarray\. True hides in many notebooks"),
    (np.ones((5, 5), int), r"mask: got a bare ndarray\. True hides in many notebooks"),
    (torch.zeros(5, 5), r"mask: got a bare Tensor of floats\. Fix: numbers to add to the scores belong in bias="),
    (np.zeros((5, 5)), r"mask: got a bare ndarray of floats\. Fix: numbers to add to the scores belong in bias="),
    (
        torch.tril(torch.ones(5, 5)),
        r"got a bare Tensor of zeros and ones\. Added to scores these would hide nothing\.\n"
        r"Fix: lowtri\.table\(m != 0\) if 1 = may see, lowtri\.hidden\(m != 0\) if 1 = hidden\.$",
    ),
    (torch.eye(5).bfloat16(), r"of zeros and ones\..*\n.*lowtri\.table\(m != 0\)"),
    (
        np.triu(np.full((5, 5), -np.inf), 1),
        r"got a bare ndarray of 0 and -inf, which hides where it is added to scores\.\n"
        r'Fix: lowtri\.table\(m == 0\) as the mask, or bias=m with the mask "full"\.$',
    ),
    (np.triu(np.full((5, 5), -1e9), 1), r"of 0 and -1e\+09,.*\n.*lowtri\.table\(m == 0\)"),
    (np.tri(5) - 0.5, "of floats. Fix: numbers to add to the scores belong in bias="),
    (np.tri(5, dtype=int), r"write lowtri\.table\(m != 0\) if True = may see"),
    (torch.zeros(5, 5).bfloat16(), r"mask: got a bare Tensor of floats"),
    ([[True]], r"mask: got a bare list\. True hides"),
    (4, r"mask: got 4; expected a mask or its text\. Fix: for a window of 4 keys 'window\(4\)'"),
    (True, r"mask: got a bare bool\. True hides"),
    ("causl", "mask: there is no mask 'causl'. Did you mean causal[?] There are: full, causal, window"),
]


@pytest.mark.parametrize(("mask", "words"), MASKS_REFUSED, ids=[words[:40] for _, words in MASKS_REFUSED])
def test_masks_that_are_none(mask, words):
    with pytest.raises(MaskError, match=words):
        attention(X, X, X, mask)
    with pytest.raises(MaskError, match=words):
        as_mask(mask)


def test_the_advice_for_floats_hides_what_was_meant():
    q = np.random.default_rng(0).normal(size=(5, 8))
    right = attention(q, q, q, "causal")
    flags, added = np.tri(5), np.triu(np.full((5, 5), -np.inf), 1)
    assert np.allclose(attention(q, q, q, lowtri.table(flags != 0)), right)
    assert np.allclose(attention(q, q, q, lowtri.hidden((1 - flags) != 0)), right)
    assert np.allclose(attention(q, q, q, lowtri.table(added == 0)), right)
    assert np.allclose(attention(q, q, q, "full", bias=added), right)


def test_the_choice_begins_with_what_runs():
    for engine in ("auto", "formula"):
        choice = lowtri.which_engine(T, T, T, "causal", engine=engine)
        assert str(choice).splitlines()[0].startswith(f"{choice.engine} runs: ")


def test_the_mask_has_no_default():
    with pytest.raises(TypeError, match="mask"):
        attention(X, X, X)


def test_as_mask_hands_masks_and_texts_through():
    assert as_mask(lowtri.causal()) is not None and as_mask("causal & window(3)") == lowtri.causal() & lowtri.window(3)
    mine = lowtri.table(np.ones((5, 5), bool))
    assert as_mask(mine) is mine
    with pytest.raises(MaskError, match=r"^audit: mask: got a bare list"):
        as_mask([], "audit: mask")


def test_masks_of_another_batch():
    rows = lowtri.keys(lengths=[1, 2, 3])
    with pytest.raises(CallError, match=r"mask has batch \(3,\), but q has 2 rows and 4 heads"):
        attention(X, X, X, rows)
    with pytest.raises(CallError, match=r"mask has batch \(1, 3\), but q has 2 rows and 4 heads"):
        attention(X, X, X, lowtri.heads(["causal", "full", "full"]))
    words = r"mask has batch \(3,\), but q, k and v have none\. Fix: mask\.for_row\(row\)"
    for unbatched in (X[0], X[0, 0]):
        with pytest.raises(CallError, match=words):
            attention(unbatched, unbatched, unbatched, rows)
    with pytest.raises(CallError, match=r"mask has batch \(1, 4\), but q has 1 rows and 1 heads"):
        attention(X[0, 0], X[0, 0], X[0, 0], lowtri.heads(["causal"] * 4))
    assert attention(X[0], X[0], X[0], lowtri.heads(["causal"] * 4)).shape == (4, 5, 8)
    assert attention(X, X, X, lowtri.keys(lengths=[2])).shape == X.shape


def test_a_table_that_is_too_small():
    with pytest.raises(MaskError, match=r"has rows for the queries 0 \.\. 2 and columns for the keys 0 \.\. 2"):
        attention(X, X, X, lowtri.table(np.ones((3, 3), bool)))


def test_more_queries_than_keys_say_where_they_stand():
    with pytest.raises(
        MaskError,
        match=r"5 queries and 3 keys under causal: the queries cannot stand at the last 5 of 3 keys\.\n"
        r"Fix: q_positions=range\(nq\) in attention",
    ):
        attention(X, X[:, :, :3], X[:, :, :3], "causal")
    with pytest.raises(MaskError, match="5 queries and 3 keys"):
        attention(X, X[:, :, :3], X[:, :, :3], "window(2)", k_positions=[4, 5, 6])


def test_the_whole_message_of_an_engine_that_cannot():
    with pytest.raises(EngineError) as caught:
        attention(T, T, T, "causal & window(3)", sinks=torch.zeros(4), return_weights=True, engine="sdpa")
    lines = str(caught.value).splitlines()
    assert lines[0] == 'attention: engine "sdpa" cannot run this call, and it was requested by name.'
    assert lines[1] == "  q (2, 4, 5, 8)   k (2, 4, 5, 8)   float32   cpu   mask causal & window(3)"
    assert "  sdpa       no: it has no sinks" in lines
    assert "  formula    yes: it has every option, on any device" in lines
    assert lines[-1] == 'Fix: drop engine="sdpa", or change what it names.'
    words = r"there is no engine 'flash'\. There are: auto, .*sdpa, flex, formula, reference\."
    with pytest.raises(EngineError, match=words):
        attention(T, T, T, "causal", engine="flash")
    with pytest.raises(EngineError, match="engine is None; expected a name: auto, cpu"):
        attention(T, T, T, "causal", engine=None)


def test_a_call_describes_itself_in_bounded_length():
    call, _ = describe(X, KV, KV, lowtri.documents(lengths=[1] * 200, open_end=True))
    assert str(call).startswith("q (2, 4, 5, 8)   k (2, 2, 5, 8)   float32   cpu   mask documents(lengths=[1, 1, 1")
    assert len(str(call)) < 200 and str(call).endswith("...")
    assert call.group == 2 and call.is_numpy and call.dtype == "float32" and not call.needs_grad


def test_numbers_of_any_plain_kind_are_taken():
    expected = attention(X, X, X, "causal", scale=2.0, softcap=3.0)
    for kind in (int, np.float32, np.int64, np.float64):
        assert np.array_equal(attention(X, X, X, "causal", scale=kind(2), softcap=kind(3), dropout=kind(0)), expected)


def test_none_for_a_result_is_no():
    for x in (X, T, T.clone().requires_grad_()):
        output = attention(x, x, x, "causal", return_lse=None, return_weights=None)
        assert (output == attention(x, x, x, "causal")).all()


def test_positions_of_any_plain_kind_are_taken():
    q = np.random.default_rng(0).normal(size=X.shape)
    expected = attention(q, q, q, "causal")
    for places in (
        range(5),
        [0, 1, 2, 3, 4],
        np.arange(5, dtype=np.uint8),
        torch.arange(5),
        np.arange(5)[None],
        [[0, 1, 2, 3, 4]] * 2,
    ):
        assert np.allclose(attention(q, q, q, "causal", q_positions=places, k_positions=places), expected)
