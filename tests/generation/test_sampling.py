"""Temperature, top-k and top-p: their properties, and the errors of invalid options."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtri.errors import CallError
from lowtri.generation.generate import Sampling, keep_top_k, keep_top_p, next_token, sample, softmax

logits = st.lists(st.integers(-12, 12), min_size=1, max_size=12).map(lambda xs: np.array(xs) / 2.0)
few = settings(max_examples=60, deadline=None)


@few
@given(logits, st.integers(1, 14))
def test_top_k_keeps_exactly_the_k_greatest(x, k):
    kept = keep_top_k(x, k)
    alive = np.isfinite(kept)
    assert alive.sum() == min(k, len(x))
    assert np.array_equal(kept[alive], x[alive])
    if not alive.all():
        assert x[alive].min() >= x[~alive].max()
    assert np.array_equal(keep_top_k(kept, k), kept)


@few
@given(logits, st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_p(x, p):
    alive = np.isfinite(keep_top_p(x, p))
    mass = softmax(x)
    assert mass[alive].sum() >= p - 1e-9
    assert mass[alive].sum() - mass[alive].min() < p + 1e-9, "without its least likely token it no longer reaches p"
    if not alive.all():
        assert x[alive].min() >= x[~alive].max()


def test_top_p_of_exact_tenths_keeps_no_extra_token():
    assert np.isfinite(keep_top_p(np.log(np.full(10, 0.1)), 0.3)).sum() == 3


@few
@given(logits, st.integers(0, 2**32))
def test_a_sample_has_positive_probability(x, seed):
    p = softmax(keep_top_k(x, 2))
    assert p[sample(p, np.random.default_rng(seed))] > 0


def test_samples_follow_the_probabilities():
    rng = np.random.default_rng(0)
    p = np.array([0.1, 0.0, 0.6, 0.3])
    counts = np.bincount([sample(p, rng) for _ in range(20_000)], minlength=4) / 20_000
    assert np.abs(counts - p).max() < 0.015


def test_temperature_0_takes_the_first_maximum_and_low_temperatures_agree():
    x, rng = np.array([1.0, 3.0, 3.0, 0.0], np.float32), np.random.default_rng(1)
    assert next_token(x, Sampling(), rng) == 1
    assert all(next_token(np.array([1.0, 2.0, 4.0]), Sampling(0.01), rng) == 2 for _ in range(50))
    assert all(next_token(x, Sampling(5.0, top_k=1), rng) == 1 for _ in range(50))
    assert {next_token(x, Sampling(5.0, top_p=0.3), rng) for _ in range(50)} <= {1, 2}


def test_a_tiny_temperature_does_not_overflow():
    assert next_token(np.array([-1e4, 1e4, 3.0]), Sampling(1e-300), np.random.default_rng(0)) == 1


def test_hidden_tokens_are_never_chosen():
    x, rng = np.array([-np.inf, 0.0, -np.inf]), np.random.default_rng(0)
    assert {next_token(x, Sampling(2.0, top_k=2, top_p=0.9), rng) for _ in range(20)} == {1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, r"temperature is -1.0; expected a number, at least 0. Fix: 0 for greedy"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0; it counts tokens, at least 1. Fix: top_k=None keeps all"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a probability above 0, at most 1. Fix: top_p=None"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(CallError, match=words):
        Sampling(**options)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0.0, np.nan], "logits hold nan at token 1"),
        ([np.inf, 0.0], "logits hold inf at token 0"),
        ([-np.inf, -np.inf], r"logits hide every token \(all are -inf\)"),
    ],
)
def test_non_finite_logits_are_refused(row, words):
    with pytest.raises(CallError, match=words):
        next_token(np.array(row), Sampling(), np.random.default_rng(0))
