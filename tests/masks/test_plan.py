"""Plans: exactly the pairs of the mask, for any positions of queries and keys."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_masks import SIZE, Case, cases

from lowtri.masks import (
    FULL,
    PARTIAL,
    Mask,
    causal,
    documents,
    first,
    heads,
    keys,
    mask,
    strided,
    table,
    where,
    window,
)
from lowtri.masks import plan as plans
from lowtri.masks.plan import TILE_Q, Plan, plan
from lowtri.masks.tile import Truth


def check(m: Mask, q: np.ndarray, k: np.ndarray, tile_k: int) -> Plan:
    """Compare the plan with the pairs, for every batch row and head; and check the order of its runs."""
    p = plan(m, q, k, tile_k=tile_k)
    q, k = np.atleast_2d(q), np.atleast_2d(k)
    rows, columns = max(len(q), len(k), *(m.batch[:1] or (1,))), (*m.batch, 1, 1)[1]
    assert p.mask_index.shape == (rows, columns)
    total = 0
    for b, h in np.ndindex(rows, columns):
        expected = m.for_row(b, h)(q[b % len(q)][:, None], k[b % len(k)][None, :])
        np.testing.assert_array_equal(p.dense(int(p.mask_index[b, h])), expected)
        assert p.mask_pairs[p.mask_index[b, h]] == expected.sum()
        by_row = np.add.reduceat(expected.sum(1), np.arange(0, len(expected), TILE_Q)) if len(expected) else []
        assert p.row_pairs()[p.mask_index[b, h]].tolist() == list(by_row)
        total += int(expected.sum())
    assert p.pairs == total
    check_order(p)
    return p


def check_order(p: Plan) -> None:
    for index in range(len(p.mask_pairs)):
        for r in range(p.rows):
            before, kind_before = 0, None
            for start, stop, kind, place in p.row(r, index).tolist():
                assert before <= start < stop <= -(-p.nk // p.tile_k)
                assert kind in (PARTIAL, FULL)
                assert not (start == before and kind == kind_before), "neighbours of one kind are one run"
                if kind == PARTIAL:
                    assert place >= 0 and place + stop - start <= len(p.tile_bits)
                before, kind_before = stop, kind
    assert len({word.tobytes() for word in p.bits}) == len(p.bits), "equal bits are stored once"
    assert p.bits.any(1).all(), "all-zero bits are EMPTY"
    assert set(p.tile_bits.tolist()) == set(range(len(p.bits))), "every stored pattern is used"


@st.composite
def positions_below(draw: st.DrawFn, most: int) -> np.ndarray:
    """(N,) or (2, N) positions below ``most``: in order, shuffled, a ring with sinks, with or without holes of -1."""
    n = draw(st.integers(1, 150))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["range", "shuffled", "ring", "repeated"]))
    lead = draw(st.sampled_from([(), (2,)]))

    def line() -> np.ndarray:
        if kind == "range":
            out = np.arange(n) + rng.integers(0, 30)
        elif kind == "shuffled":
            out = rng.permutation(n)
        elif kind == "ring":
            out = np.concatenate([np.arange(3), np.roll(np.arange(40, 40 + n), rng.integers(n))])[:n]
        else:
            out = rng.integers(0, n, n)
        out = out % most
        return np.where(rng.random(n) < draw(st.sampled_from([0, 0, 0.2, 1])), -1, out)

    return line() if lead == () else np.stack([line(), line()])


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(cases, st.data(), st.sampled_from([16, 64, 128]))
def test_a_plan_has_the_pairs_of_the_mask(case: Case, data: st.DataObject, tile_k: int) -> None:
    most = SIZE if case.ends else 10_000
    check(case.mask, data.draw(positions_below(most)), data.draw(positions_below(most)), tile_k)


@pytest.mark.sweep
@settings(deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow])
@given(cases, st.data(), st.sampled_from([8, 16, 32, 64, 128, 256]))
def test_sweep_a_plan_says_what_the_mask_says(case: Case, data: st.DataObject, tile_k: int) -> None:
    test_a_plan_has_the_pairs_of_the_mask.hypothesis.inner_test(case, data, tile_k)


LONG = [
    "causal",
    "causal & window(100)",
    "causal & (window(70) | first(4))",
    "causal & chunks(96)",
    "causal & documents(lengths=[130, 1, 64, 205])",
    "~causal",
    "band(3, 200) - strided(3)",
    "heads([causal, full, window(65)])",
    "keys(lengths=[0, 129, 400]) & causal",
]


@pytest.mark.parametrize("text", LONG)
@pytest.mark.parametrize(("nq", "nk"), [(400, 400), (65, 400), (1, 333), (128, 256)])
def test_long_rows(text: str, nq: int, nk: int) -> None:
    k = np.arange(nk)
    check(mask(text), k[-nq:], k, 64)


@pytest.mark.parametrize("text", LONG)
def test_a_ring_with_sinks(text: str) -> None:
    """The positions of a cache: four sinks, then a ring that has wrapped around, then free slots."""
    k = np.concatenate([np.arange(4), np.arange(260, 300), np.arange(120, 260), np.full(30, -1)])
    check(mask(text), np.array([299]), k, 64)


def test_no_queries_and_no_keys() -> None:
    for nq, nk in [(0, 5), (5, 0), (0, 0)]:
        p = plan(causal(), np.arange(nq), np.arange(nk))
        assert p.pairs == 0 and len(p.runs) == 0
        assert p.dense().shape == (nq, nk)


# Shared patterns, and tiles promoted to FULL.


def test_the_diagonal_is_stored_once() -> None:
    p = plan(causal(), np.arange(64 * 50), np.arange(64 * 50), tile_k=64)
    assert p.bits.shape == (1, 64)
    assert len(p.tile_bits) == 50
    assert p.row(49).tolist() == [[0, 49, FULL, 0], [49, 50, PARTIAL, 49]]


def test_a_bit_is_a_query_and_a_word_is_a_key() -> None:
    p = plan(causal(), np.arange(64), np.arange(64), tile_k=64)
    assert p.bits[0, 0] == np.uint64(2**64 - 1)  # key 0 is seen by all 64 queries
    assert p.bits[0, 63] == np.uint64(1) << np.uint64(63)  # key 63 by the last alone


def test_partial_tiles_whose_pairs_are_all_visible_are_promoted() -> None:
    """Formulas with functions of NumPy have no tile answers; the bits decide."""
    everything = plan(where(lambda q, k: np.abs(k) >= 0), np.arange(100), np.arange(300), tile_k=64)
    assert everything.row(0).tolist() == everything.row(1).tolist() == [[0, 5, FULL, 0]]
    assert len(everything.bits) == 0
    nothing = plan(where(lambda q, k: np.abs(k) < 0), np.arange(100), np.arange(300), tile_k=64)
    assert len(nothing.runs) == 0 and nothing.pairs == 0


def test_equal_masks_of_rows_and_heads_are_planned_once() -> None:
    n = np.arange(100)
    assert plan(heads([causal(), window(5), causal()]), n, n).mask_index.tolist() == [[0, 1, 0]]
    same = documents(np.zeros((3, 100), int)) & causal()
    assert len(plan(same, n, n).mask_pairs) == 1
    assert plan(causal(), np.stack([n, n + 1, n]), n).mask_index.tolist() == [[0], [1], [0]]


SIGNED = [
    mask("causal & documents(lengths=[130, 1, 64, 205, 3, 300, 64, 64, 400])"),
    documents(np.repeat([4, 2, 9, 1], [100, 129, 300, 70])),
    causal() & documents(np.repeat([0, 1, 2], [300, 64, 500]), np.repeat([1, 0, 2], [200, 400, 1])),
    keys(np.arange(700) % 150 > 70) & (causal() | first(130)),
    (window(200) | documents(lengths=[64] * 6)) - strided(5),
    ~(window(70) & where(lambda q, k: (q + k) % 3 == 0)) & causal(),
]


@pytest.mark.parametrize("m", SIGNED, ids=map(repr, SIGNED))
@pytest.mark.parametrize("tile_k", [64, 128])
def test_tiles_of_equal_signature_are_evaluated_once_and_correctly(m: Mask, tile_k: int) -> None:
    k = np.arange(900)
    check(m, k, k, tile_k)
    check(m, k[37:500], np.where(k % 97 == 5, -1, k + 64), tile_k)
    check(m, np.roll(k, 300), np.roll(k, 77), tile_k)


def counted(mask: Mask, evaluated: list[int]) -> Mask:
    """The same mask, which notes how many numbers each answer for pairs has."""

    class Counted(type(mask)):
        def _sees(self, q: Any, k: Any) -> Any:
            out = super()._sees(q, k)
            if not isinstance(out, Truth):
                evaluated.append(np.size(out))
            return out

    return Counted(*[getattr(mask, name) for name in mask.__match_args__])


def test_each_mask_evaluates_only_its_partial_tiles() -> None:
    """Joined with a mask whose tiles all differ, a window is evaluated at its edge only: a few patterns, at any length."""
    n, of_window, of_documents = 16_384, [], []
    shuffled = documents(np.random.default_rng(0).permutation(np.repeat(np.arange(16), n // 16)))
    positions = np.arange(n)
    p = plan(counted(window(512), of_window) & counted(shuffled, of_documents), positions, positions)
    assert len(p.bits) == len(p.tile_bits) > 1000
    assert 0 < sum(of_window) <= 2 * 20 * TILE_Q * p.tile_k  # in two rounds of tiles
    assert sum(of_documents) == len(p.tile_bits) * TILE_Q * p.tile_k


def test_equal_documents_are_evaluated_once() -> None:
    evaluated: list[int] = []
    positions = np.arange(64 * 1000)
    p = plan(window(300) & counted(documents(lengths=[320] * 200), evaluated), positions, positions)
    assert p.pairs == 200 * (300 * 320 - 300 * 299 // 2)
    assert sum(evaluated) == 2 * TILE_Q * p.tile_k, "the tiles in which a document ends, at either half of 128 keys"


def planned(m: Mask, n: int) -> tuple[Plan, int]:
    """The plan of n tokens, and the most bytes while it was made."""
    positions = np.arange(n)
    tracemalloc.start()
    try:
        return plan(m, positions, positions), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("m", "n", "pairs"),
    [
        (causal() & window(1024), 262_144, 1024 * 262_144 - 1024 * 1023 // 2),
        (causal(), 1_000_000, 500_000_500_000),
        (causal() & documents(lengths=[1000] * 1000), 1_000_000, 500_500_000),
    ],
    ids=["window of 1024 over 262,144", "causal over a million", "a thousand documents"],
)
def test_long_plans_stay_small(m: Mask, n: int, pairs: int) -> None:
    p, peak = planned(m, n)
    assert p.pairs == pairs
    assert peak < 100e6
    assert p.nbytes < 2e6


@pytest.mark.sweep
@pytest.mark.parametrize(
    "m",
    [
        mask("causal & (window(4096) | first(4))"),
        causal() & documents(lengths=np.random.default_rng(0).integers(1, 100, 20_000)),
        window(512) & documents(np.random.default_rng(0).permutation(np.repeat(np.arange(1000), 1000))),
        window(512) & where(lambda q, k: (q + k) % 3 == 0),
        causal() & keys(np.arange(1_000_000) >= 777),
        heads([window(256 + n) for n in range(8)]),
    ],
    ids=["sinks", "short documents", "shuffled documents", "a formula", "left padding", "heads"],
)
def test_sweep_a_million_tokens_are_planned_in_seconds(m: Mask) -> None:
    positions = np.arange(1_000_000)
    start = time.process_time()
    plan(m, positions, positions)
    assert time.process_time() - start < 10
    assert planned(m, 1_000_000)[1] < 500e6


def test_a_mask_within_documents_evaluates_no_more_pairs_than_one_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tiles of all documents are one pattern; its parts are joined as those of any other mask."""
    evaluated = []
    evaluate = plans._evaluated
    monkeypatch.setattr(plans, "_evaluated", lambda m, q, k: evaluated.append(q.size * k.shape[1]) or evaluate(m, q, k))
    lengths, inside = [512, 1024] * 8, "causal & (window(256) | first(4))"
    positions = np.arange(sum(lengths))
    over = plan(mask(inside) & documents(lengths=lengths), positions, positions)
    of_one = sum(evaluated)
    evaluated.clear()
    for m in (documents(lengths=lengths, inner=inside), documents(np.repeat(range(16), lengths), inner=inside)):
        within = plan(m, positions, positions)
        assert sum(evaluated) <= of_one and len(within.bits) <= len(over.bits)
        evaluated.clear()


def test_tiles_are_64_queries() -> None:
    assert TILE_Q == 64
    assert plan(causal() & strided(2) & first(9), np.arange(65), np.arange(65)).rows == 2


def test_the_plan_of_a_table_takes_less_than_four_bytes_a_pair() -> None:
    n = 2048
    bools = np.random.default_rng(0).random((n, n)) < 0.7
    made, peak = planned(table(bools), n)
    assert made.pairs == bools.sum()
    assert peak < 4 * n * n  # the copy is one byte a pair, the sums two
