"""The laws of masks, for random masks: the table of pairs is the oracle."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_masks import SIZE, Case, cases, exact_cases, text_cases

from lowtri.masks import EMPTY, FULL, PARTIAL, POSITION_MAX, Mask, Tile, band, causal, full, mask, window
from lowtri.masks.tile import Interval, Truth

law = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
positions = list(range(-2, SIZE))
edges = st.one_of(st.integers(-2, SIZE), st.integers(0, SIZE))
rectangles = st.lists(st.tuples(edges, edges, edges, edges), min_size=1, max_size=12)


@law
@given(cases)
def test_arrays_of_positions_agree_with_single_pairs(case: Case) -> None:
    """Single masks, & | ~ -, batch rows and heads; negative positions hold no token."""
    q, k = np.array(positions)[:, None], np.array(positions)[None, :]
    np.testing.assert_array_equal(case.mask(q, k), case.table(positions, positions))


@law
@given(cases)
def test_dense_pairs_and_is_causal_agree_with_the_pairs(case: Case) -> None:
    table = case.table(range(SIZE), range(SIZE))
    np.testing.assert_array_equal(case.mask.dense(SIZE), table)
    np.testing.assert_array_equal(case.mask.pairs(SIZE), table.sum((-1, -2)))
    assert case.mask.is_causal(SIZE) == (not np.triu(table, 1).any())
    np.testing.assert_array_equal(case.mask.dense(3, SIZE), table[..., -3:, :])


@law
@given(cases)
def test_pairs_of_tokens_are_those_of_the_mask(case: Case) -> None:
    """Without the checks of positions; 0 and more."""
    q, k = np.arange(SIZE)[:, None], np.arange(SIZE)[None]
    single = case.mask.for_row(0, 0) if case.mask.batch else case.mask
    visible = single.visible_unchecked(q, k)
    assert visible.dtype == bool and visible.shape == (SIZE, SIZE)
    assert np.array_equal(visible, single(q, k))


@law
@given(cases, rectangles)
def test_tile_answers_are_never_wrong(case: Case, tiles: list[tuple[int, int, int, int]]) -> None:
    table = case.table(range(SIZE), range(SIZE))
    answers = case.mask.tile(*np.array(tiles).T)
    assert answers.dtype == np.int8 and answers.shape == (*case.mask.batch, len(tiles))
    for number, (q0, q1, k0, k1) in enumerate(tiles):
        answer = answers[..., number]
        inside = table[..., max(q0, 0) : max(q1, 0), max(k0, 0) : max(k1, 0)]
        assert not (inside.any((-1, -2)) & (answer == EMPTY)).any()
        assert not (~inside.all((-1, -2)) & (answer == FULL)).any()
        if min(q0, k0) < 0:
            assert (answer != FULL).all()  # the part before 0 holds no token
        if q1 <= q0 or k1 <= k0:
            assert (answer == EMPTY).all()


@law
@given(cases, rectangles)
def test_arrays_of_tiles_agree_with_single_tiles(case: Case, tiles: list[tuple[int, int, int, int]]) -> None:
    together = case.mask.tile(*np.array(tiles).T)
    for number, tile in enumerate(tiles):
        alone = case.mask.tile(*tile)
        np.testing.assert_array_equal(alone, together[..., number])
        assert isinstance(alone, Tile if case.mask.batch == () else np.ndarray)


@law
@given(
    cases.filter(lambda case: not case.ends),
    st.integers(0, SIZE),
    st.integers(0, SIZE),
    st.data(),
)
def test_answers_for_tiles_without_end_are_never_wrong(case: Case, q0: int, k0: int, data: st.DataObject) -> None:
    """A cache evicts a key if ``tile(t, POSITION_MAX, k, k + 1)`` is EMPTY."""
    k1 = data.draw(st.sampled_from([k0 + 1, k0 + 4, POSITION_MAX, float("inf")]))
    answer = np.asarray(case.mask.tile(q0, POSITION_MAX, k0, k1))
    np.testing.assert_array_equal(answer, case.mask.tile(np.array([q0]), float("inf"), k0, k1)[..., 0])
    late = case.table([*range(q0, SIZE + 8), 10**6, 10**6 + 7], range(k0, int(min(k1, SIZE + 8))))
    assert not (late.any((-1, -2)) & (answer == EMPTY)).any()
    assert not (~late.all((-1, -2)) & (answer == FULL)).any()


@law
@given(exact_cases, rectangles)
def test_formulas_lengths_keys_and_tables_answer_exactly(case: Case, tiles: list[tuple[int, int, int, int]]) -> None:
    table = case.table(range(SIZE), range(SIZE))
    for q0, q1, k0, k1 in tiles:
        q0, k0 = max(q0, 0), max(k0, 0)
        inside = table[..., q0 : max(q1, 0), k0 : max(k1, 0)]
        expected = np.where(inside.any((-1, -2)), np.where(inside.all((-1, -2)), FULL, PARTIAL), EMPTY)
        np.testing.assert_array_equal(case.mask.tile(q0, q1, k0, k1), expected)
        if q1 > q0 and k1 > k0:
            np.testing.assert_array_equal((~case.mask).tile(q0, q1, k0, k1), 2 - expected)


@law
@given(text_cases)
def test_the_repr_can_be_read(case: Case) -> None:
    copy = mask(repr(case.mask))
    assert copy == case.mask
    assert hash(copy) == hash(case.mask)


@law
@given(cases)
def test_masks_are_values(case: Case) -> None:
    copy = pickle.loads(pickle.dumps(case.mask))
    assert copy == case.mask
    assert hash(copy) == hash(case.mask)
    assert repr(copy) == repr(case.mask)
    assert case.mask != ~case.mask


@law
@given(cases)
def test_at_is_one_row_and_head_of_the_batch(case: Case) -> None:
    table = case.mask.dense(SIZE)
    for place in np.ndindex(case.mask.batch):
        one = case.mask.for_row(*place)
        assert one.batch == ()
        np.testing.assert_array_equal(one.dense(SIZE), table[place])


@law
@given(text_cases, text_cases)
def test_the_operators_are_set_operations(one: Case, two: Case) -> None:
    """De Morgan's and other laws, on tables; equality of masks is structural."""
    a, b = one.mask, two.mask

    def same(left: Mask, right: Mask) -> None:
        np.testing.assert_array_equal(*np.broadcast_arrays(left.dense(9), right.dense(9)))

    same(~(a & b), ~a | ~b)
    same(~(a | b), ~a & ~b)
    same(a - b, a & ~b)
    same(~~a, a)
    same(a & b, b & a)
    same((a & b) | (a - b), a | (a & b))


@pytest.mark.sweep
@settings(deadline=None, max_examples=4000, suppress_health_check=[HealthCheck.too_slow])
@given(cases, rectangles)
def test_sweep_tile_answers_never_lie(case: Case, tiles: list[tuple[int, int, int, int]]) -> None:
    test_tile_answers_are_never_wrong.hypothesis.inner_test(case, tiles)
    test_arrays_of_positions_agree_with_single_pairs.hypothesis.inner_test(case)


def test_the_laws_find_a_wrong_answer() -> None:
    """A mask that always answers EMPTY fails them."""

    class Wrong(type(causal())):
        def _sees(self, q, k):
            return Truth(False, False) if isinstance(q, Interval) else k <= q

    wrong = Case(Wrong(2**62, 0, "causal"), lambda q, k, *_: k <= q)
    with pytest.raises(AssertionError):
        test_tile_answers_are_never_wrong.hypothesis.inner_test(wrong, [(0, 4, 0, 2)])


def test_a_strip_says_of_each_small_tile_whether_it_is_full() -> None:
    ends = [(low, high) for low in range(6) for high in range(low, 6)]
    for strip in (causal(), window(1), window(3), band(0, 2), band(2, 1), full()):
        for (q0, q1), (k0, k1) in product(ends, ends):
            assert strip.full_unchecked(q0, q1, k0, k1) == (strip.tile(q0, q1 + 1, k0, k1 + 1) is Tile.FULL)
