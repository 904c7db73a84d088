"""The generator of dropout: its definition in NumPy and in torch, and its statistics."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowtri.ops import dropout

N = 512


def dropped(seed: int, p: float, shape: tuple[int, int] = (1, 1), n: int = N, start: int = 0) -> NDArray[np.float64]:
    """Which of n x n pairs are dropped, minus p, over its spread: (B, H, n, n) of mean 0 and variance 1."""
    positions = np.arange(start, start + n)[None]
    kept = dropout.kept(seed, p, shape, positions, positions)
    return (np.logical_not(kept) - p) / np.sqrt(p * (1 - p))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_the_rate_of_all_pairs_of_rows_and_of_columns(p: float) -> None:
    x = np.concatenate([dropped(seed, p, (2, 4)) for seed in range(4)])
    assert abs(x.sum()) < 4.5 * np.sqrt(x.size)
    for axis in (2, 3):  # the mean of each column, and of each row
        sums = x.sum(axis) / np.sqrt(N)
        assert abs(sums.std() - 1) < 0.03 and np.abs(sums).max() < 7


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_any_two_rows_and_any_two_columns_are_independent(p: float) -> None:
    for seed in range(6):
        x = dropped(seed, p)[0, 0]
        for rows in (x, x.T):
            products = (rows @ rows.T / np.sqrt(N))[np.triu_indices(N, 1)]
            assert abs(products.mean()) < 4.5 / np.sqrt(len(products))
            assert abs(products.std() - 1) < 0.015 and np.abs(products).max() < 10
            # Corners of rectangles: the squares of these products.
            if p == 0.5:
                assert abs((products**2).mean() - 1) < 5 * np.sqrt(2 / len(products))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8, 16, 32, 64, 96, 256])
def test_neighbours_are_independent(step: int) -> None:
    x = np.concatenate([dropped(seed, 0.2, (1, 8)) for seed in (1, 2)])
    along_keys, along_queries = x[..., :-step] * x[..., step:], x[..., :-step, :] * x[..., step:, :]
    diagonal = x[..., :-step, :-step] * x[..., step:, step:]
    for products in (along_keys, along_queries, diagonal):
        assert abs(products.sum()) < 4.5 * np.sqrt(products.size)


def test_seeds_rows_heads_and_far_positions_are_independent() -> None:
    seeds = [0, 1, 2, 3, 2**32, 2**62, 2**63 - 1, dropout.STEP >> 1]
    planes = [plane.ravel() for seed in seeds for plane in dropped(seed, 0.3, (3, 3), 128).reshape(9, -1)]
    planes += [dropped(1, 0.3, n=128, start=2**40).ravel(), dropped(1, 0.3, n=128, start=2**61).ravel()]
    for one, two in combinations(planes, 2):
        assert abs(one @ two) < 5.5 * np.sqrt(one.size)


def test_draws_are_uniform() -> None:
    positions = np.arange(1024)[None]
    x = dropout.draws(dropout.query_words(5, 1, positions, 1), dropout.key_words(positions)).ravel()
    for shift in (0, 8, 16, 24):  # each byte
        counts = np.bincount((x >> np.uint32(shift)) & np.uint32(255), minlength=256)
        assert ((counts - x.size / 256) ** 2 / (x.size / 256)).sum() < 255 + 5 * np.sqrt(2 * 255)


POSITIONS = st.lists(st.integers(-1, 2**61), min_size=1, max_size=9)


@given(st.integers(0, 2**63 - 2), st.sampled_from([0.0, 1e-12, 0.1, 0.5, 1.0]), POSITIONS, POSITIONS)
def test_torch_draws_the_same(seed: int, p: float, q: list[int], k: list[int]) -> None:
    q_positions, k_positions = np.array([q, q[::-1]]), np.array([k])
    expected = dropout.kept(seed, p, (2, 3), q_positions, k_positions)
    found = dropout.kept_tensor(torch.tensor(seed), p, (2, 3), q_positions, k_positions)
    assert np.array_equal(np.broadcast_to(expected, (2, 3, len(q), len(k))), found.numpy())
    assert expected.all() if p < 1e-9 else p < 1 or not expected.any()


@given(st.integers(0, 2**63 - 2), POSITIONS, POSITIONS)
def test_a_draw_depends_on_the_positions_alone(seed: int, q: list[int], k: list[int]) -> None:
    """Any queries and keys, in any order, have the draws that they have among others."""
    q_positions, k_positions = np.array([q]), np.array([k])
    rows, columns = np.array([*range(len(q))][::2]), np.array([*range(len(k))][::-1])
    whole = dropout.kept(seed, 0.5, (1, 2), q_positions, k_positions)
    part = dropout.kept(seed, 0.5, (1, 2), q_positions[:, rows], k_positions[:, columns])
    assert np.array_equal(part, whole[:, :, rows][..., columns])


KEYS = ["0xe220a839", "0x6e789e6a", "0x6c45d18", "0xf88bb8a8"]
QUERIES = ["0x2b00ded9d5a6f2ec", "0xd691b0537e9a7ab", "0x3b7e3abd20179662", "0x4f12c571dbcc906f"]
DRAWS = ["0x67270ec3", "0x906c9d24", "0x4d3a2a0f", "0x6f21df8f"]


def test_the_numbers_stay_what_they_are() -> None:
    """Known answers: a change of the generator changes every training run that is repeated from its seed."""
    positions = np.arange(4)[None]
    of_queries, of_keys = dropout.query_words(7, 2, positions, 1), dropout.key_words(positions)
    assert [hex(x) for x in of_keys[0]] == KEYS
    assert [hex(x) for x in of_queries[0, 1]] == QUERIES
    assert [hex(x) for x in dropout.draws(of_queries, of_keys)[0, 1, 3]] == DRAWS


def test_seeds_come_from_the_generators_that_users_seed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    first = [dropout.new_seed(is_numpy=False), dropout.new_seed(is_numpy=True)]
    others = [dropout.new_seed(is_numpy=False), dropout.new_seed(is_numpy=True)]
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    assert first == [dropout.new_seed(is_numpy=False), dropout.new_seed(is_numpy=True)]
    assert all(one != two for one, two in zip(first, others, strict=True))
