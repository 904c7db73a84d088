"""The sums of a table, from which its tile answers come, and the reading of its pairs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtri.masks import EMPTY, FULL, PARTIAL, table
from lowtri.masks.array_masks import _pairs, _Sums
from lowtri.masks.plan import plan


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@given(nq=st.integers(1, 50), nk=st.integers(1, 50), seed=st.integers(0, 99))
def test_the_sum_at_each_corner(share: float, nq: int, nk: int, seed: int) -> None:
    bools = np.random.default_rng(seed).random((nq, nk)) < share
    expected = np.pad(bools.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    found = _Sums(bools)(np.arange(nq + 1)[:, None], np.arange(nk + 1)[None, :])
    np.testing.assert_array_equal(found, expected)


@given(n=st.integers(1, 40), seed=st.integers(0, 99), edges=st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_tile_answers_are_exact(n: int, seed: int, edges: list[int]) -> None:
    bools = np.random.default_rng(seed).random((n, n)) < 0.9
    (q0, q1), (k0, k1) = sorted(edges[:2]), sorted(edges[2:])
    inside = bools[q0:q1, k0:k1]
    if q1 > n or k1 > n:
        return
    answer = PARTIAL
    if not inside.any():
        answer = EMPTY
    elif inside.all():
        answer = FULL
    assert table(bools).tile(q0, q1, k0, k1) == answer


@pytest.mark.parametrize("order", ["forwards", "mixed"])
def test_tiles_of_pairs(order: str) -> None:
    rng = np.random.default_rng(0)
    bools = rng.random((90, 70)) < 0.5
    rows = np.stack([np.arange(i, i + 5) for i in (0, 40, 85)])
    columns = np.stack([np.arange(i, i + 7) for i in (63, 2, 30)])
    if order == "mixed":
        rows[1], columns[2] = rng.permutation(rows[1]), rng.permutation(columns[2])
    found = _pairs(bools, rows[:, None, :], columns[:, :, None])
    for i in range(3):
        for a, row in enumerate(rows[i]):
            for b, column in enumerate(columns[i]):
                assert found[i, b, a] == bools[row, column]


def test_the_plan_of_a_table_takes_less_than_four_bytes_a_pair() -> None:
    n = 2048
    bools = np.random.default_rng(0).random((n, n)) < 0.7
    tracemalloc.start()
    try:
        made = plan(table(bools), np.arange(n), np.arange(n))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.pairs == bools.sum()
    assert peak < 4 * n * n  # the copy is one byte a pair, the sums two
