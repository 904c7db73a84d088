"""The contracts of attention, each for every engine and dtype that runs the call by its own word.

Here: what True means, queries that see nothing, what is hidden, windows, heads, positions, bias, softcap, sinks, dropout.
Rounding, repetition and shapes stand in test_attention_numbers.py, life in a program in test_attention_in_use.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import DTYPES, ENGINES, TRACELESS, able, draw, near, pair_by_pair, wide, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtri
from lowtri import CallError, attention, causal, documents, first, full, heads, keys, table, window
from lowtri.backends import BACKENDS

NAN, INF = float("nan"), float("inf")

MASKS = {
    "causal": causal(),
    "full": full(),
    "window": window(3),
    "sinks": causal() & (window(2) | first(1)),
    "prefix": causal() | first(4),
    "documents": causal() & documents([0, 0, 0, 1, 1, 1, 1, 2, 2]),
    "pads": causal() & keys([[False, False] + [True] * 7, [True] * 9]),
    "none": ~full(),
    "by head": heads([causal(), window(1), full(), ~causal()]),
    "by row and head": heads([causal() & keys(lengths=[9, 5]), window(2), full() & keys(lengths=[0, 3]), full()]),
    "table": table(np.random.default_rng(0).random((2, 4, 9, 9)) < 0.4),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_true_means_may_see(name, dtype):
    """Output, weights and log-sum-exp are those worked out pair by pair from mask(q, k)."""
    q, k, v = draw(dtype=dtype)
    exact = pair_by_pair(*map(wide, (q, k, v)), MASKS[name])
    for engine in able(q, k, v, MASKS[name]):
        out = attention(q, k, v, MASKS[name], engine=engine)
        assert out.dtype == q.dtype and out.shape == (2, 4, 9, 5)
        assert near(out, exact[0], dtype), engine
    for engine in able(q, k, v, MASKS[name], return_lse=True):
        out, lse = attention(q, k, v, MASKS[name], engine=engine, return_lse=True)
        assert lse.dtype in (torch.float32, torch.float64) and lse.shape == (2, 4, 9)
        # In half types the exponential's error is 3e-6, in the sum of weights, too: kernels.simd.ERRORS.
        precise, times = ("float64", 8) if dtype == "float64" else ("float32", 8 if dtype == "float32" else 32)
        assert near(out, exact[0], dtype) and near(lse, exact[2], precise, times=times), engine
    for engine in able(q, k, v, MASKS[name], return_weights=True):
        out, weights = attention(q, k, v, MASKS[name], engine=engine, return_weights=True)
        assert weights.dtype == q.dtype and weights.shape == (2, 4, 9, 9)
        assert near(out, exact[0], dtype) and near(weights, exact[1], dtype), engine
        assert not weights[torch.from_numpy(exact[1]) == 0].any(), engine  # exactly 0 where hidden


# A query that sees nothing.

NOTHING = {  # name -> (mask, options): the rows 0 and 4 of five see nothing
    "table": (table([[False] * 5, *[[True] * 5] * 3, [False] * 5]), {}),
    "positions": (causal(), {"q_positions": [-1, 1, 2, 3, -1]}),
    "bias": (full(), {"bias": torch.tensor([-INF, 0, 0, 0, -INF])[:, None].expand(5, 5).contiguous()}),
    "bias of one column": (full(), {"bias": torch.tensor([-INF, 0, 0, 0, -INF])[:, None]}),
    "mask and bias": (table(np.eye(5, dtype=bool)), {"bias": torch.diag(torch.tensor([-INF, 0, 0, 0, -INF]))}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NOTHING)
def test_a_query_that_sees_nothing(name, dtype):
    mask, options = NOTHING[name]
    rows = [0, 4]
    q, k, v = draw(nq=5, nk=5, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for engine in able(*leaves, mask, **options):
        out, (d_q, d_k, d_v, *_) = with_gradients(engine, (q, k, v), mask, **options)
        assert not out[:, :, rows].any() and out[:, :, 1:4].all(), engine
        assert not d_q[:, :, rows].any() and all(d.isfinite().all() for d in (d_q, d_k, d_v)), engine
        only = torch.zeros_like(out)
        only[:, :, rows] = 1  # whatever is asked of the empty rows moves nothing
        for moved in with_gradients(engine, (q, k, v), mask, only, **options)[1]:
            assert not moved.any(), engine
    for engine in able(q, k, v, mask, return_lse=True, **options):
        out, lse = attention(q, k, v, mask, return_lse=True, engine=engine, **options)
        assert (lse[:, :, rows] == -INF).all() and lse[:, :, 1:4].isfinite().all() and not out[:, :, rows].any(), engine
    for engine in able(q, k, v, mask, return_weights=True, **options):
        weights = attention(q, k, v, mask, return_weights=True, engine=engine, **options)[1]
        assert not weights[:, :, rows].any() and not weights.isnan().any(), engine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NOTHING)
def test_a_query_that_sees_only_the_sink(name, dtype):
    mask, options = NOTHING[name]
    q, k, v = draw(nq=5, nk=5, dtype=dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 40.0])
    for engine in able(q, k, v, mask, sinks=sinks, **options):
        out = attention(q, k, v, mask, sinks=sinks, engine=engine, **options)
        assert not out[:, :, [0, 4]].any() and not out.isnan().any(), engine
    for engine in able(q, k, v, mask, sinks=sinks, return_lse=True, **options):
        lse = attention(q, k, v, mask, sinks=sinks, return_lse=True, engine=engine, **options)[1]
        assert torch.allclose(lse[:, :, [0, 4]].float(), sinks[None, :, None]), engine
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for engine in able(*leaves, mask, sinks=sinks, **options):
        _, moved = with_gradients(engine, (q, k, v), mask, sinks=sinks, **options)
        assert all(m.isfinite().all() for m in moved) and not moved[0][:, :, [0, 4]].any(), engine


# What is hidden.

GARBAGE = (NAN, INF, -INF, 6e4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", GARBAGE)
def test_hidden_from_everyone_leaves_no_trace(value, dtype):
    """Pads by keys(), by positions of -1, and keys beyond every window: the same bits as with zeros there."""
    pads = [[False, True, True, True, True, False], [True, True, False, True, True, True]]
    places = np.array([[-1, 0, 1, 2, 3, -1], [0, 1, -1, 2, 3, 4]])
    late = {"q_positions": np.arange(9, 15)[None], "k_positions": np.arange(3, 9)}
    cases = [
        (full() & keys(pads), {}, np.array(pads), None),
        (causal(), {"q_positions": places, "k_positions": places}, places >= 0, places >= 0),
        (window(2), late, np.arange(6)[None] > 4, None),
    ]
    for mask, options, real_k, real_q in cases:
        q, k, v = draw(nq=6, nk=6, dtype=dtype)
        gone = torch.from_numpy(np.broadcast_to(~real_k, (2, 6)).copy())[:, None, :, None]
        gone_q = (
            torch.zeros(2, 1, 6, 1, dtype=torch.bool) if real_q is None else torch.from_numpy(~real_q)[:, None, :, None]
        )
        clean = [q.masked_fill(gone_q, 0), k.masked_fill(gone, 0), v.masked_fill(gone, 0)]
        dirty = [q.masked_fill(gone_q, value), k.masked_fill(gone, value), v.masked_fill(gone, value)]
        for engine in able(*dirty, mask, **options):
            expected, found = (attention(*x, mask, engine=engine, **options) for x in (clean, dirty))
            assert torch.equal(expected, found), (engine, mask)
        leaves = [x.clone().requires_grad_() for x in dirty]
        for engine in able(*leaves, mask, **options):
            expected, found = (with_gradients(engine, tuple(x), mask, **options)[1] for x in (clean, dirty))
            assert all(map(torch.equal, expected, found)), (engine, mask)
            assert not found[1].masked_select(gone).any() and not found[0].masked_select(gone_q).any(), (engine, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", GARBAGE)
def test_hidden_from_some_leaves_no_trace_with_them(value, dtype):
    """Two documents, the second full of garbage: the first is the same, forward and backward. sdpa by name cannot."""
    mask = causal() & documents([0, 0, 0, 1, 1, 1])
    clean = draw(nq=6, nk=6, dtype=dtype)
    dirty = tuple(torch.cat([x[:, :, :3], torch.full_like(x[:, :, 3:], value)], 2) for x in clean)
    for engine in ("auto", *able(*dirty, mask, among=TRACELESS)):
        expected, found = (attention(*x, mask, engine=engine)[:, :, :3] for x in (clean, dirty))
        assert near(found, expected, dtype), engine
    leaves = [x.clone().requires_grad_() for x in dirty]
    for engine in ("auto", *able(*leaves, mask, among=TRACELESS)):
        expected, found = (with_gradients(engine, x, mask)[1] for x in (clean, dirty))
        for e, f in zip(expected, found, strict=True):
            assert near(f[:, :, :3], e[:, :, :3], dtype), engine
    assert set(able(*dirty, mask, among=TRACELESS)) >= {"reference", "formula"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_visible_nan_comes_out(dtype):
    for part in range(3):
        inputs = [x.clone() for x in draw(nq=6, nk=6, dtype=dtype)]
        inputs[part][:, :, 3] = NAN
        for engine in able(*inputs, "causal"):
            bad = attention(*inputs, "causal", engine=engine).isnan().all(dim=3)  # (B, H, N)
            assert bad[:, :, 3].all() if part == 0 else bad[:, :, 3:].all(), (engine, part)
        leaves = [x.clone().requires_grad_() for x in inputs]
        for engine in able(*leaves, "causal"):
            d_v = with_gradients(engine, tuple(inputs), "causal")[1][2]
            assert part == 2 or d_v[:, :, :4].isnan().all(), (engine, part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_visible_infinity_comes_out(dtype):
    q, k, v = draw(nq=6, nk=6, dtype=dtype)
    v[:, :, 2, 1] = INF
    for engine in ("auto", *able(q, k, v, "causal", among=TRACELESS)):
        out = attention(q, k, v, "causal", engine=engine)
        assert (out[:, :, 2:, 1] == INF).all() and out[:, :, :2].isfinite().all(), engine


def broken_inputs(data: st.DataObject) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and a gradient of the output, one of them with a row or a number that is not finite."""
    n, d = data.draw(st.sampled_from([1, 3, 8, 17, 40])), data.draw(st.sampled_from([4, 8, 32]))
    dtype = data.draw(st.sampled_from(DTYPES))
    parts = [*draw(b=1, hq=2, hkv=data.draw(st.integers(1, 2)), nq=n, nk=n, d=d, dv=d, dtype=dtype)]
    parts.append(draw(b=1, hq=2, hkv=2, nq=n, nk=n, d=d, dv=d, dtype=dtype, seed=1)[0])
    value = data.draw(st.sampled_from([NAN, INF, -INF]))
    place, row = data.draw(st.integers(0, 3)), data.draw(st.integers(0, n - 1))
    parts[place][:, :, row, data.draw(st.one_of(st.just(slice(None)), st.integers(0, d - 1)))] = value
    return parts[:3], parts[3]


TEXTS = ["causal", "full", "window(3)", "causal & (window(2) | first(1))", "chunks(4)", "~causal", "causal | first(3)"]


@pytest.mark.sweep
@settings(deadline=None, max_examples=1500)
@given(st.data(), st.sampled_from(TEXTS))
def test_auto_spreads_and_swallows_nothing(data, text):
    """Where an input is not finite, output and gradients are finite for the same numbers as in the formula."""
    inputs, d_out = broken_inputs(data)
    expected, found = (with_gradients(engine, tuple(inputs), text, d_out) for engine in ("formula", "auto"))
    for e, f in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
        assert torch.equal(e.isfinite(), f.isfinite())


def test_a_gradient_that_is_not_finite_stays_with_its_query():
    """NaN in the gradient of one query's output reaches the keys which that query sees; by auto in small calls, too."""
    inputs, d_out = draw(nq=9, nk=9), torch.ones(2, 4, 9, 5)
    d_out[:, :, 4] = NAN
    for engine in ("auto", *able(*inputs, "window(2)")):
        _, (dq, dk, dv) = with_gradients(engine, inputs, "window(2)", d_out)
        for found, touched in ((dq, [4]), (dk, [3, 4]), (dv, [3, 4])):
            assert found.isfinite().all(dim=3).all(dim=0).all(dim=0).logical_not().nonzero()[:, 0].tolist() == touched


# Windows, heads, positions.


positions = st.lists(st.integers(-1, 12), min_size=7, max_size=7)


@settings(deadline=None, max_examples=20)
@given(
    st.data(),
    st.sampled_from(["causal", "window(3)", "full", "~causal", "causal & (window(2) | first(1))", "chunks(4)"]),
)
def test_positions_in_any_order(data, text):
    """(N,) or (B, N), repeated, unordered, -1 for no token: always what mask(q, k) says of each pair."""
    q, k, v = draw(nq=7, nk=7)
    at_q, at_k = (
        np.array(data.draw(st.one_of(positions, st.lists(positions, min_size=2, max_size=2)))) for _ in range(2)
    )
    exact = pair_by_pair(wide(q), wide(k), wide(v), text, q_positions=at_q, k_positions=at_k)[0]
    for engine in able(q, k, v, text, q_positions=at_q, k_positions=at_k):
        out = attention(q, k, v, text, q_positions=at_q, k_positions=torch.from_numpy(at_k), engine=engine)
        assert near(out, exact, "float32"), engine


def test_queries_stand_where_the_last_keys_stand():
    """A shifted stretch, left pads: the places of the keys are those of the queries too, if nobody says otherwise."""
    q, k, v = draw(nq=3, nk=5)
    for places in ([20, 21, 22, 23, 24], [-1, -1, 0, 1, 2], [[-1, 0, 1, 2, 3], [0, 1, 2, 3, 4]]):
        for engine in able(q, k, v, "causal", k_positions=places):
            out = attention(q, k, v, "causal", k_positions=places, engine=engine)
            given = {"k_positions": places, "q_positions": np.array(places)[..., 2:]}
            said = attention(q, k, v, "causal", engine=engine, **given)
            assert torch.equal(out, said) and out.all(), (engine, places)
    # Other people's keys: who asks is there all the same.
    padded = attention(q, k, v, "full", k_positions=[0, 1, 2, -1, -1])
    assert padded.all() and torch.allclose(padded, attention(q, k[:, :, :3], v[:, :, :3], "full"), atol=1e-6)


def test_more_queries_than_keys():
    q, k, v = draw(nq=9, nk=4)
    for text in ("full", "first(2)", "full & keys(lengths=[4, 2])"):
        for engine in able(q, k, v, text):
            exact = pair_by_pair(wide(q), wide(k), wide(v), text, q_positions=np.arange(9))[0]
            assert near(attention(q, k, v, text, engine=engine), exact, "float32"), engine
    with pytest.raises(lowtri.MaskError, match=r"9 queries and 4 keys under causal.*\n.*q_positions=range\(nq\)"):
        attention(q, k, v, "causal")
    for engine in able(q, k, v, "causal", q_positions=range(9)):
        out = attention(q, k, v, "causal", q_positions=range(9), engine=engine)
        assert near(out, pair_by_pair(wide(q), wide(k), wide(v), "causal", q_positions=np.arange(9))[0], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["window(3)", "causal & (window(2) | first(2))", "chunks(4)", "causal", "~full"])
def test_one_new_token_reads_the_keys_that_it_sees(text, dtype):
    """With a cache whose tail is garbage, and a bias over all of its slots."""
    q, k, v = draw(nq=1, nk=9, dtype=dtype)
    places = [0, 1, 2, 3, 4, 5, 6, -1, -1]
    k[:, :, 7:], v[:, :, 7:] = NAN, INF
    for bias in (None, torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 4)[:, None, None]):
        options = {"bias": bias, "q_positions": [6], "k_positions": places}
        shown = {**options, "bias": None if bias is None else bias.numpy()}
        exact = pair_by_pair(wide(q), wide(k), wide(v), text, **shown)[0]
        for engine in able(q, k, v, text, **options):
            assert near(attention(q, k, v, text, engine=engine, **options), exact, dtype), engine


# Options.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(9,), (9, 1), (1, 1), (9, 9), (4, 1, 9), (4, 9, 9), (2, 1, 1, 9), (2, 4, 9, 9), (1, 4, 9, 1)]
)
def test_bias_broadcasts(shape, dtype):
    q, k, v = draw(dtype=dtype)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    exact = pair_by_pair(wide(q), wide(k), wide(v), "causal", bias=bias.numpy())
    for engine in able(q, k, v, "causal", bias=bias):
        assert near(attention(q, k, v, "causal", bias=bias, engine=engine), exact[0], dtype), engine
    for engine in able(q, k, v, "causal", bias=bias, return_lse=True):
        lse = attention(q, k, v, "causal", bias=bias, return_lse=True, engine=engine)[1]
        assert near(lse, exact[2], "float32", times=16), engine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_bias_is_never_read_at_hidden_pairs(value, dtype):
    q, k, v = draw(dtype=dtype)
    mask = causal() & keys(lengths=[9, 6])
    clean = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(1))
    dirty = clean.masked_fill(~torch.from_numpy(mask.dense(9))[:, None], value)
    for engine in able(q, k, v, mask, bias=dirty):
        expected, found = (attention(q, k, v, mask, bias=bias, engine=engine) for bias in (clean, dirty))
        assert torch.equal(expected, found), engine
    leaf = dirty.clone().requires_grad_()
    for engine in able(q, k, v, mask, bias=leaf):
        expected, found = (with_gradients(engine, (q, k, v), mask, bias=bias)[1] for bias in (clean, dirty))
        assert all(map(torch.equal, expected, found)), engine
        assert not found[3].masked_select(~torch.from_numpy(mask.dense(9))[:, None]).any(), engine


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_bias_beside_half_inputs_is_not_rounded(dtype):
    """Neighbouring integers at 1000 are one number in bfloat16; a bias in float32 keeps them apart."""
    q, k, v = draw(dtype=dtype)
    bias = -torch.arange(9.0) - 1000
    exact = pair_by_pair(wide(q), wide(k), wide(v), "full", bias=bias.numpy())[0]
    for engine in able(q, k, v, "full", bias=bias):
        found = attention(q, k, v, "full", bias=bias, engine=engine)
        assert near(found, exact, dtype, times=1000), engine  # scores of 1000 are themselves rounded


# Engines.


def test_which_engine_says_why_not():
    x = np.eye(3)
    choice = lowtri.which_engine(x, x, x, "causal")
    assert choice.engine in ENGINES and set(choice.answers) == set(BACKENDS)
    assert choice.answers["sdpa"] == "no: the arrays are NumPy's"
    assert "sdpa       no: the arrays are NumPy's" in str(choice)
    t = torch.eye(3)
    said = {
        "it has no sinks": {"sinks": torch.zeros(1)},
        "it has no softcap": {"softcap": 1.0},
        "it does not return weights": {"return_weights": True},
        "it does not return log-sum-exp": {"return_lse": True},
    }
    for reason, options in said.items():
        assert lowtri.which_engine(t, t, t, "causal", **options).answers["sdpa"] == f"no: {reason}"
    assert lowtri.which_engine(t[:0], t, t, "causal").answers["sdpa"] == "no: there is nothing to attend to"
    assert lowtri.which_engine(t, t, t, "causal", dropout=0.5).answers["sdpa"].startswith("only by name: its dropout")


@pytest.mark.parametrize("engine", ["auto", *ENGINES[2:]])
def test_weights_that_cannot_fit_are_refused_at_once(engine):
    x = np.zeros((3_000_000, 8), np.float32)
    for one in (x, torch.from_numpy(x)):
        words = r"return_weights=True makes an array .*33,528 GiB.*\nFix: a part of the queries at a time"
        with pytest.raises(CallError, match=words):
            attention(one, one, one, "window(4)", return_weights=True, engine=engine)
    some = attention(x[:10], x[:900], x[:900], "window(4)", q_positions=range(10), return_weights=True, engine=engine)
    assert some[1].shape == (10, 900)
