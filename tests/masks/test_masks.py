"""Masks by example: small grids, positions past an array, tables to add, and every error.

The laws, for random masks, are in test_laws.py.
"""

from __future__ import annotations

import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtri
from lowtri.errors import MaskError
from lowtri.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    POSITION_MAX,
    Mask,
    as_mask,
    band,
    causal,
    chunks,
    documents,
    first,
    full,
    heads,
    hidden,
    keys,
    mask,
    strided,
    table,
    tree,
    tree_depths,
    where,
    window,
)

GRIDS = """
window(1)
█···
·█··
··█·
···█

causal & (window(2) | first(1))  # attention sinks
█····
██···
███··
█·██·
█··██

causal | first(3)  # a prefix language model
███··
███··
███··
████·
█████

causal & documents(lengths=[2, 1, 2])  # packed rows
█····
██···
··█··
···█·
···██

causal - window(2)
····
····
█···
██··

band(0, 1) & ~strided(1) | chunks(3)
███··
███··
███··
···██
···██

causal & keys([False, False, True, True, True])  # left padding
·····
·····
··█··
··██·
··███

documents(lengths=[3, 5], inner="causal & (window(2) | first(1))")  # each document has a sink of its own
█·······
██······
███·····
···█····
···██···
···███··
···█·██·
···█··██

documents([7, 7, 7, 1, 1, 1, 1], inner="chunks(2)")  # chunks that begin anew
██·····
██·····
··█····
···██··
···██··
·····██
·····██

tree([-1, 0, 0, 2, -1], start=2, inner="causal & window(3)")  # drafts that branch; the last is a second root
█······
██·····
███····
·███···
·██·█··
··█·██·
██····█

documents([0, 1, 0, 1])  # ids need not be sorted
█·█·
·█·█
█·█·
·█·█
"""


@pytest.mark.parametrize("grid", GRIDS.strip().split("\n\n"), ids=lambda grid: grid.split("  #")[0].split("\n")[0])
def test_grids(grid: str) -> None:
    text, *lines = grid.split("\n")
    m = mask(text.split("  #")[0])
    assert m.draw(len(lines)).split() == lines
    np.testing.assert_array_equal(m.dense(len(lines)), [[mark == "█" for mark in line] for line in lines])


def test_printing_a_mask_draws_it() -> None:
    lines = str(causal() & window(2)).splitlines()
    assert lines[0] == "causal & window(2)"
    assert lines[1:4] == ["█···········", "██··········", "·██·········"]


def test_a_mask_within_documents_is_quoted_as_python_takes_it() -> None:
    deep = documents(lengths=[4, 4], inner=documents(lengths=[2, 1], open_end=True, inner="causal & first(1)"))
    text = 'documents(lengths=[4, 4], inner="documents(lengths=[2, 1], open_end=True, inner=causal & first(1))")'
    assert repr(deep) == text
    assert mask(text) == deep == eval(text, {"documents": documents})
    assert mask(text.replace('"', "'")) == mask(text.replace('"', "")) == deep


def test_a_finished_document_is_never_seen_again_and_a_sink_of_the_last_one_always() -> None:
    m = documents(lengths=[3, 5], open_end=True, inner="causal & (window(2) | first(1))")
    answers = [m.tile(6, POSITION_MAX, k, k + 1) for k in range(6)]
    assert answers == [EMPTY, EMPTY, EMPTY, FULL, EMPTY, PARTIAL]


def test_a_table_within_documents_is_indexed_from_their_start() -> None:
    pairs = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]], bool)
    m = documents(lengths=[2, 3], inner=table(pairs))
    expected = np.zeros((5, 5), bool)
    expected[:2, :2], expected[2:, 2:] = pairs[:2, :2], pairs
    np.testing.assert_array_equal(m.dense(5), expected)
    with pytest.raises(MaskError, match=r"has rows for the queries 0 \.\. 2"):
        documents(lengths=[2, 4], inner=table(pairs)).dense(6)


def test_trees_of_rows_that_begin_apart() -> None:
    both = tree([[-1, 0, 0], [-1, -1, 1]], start=[2, 4], inner=keys([[True] * 5, [False] + [True] * 4]))
    for row, (parents, start, real) in enumerate([([-1, 0, 0], 2, True), ([-1, -1, 1], 4, False)]):
        one = tree(parents, start, keys([real] + [True] * 4))
        assert both.for_row(row) == tree(parents, start, both.inner.for_row(row))
        np.testing.assert_array_equal(both.dense(5)[row], one.dense(5))
    assert tree_depths([[-1, 0, 0], [-1, -1, 1]]).tolist() == [[0, 1, 1], [0, 0, 1]]
    assert repr(tree([-1, 0], [2, 4])) == 'tree([-1, 0], start=[2, 4], inner="causal")'


def test_one_pair_gives_a_plain_bool() -> None:
    simple = ["causal", "~causal", "window(2)", "first(2)", "full", "keys([True])", "documents([0, 1])", "chunks(2)"]
    for m in (*map(mask, simple), table([[True]])):
        assert type(m(0, 0)) is bool, m
        assert type((m & causal())(0, 0)) is bool, m


# Positions past an array.


def test_positions_outside_of_a_table_raise() -> None:
    m = table(np.ones((2, 3), bool))  # queries 1 and 2, keys 0 .. 2
    assert m(1, 0) and m(2, 2)
    assert m.tile(1, 3, 0, 3) == FULL
    assert m.tile(0, 9, 0, 9) == PARTIAL
    for q, k in [(0, 0), (3, 0), (1, 3)]:
        words = r"has rows for the queries 1 \.\. 2 and columns for the keys 0 \.\. 2, but the call has"
        with pytest.raises(MaskError, match=words):
            m(q, k)
    assert table(np.ones((3, 2), bool)).dense(3, 2).all()  # more rows than columns count from 0
    assert not m(-1, 9 - 10)  # no token, no row


def test_nothing_is_known_of_tiles_outside_of_a_table() -> None:
    for pairs in (np.ones((4, 4), bool), np.zeros((4, 4), bool), np.ones((2, 1), bool), np.zeros((1, 3), bool)):
        nq, nk = pairs.shape
        small, start = table(pairs), max(nk - nq, 0)
        for q, k in ((start + nq, 0), (start, nk), (start + nq + 5, nk + 3), (start - 1, 0)):
            if q >= 0:
                assert small.tile(q, q + 1, k, k + 1) == PARTIAL
                assert small.tile(np.array([q]), np.array([q + 1]), np.array([k]), np.array([k + 1])).tolist() == [
                    PARTIAL
                ]
        assert small.tile(start, start + 1, 0, 1) == (FULL if pairs.all() else EMPTY)


def test_a_table_answers_where_there_are_no_pairs() -> None:
    one_query = table([[False, True]])
    assert one_query.dense(2, 0).shape == (2, 0) and one_query.dense(0, 5).shape == (0, 5)
    assert table([[[False, True]]]).dense(2, 0).shape == (1, 2, 0)


def test_formulas_of_users_have_tile_answers() -> None:
    """Of sums, comparisons, & | ~ (the next test); other formulas, and broken ones, are evaluated pair by pair."""
    ours = where(lambda q, k: (k <= q) & ((q - k < 3) | ~(k // 4 != 1) | (k % 4 == 2)))
    assert ours.tile(np.array([0, 9, 20]), np.array([3, 10, 23]), np.array([3, 7, 4]), 8).tolist() == [
        EMPTY,
        FULL,
        FULL,
    ]
    unknown = [
        lambda q, k: np.maximum(q, k) > 3,
        lambda q, k: q * k > 0,
        lambda q, k: q % 2 == 0 and k,
        lambda q, k: q / 2 > k,
    ]
    unknown += [lambda q, k: True, lambda q, k: np.ones(3, bool)[q], lambda q, k: q % np.arange(1, 3) == 0]
    for fn in unknown:
        assert where(fn).tile(0, 9, 0, 9) == PARTIAL and where(fn).tile(np.arange(3), 9, 0, 9).tolist() == [PARTIAL] * 3


NUMBERS = st.recursive(
    st.sampled_from(["q", "k", "1", "3", "17"]),
    lambda x: st.tuples(x, st.sampled_from(["+", "-", "// 3 +", "% 4 -", "& 3 |", "^", "* 2 +", "+ ~"]), x).map(
        lambda parts: f"({' '.join(parts)})"
    ),
    max_leaves=4,
)
FORMULAS = st.recursive(
    st.tuples(NUMBERS, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), NUMBERS).map(
        lambda parts: "({} - k {} {})".format(*parts)
    ),
    lambda x: st.tuples(x, st.sampled_from(["&", "|", "^", "& ~", "==", "!=", "<="]), x).map(
        lambda parts: f"({' '.join(parts)})"
    ),
    max_leaves=3,
)


@settings(max_examples=150, deadline=None)
@given(FORMULAS, st.integers(0, 30), st.integers(0, 30), st.integers(1, 12), st.integers(1, 12))
def test_tile_answers_of_any_formula_are_true_of_its_pairs(text: str, q0: int, k0: int, nq: int, nk: int) -> None:
    """Also of tiles without an end: sums of their positions exceed 64 bits."""
    formula = where(eval(f"lambda q, k: (q >= 0) & (k >= 0) & {text}"))
    q, k = np.arange(q0, q0 + nq)[:, None], np.arange(k0, k0 + nk)
    inside = np.asarray(formula(q, k))
    later = np.asarray(formula(np.r_[q[:, 0], 2**20 - 3 : 2**20 + 3][:, None], k))
    for pairs, q1 in ((inside, q0 + nq), (later, POSITION_MAX)):
        one = formula.tile(q0, q1, k0, k0 + nk)
        (many,) = formula.tile(np.array([q0]), np.array([q1]), np.array([k0]), np.array([k0 + nk]))
        for answer in (one, many):
            assert answer == PARTIAL or pairs.all() == pairs.any() == (answer == FULL), text


# Batches.


def test_batches() -> None:
    rows = documents([[0, 0, 1], [0, 1, 1]])
    by_head = heads([causal(), "window(2)"])
    assert causal().batch == () and rows.batch == (2,) and by_head.batch == (1, 2)
    assert (rows & by_head).batch == (2, 2)
    assert (rows & by_head)(2, 0).shape == (2, 2)
    assert (rows & by_head).for_row(1, 1).dense(3).astype(int).tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert heads([rows, causal()]).batch == (2, 2)
    assert (rows & by_head).tile(0, 2, 0, 2).tolist() == [[PARTIAL, PARTIAL], [PARTIAL, PARTIAL]]
    assert rows.pairs(3).tolist() == [5, 5]
    assert keys(lengths=[0, 2]).is_causal(2) is False


# Tables to add.


def test_additive() -> None:
    out = causal().additive(3)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, [[0, -np.inf, -np.inf], [0, 0, -np.inf], [0, 0, 0]])
    assert causal().additive(2, dtype=np.float64, hidden=-1e9).tolist() == [[0, -1e9], [0, 0]]
    assert causal().additive(2, dtype="float16", hidden=-1e4).dtype == np.float16
    assert causal().additive(1, 3).shape == (1, 3)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_additive_like_a_tensor(kind: torch.dtype) -> None:
    out = causal().additive(3, like=torch.zeros(1, dtype=kind))
    assert out.dtype == kind
    assert torch.equal(out == 0, torch.tril(torch.ones(3, 3, dtype=torch.bool)))
    assert torch.isneginf(out[0, 1:]).all()


def test_additive_finite_like_bfloat16() -> None:
    out = causal().additive(2, hidden=-1e9, like=torch.zeros(1, dtype=torch.bfloat16))
    assert out[0, 1] == torch.tensor(-1e9, dtype=torch.bfloat16)


# Values.


def test_masks_are_values() -> None:
    ids = np.array([0, 0, 1])
    m = documents(ids)
    ids[:] = 0  # the mask holds a copy
    assert m == documents([0, 0, 1])
    assert m != documents([0, 0, 2])
    assert {causal() & window(3), causal() & window(3)} == {causal() & window(3)}
    assert window(3) != band(2, 0)  # the same pairs, built in another way: equality is structural
    assert causal() & full() != full() & causal()
    with pytest.raises(ValueError, match="read-only"):
        pickle.loads(pickle.dumps(m)).ids.array[0] = 7


def test_masks_of_arrays_print_shape_and_digest() -> None:
    ids = documents([[0, 1], [0, 0]])
    assert repr(ids).startswith("documents(<2x2 int64 ")
    assert len(repr(table(np.ones((4096, 4096), bool)))) < 50
    assert repr(documents([0, 1])) != repr(documents([0, 2]))
    words = r"stands for an array or a function, which a text cannot hold\. Fix: pass the mask"
    with pytest.raises(MaskError, match=words):
        mask(repr(causal() & ids))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("causal", causal()),
        ("causal()", causal()),
        (" causal & window( 4 ) ", causal() & window(4)),
        ("causal | first(2) & full", causal() | (first(2) & full())),
        ("full - window(2) & causal", (full() - window(2)) & causal()),
        ("~causal & full", ~causal() & full()),
        ("band(before=1, after=2)", band(1, 2)),
        ("documents(lengths=[2, 3])", documents(lengths=[2, 3])),
        ("documents([0, 0, -1])", documents([0, 0, -1])),
        ("keys([True, False])", keys([True, False])),
        ("heads([causal, window(2) & first(1)])", heads([causal(), window(2) & first(1)])),
    ],
)
def test_text(text: str, expected: Mask) -> None:
    assert mask(text) == expected
    assert as_mask(text) == expected
    assert mask(expected) is expected


def test_the_text_of_many_joined_masks_can_be_read() -> None:
    m = first(1)
    for n in range(2, 90):
        m = m | first(n)
    assert mask(repr(m)) == m


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, q, k):
        return k <= q


# Every error.

LONG = "~" * 150 + "causal"

ERRORS = [
    (lambda: bool(causal()), "would silently drop a mask.\nFix: write m & n, m | n, ~m"),
    (lambda: causal() and full(), "neither true nor false"),
    (lambda: causal() & np.ones((2, 2), bool), "mask & ndarray: only masks can be joined.\nFix: lowtri.table(bools)"),
    (lambda: np.ones((2, 2), bool) & causal(), "mask & ndarray: only masks can be joined"),
    (lambda: causal() | "full", "mask | str: only masks can be joined"),
    (lambda: causal() - 1, "mask - int: only masks can be joined"),
    (lambda: documents([[0], [0]]) & keys(lengths=[1, 2, 3]), "their batches (2,) and (3,) do not fit together"),
    (
        lambda: documents([[0], [0]]).for_row(2),
        "for_row: got batch row 2, head 0; the mask has the batch (2,). Fix: a row from 0 to 1",
    ),
    (lambda: causal().dense(3, 2), "cannot stand at the last 3 of 2 keys.\nFix: q_positions=range(nq) in attention"),
    (lambda: causal().dense(-1), "nq, a number of queries, is -1, but it must lie in 0 .. 2**62. Fix: nq=0."),
    (lambda: causal().additive(2, hidden=0), "additive: hidden is 0, but it must lie below 0 to hide anything"),
    (lambda: causal().additive(2, hidden=math.nan), "additive: hidden is nan, but it must lie below 0"),
    (
        lambda: causal().additive(2, dtype=np.float16, hidden=-1e9),
        "float16 has no -1e+09: it would become -inf. Fix: hidden=-inf",
    ),
    (
        lambda: causal().additive(2, hidden=-1e9, like=torch.zeros(1).half()),
        "torch.float16 has no -1e+09: it would become -inf",
    ),
    (
        lambda: causal().additive(2, dtype=torch.float32),
        "additive: dtype is torch.float32; it takes NumPy dtypes. Fix: like=tensor",
    ),
    (lambda: causal().tile(0, 1.5, 0, 2), "tile: an edge is 1.5, but positions are whole numbers (or inf)"),
    (lambda: causal().tile(0, "2", 0, 2), "tile: an edge is '2', but positions are whole numbers (or inf)"),
    (lambda: window(0), "window: n is 0, but it must lie in 1 .. 2**62"),
    (lambda: window(2.0), "window: n is 2.0, but it counts tokens: a whole number, at least 1"),
    (lambda: window(True), "window: n is True, but it counts tokens"),
    (lambda: band(-1, 2), "band: before is -1, but it must lie in 0 .. 2**62"),
    (lambda: band(1, -2), "band: after is -2"),
    (lambda: first(0), "first: n is 0, but it must lie in 1 .. 2**62"),
    (lambda: chunks(0), "chunks: n is 0"),
    (lambda: strided(2**63), "strided: n is 9223372036854775808, but it must lie in 1 .. 2**62"),
    (lambda: documents(), "documents: give one of ids (with or without key_ids), lengths= or cu_seqlens="),
    (lambda: documents([0], lengths=[1]), "documents: give one of ids"),
    (lambda: documents(lengths=[1], key_ids=[0]), "documents: give one of ids"),
    (lambda: documents([]), "documents: ids is empty"),
    (lambda: documents([0.0, 1.0]), "documents: ids is float64 (2,), but it takes integers of shape (N,) or (B, N)"),
    (lambda: documents([[0, 1], [0]]), "documents: ids is not an array, but it takes integers"),
    (lambda: documents([[0, 1]], [0, 1]), "documents: ids (1, 2) and key_ids (2,) differ in their batch"),
    (
        lambda: documents(lengths=[2, 0]),
        "documents: lengths are [2, 0]; at least one is required, and each is at least 1",
    ),
    (lambda: documents(cu_seqlens=[2, 4]), "documents: cu_seqlens is [2, 4]; it begins with 0 and ends with the total"),
    (lambda: documents(cu_seqlens=[0, 3, 2]), "documents: lengths are [3, -1]; at least one is required"),
    (
        lambda: documents([0, 1, 1, 0, 0], inner="causal"),
        "documents: id 0 comes again at position 3, but inner counts from the start of each document.\nFix: another id",
    ),
    (
        lambda: documents([[0, 1], [2, 2]], inner=causal()) & documents([[3, 4, 3]] * 2, inner=causal()),
        "documents: id 3 comes again at position 2 of row 0",
    ),
    (
        lambda: documents([0, 1], [0, 1], inner="causal"),
        "but key_ids give keys and queries other starts.\nFix: ids alone; or positions that align them",
    ),
    (
        lambda: documents(lengths=[4, 4], inner="documents(lengths=[2, 2])"),
        "documents: the documents in inner, documents(lengths=[2, 2]), end after 4 tokens, wherever the outer ones do.\nFix",
    ),
    (lambda: documents(lengths=[4], inner=3), "documents: inner: got 3; expected a mask or its text"),
    (
        lambda: tree([-1, 1]),
        "tree: the parent of draft 1 is 1, but a parent comes before its child.\nFix: the index of an earlier draft, or -1",
    ),
    (lambda: tree_depths([[-1, 0], [-1, -2]]), "tree_depths: the parent of draft 1 is -2"),
    (lambda: tree([-1, 0], start=-1), "tree: start is -1, but it must lie in 0 .. 2**62"),
    (lambda: tree([-1, 0], start=[1, -1]), "tree: start is [1, -1]; it is the position of the first draft"),
    (lambda: tree([-1] * 5000), "tree: parents has 5000 drafts, but at most 4096 are taken"),
    (
        lambda: tree([[-1], [-1]], start=[1, 2, 3]),
        "tree: parents (2, 1), 3 starts and inner with batch () differ in their rows",
    ),
    (
        lambda: tree([-1, 0], start=3).dense(6),
        "tree: query at position 5, but the 2 drafts stand at 3 .. 4.\nFix: start= the position of the first draft",
    ),
    (lambda: keys(), "keys: give valid (True = real) or lengths=, one of them"),
    (
        lambda: keys([1, 0]),
        "keys: valid is int64 (2,), but it takes bools of shape (N,) or (B, N). Fix: x != 0, after checking whether",
    ),
    (lambda: keys(lengths=[-1]), "keys: lengths are [-1]; there is one for each batch row, none below 0"),
    (
        lambda: table([True]),
        "table: bools is bool (1,), but it takes bools of shape (Nq, Nk) or (B, Nq, Nk) or (B, H, Nq, Nk)",
    ),
    (lambda: table([[1.0]]), "table: bools is float64 (1, 1), but it takes bools"),
    (lambda: hidden([[]]), "hidden: bools is empty"),
    (lambda: where(Unhashable()), "where: fn is Unhashable, which cannot be hashed. Fix: give it __hash__"),
    (lambda: where(3), "where: fn is int; it takes a function of two positions. Fix: lowtri.table(bools)"),
    (
        lambda: where(lambda b, h, q, k: q >= k),
        "where: fn takes (b, h, q, k), but it is given two positions, (q, k).\nFix: where(lambda q, k: fn(0, 0, q, k))",
    ),
    (lambda: where(lambda q: q > 3), "where: fn takes (q), but it is given two positions"),
    (
        lambda: where(lambda q, k: np.ones((7, 3), bool)).dense(4),
        "where: the formula gave shape (7, 3) for positions that broadcast to (4, 4)",
    ),
    (lambda: heads("causal"), "heads: masks is 'causal', but it takes a list"),
    (lambda: heads(causal()), "heads: masks is causal, but it takes a list"),
    (lambda: causal()(1.5, 2), "mask: the positions are 1.5, but a position is a whole number"),
    (lambda: causal().dense("3"), "nq, a number of queries, is '3', but it counts tokens"),
    (
        lambda: where(lambda q, k: k <= q and k >= 0).dense(3),
        "where: the formula uses a whole array as a condition. Fix: write & | ~",
    ),
    (lambda: where(lambda q, k: q - k).dense(3), "where: the formula gave int64 values; it must give bools"),
    (lambda: heads([]), "heads: masks is [], but it takes a list: one mask for each query head"),
    (lambda: heads([heads(["causal"])]), "heads: one of the masks differs by head already"),
    (lambda: heads([keys(lengths=[1, 2]), keys(lengths=[1, 2, 3])]), "heads: the masks have batches of [2, 3] rows"),
    (lambda: as_mask(None), "mask: got None; expected a mask. Fix: lowtri.full()"),
    (
        lambda: as_mask(torch.zeros(2, 2)),
        "mask: got a bare Tensor of floats. Fix: numbers to add to the scores belong in bias=",
    ),
    (
        lambda: as_mask(np.ones((2, 2), bool)),
        "got a bare ndarray. True hides in many notebooks and in nn.MultiheadAttention, and shows in SDPA:\n"
        "write lowtri.table(m) if True = may see, lowtri.hidden(m) if True = hidden.",
    ),
    (lambda: mask(3), "mask: got int; expected a text"),
    (lambda: mask("x" * 70_000), "mask: the text has 70000 characters, but at most 65536 are read"),
]
TEXT_ERRORS = [
    ("documents(lengths=[4], inner='causl')", "there is no mask 'causl'. Did you mean causal?"),
    ("documents(lengths=[4], inner='3')", "mask: '3' is not a mask"),
    ("documents('causal')", "'causal' is not a whole number or a mask, because it is in quotes"),
    ("casual & first(2)", "there is no mask 'casual'. Did you mean causal?"),
    ("document([1])", "there is no mask 'document'. Did you mean documents?"),
    ("", "mask: '' cannot be read: it is empty. Fix: write e.g. 'causal & window(256)'"),
    ("causal &", "mask: 'causal &' cannot be read: it ends where a mask is expected. Fix: write e.g."),
    ("window 3", "'window 3' cannot be read: '3' at character 8 is not in parentheses. Fix: window(3)."),
    ("window[3]", "'[3]' at character 7 is not in parentheses. Fix: window(...)."),
    ("causal & window(3", "the ( at character 16 is not closed. Fix: 'causal & window(3)'."),
    ("heads([causal, full ", "the [ at character 7 is not closed. Fix: 'heads([causal, full])'."),
    ("documents(lengths=[3, 5", "the [ at character 19 is not closed. Fix: 'documents(lengths=[3, 5])'."),
    (
        "causal window(3)",
        "'window(3)' at character 8, where & | - or the end is expected. Fix: masks are joined by & | ~ -",
    ),
    ("window(3 4)", "'4)' at character 10, where a comma or ) is expected. Fix: "),
    ("causal | & full", "'& full' at character 10, where a mask is expected. Fix: masks are joined by"),
    ("causal && full", "'& full' at character 9, where a mask is expected"),
    ("causal)", "')' at character 7, where & | - or the end is expected"),
    ("causal & 3", "mask: 'causal & 3' is not a mask. Fix: masks are joined by & | ~ -"),
    ("causl", "mask: there is no mask 'causl'. Did you mean causal? There are: full, causal, window"),
    ("window", "mask: 'window': missing 1 required positional argument: 'n'.\nFix: window(n)."),
    ("window(3, 4)", "mask: 'window(3, 4)': takes 1 positional argument but 2 were given"),
    ("window(size=3)", "mask: 'window(size=3)': got an unexpected keyword argument 'size'.\nFix: window(n)."),
    ("window(2.5)", "mask: 2.5 is not a whole number"),
    ("window('3')", "mask: '3' is not a whole number"),
    (
        'heads(["causal", full])',
        "mask: 'causal' is not a whole number or a mask, because it is in quotes.\nFix: drop the quotes.",
    ),
    ("window(0)", "window: n is 0, but it must lie in 1"),
    ("window(**3)", "mask: 'window(**3)': ** has no meaning here"),
    ("causal and full", "mask: 'causal and full': masks are joined by & | ~ -, not by and, or, not"),
    ("not causal", "mask: 'not causal': masks are joined by & | ~ -"),
    ("causal + full", "'+ full' at character 8, where & | - or the end is expected"),
    ("3", "mask: '3' is not a mask"),
    ("table([[True]])", "mask: table holds an array or a function, which a text cannot hold. Fix: lowtri.table(...)"),
    ("where(print)", "mask: where holds an array or a function"),
    (LONG, "mask: the text nests more than 100 operators"),
    ("__import__('os').system('true')", "there is no mask '__import__'"),
    ("(lambda: causal)()", "there is no mask 'lambda'"),
    ("causal if 1 else full", "'if 1 else full' at character 8, where & | - or the end is expected"),
]
ERRORS += [(partial(mask, text), words) for text, words in TEXT_ERRORS]


@pytest.mark.parametrize(("act", "words"), ERRORS, ids=[words[:40] for _, words in ERRORS])
def test_errors(act, words: str) -> None:
    with pytest.raises(MaskError) as caught:
        act()
    message = str(caught.value)
    assert words in message
    assert len(message.splitlines()) <= 3
    assert isinstance(caught.value, ValueError)


def test_a_text_is_never_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ["print(1)", "window(print(1))", "[print(1)]", "causal & print(1)", "documents(lengths=[print(1)])"]:
        with pytest.raises(MaskError):
            mask(text)
    assert capsys.readouterr().out == ""


def test_texts_without_lists_are_cached():
    assert lowtri.mask("causal & window(4)") is lowtri.mask("causal & window(4)")
    assert lowtri.mask("documents(lengths=[2])") is not lowtri.mask("documents(lengths=[2])")
