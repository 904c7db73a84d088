"""The laws of masks, for random masks: the table asked pair by pair is the oracle."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtri.masks import EMPTY, END, FULL, PARTIAL, Mask, Tile, causal, mask
from random_masks import SIZE, Case, cases, exact_cases, text_cases

law = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
positions = list(range(-2, SIZE))
edges = st.one_of(st.integers(-2, SIZE), st.integers(0, SIZE))
rectangles = st.lists(st.tuples(edges, edges, edges, edges), min_size=1, max_size=12)


@law
@given(cases)
def test_a_mask_says_what_its_pairs_say(case: Case) -> None:
    """Atoms, & | ~ -, batch rows and heads; and a negative position is never there."""
    q, k = np.array(positions)[:, None], np.array(positions)[None, :]
    np.testing.assert_array_equal(case.mask(q, k), case.table(positions, positions))


@law
@given(cases)
def test_dense_pairs_and_causality_follow_from_the_pairs(case: Case) -> None:
    table = case.table(range(SIZE), range(SIZE))
    np.testing.assert_array_equal(case.mask.dense(SIZE), table)
    np.testing.assert_array_equal(case.mask.pairs(SIZE), table.sum((-1, -2)))
    assert case.mask.is_causal(SIZE) == (not np.triu(table, 1).any())
    np.testing.assert_array_equal(case.mask.dense(3, SIZE), table[..., -3:, :])


@law
@given(cases, rectangles)
def test_tile_answers_never_lie(case: Case, tiles: list[tuple[int, int, int, int]]) -> None:
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
def test_many_tiles_at_once_are_answered_as_one_by_one(case: Case, tiles: list[tuple[int, int, int, int]]) -> None:
    together = case.mask.tile(*np.array(tiles).T)
    for number, tile in enumerate(tiles):
        alone = case.mask.tile(*tile)
        np.testing.assert_array_equal(alone, together[..., number])
        assert isinstance(alone, Tile if case.mask.batch == () else np.ndarray)


@law
@given(
    cases.filter(lambda case: "table(" not in repr(case.mask)), st.integers(0, SIZE), st.integers(0, SIZE), st.data()
)
def test_the_end_of_time_does_not_lie_either(case: Case, q0: int, k0: int, data: st.DataObject) -> None:
    """``tile(t, END, k, k + 1)`` is what a cache asks before it drops a key."""
    k1 = data.draw(st.sampled_from([k0 + 1, k0 + 4, END, float("inf")]))
    answer = np.asarray(case.mask.tile(q0, END, k0, k1))
    np.testing.assert_array_equal(answer, case.mask.tile(np.array([q0]), float("inf"), k0, k1)[..., 0])
    late = case.table([*range(q0, SIZE + 8), 10**6, 10**6 + 7], range(k0, int(min(k1, SIZE + 8))))
    assert not (late.any((-1, -2)) & (answer == EMPTY)).any()
    assert not (~late.all((-1, -2)) & (answer == FULL)).any()


@law
@given(exact_cases, rectangles)
def test_atoms_lengths_keys_and_tables_answer_exactly(case: Case, tiles: list[tuple[int, int, int, int]]) -> None:
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
def test_the_printed_form_reads_back(case: Case) -> None:
    again = mask(repr(case.mask))
    assert again == case.mask
    assert hash(again) == hash(case.mask)


@law
@given(cases)
def test_masks_are_values(case: Case) -> None:
    again = pickle.loads(pickle.dumps(case.mask))
    assert again == case.mask
    assert hash(again) == hash(case.mask)
    assert repr(again) == repr(case.mask)
    assert case.mask != ~case.mask


@law
@given(cases)
def test_at_is_one_row_and_head_of_the_batch(case: Case) -> None:
    table = case.mask.dense(SIZE)
    for place in np.ndindex(case.mask.batch):
        one = case.mask.at(*place)
        assert one.batch == ()
        np.testing.assert_array_equal(one.dense(SIZE), table[place])


@law
@given(text_cases, text_cases)
def test_the_operators_are_set_operations(one: Case, two: Case) -> None:
    """De Morgan and friends, as tables; equality of masks itself is structural."""
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
    test_tile_answers_never_lie.hypothesis.inner_test(case, tiles)
    test_a_mask_says_what_its_pairs_say.hypothesis.inner_test(case)


def test_the_laws_would_notice_a_lie() -> None:
    """A mask that calls everything EMPTY breaks them: the laws above can fail."""

    class Liar(type(causal())):
        def _tile(self, q0, q1, k0, k1):
            return 0 * (q0 + q1)

    liar = Case(Liar(2**62, 0, "causal"), lambda q, k, *_: k <= q)
    with pytest.raises(AssertionError):
        test_tile_answers_never_lie.hypothesis.inner_test(liar, [(0, 4, 0, 2)])
