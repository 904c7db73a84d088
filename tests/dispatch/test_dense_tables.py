"""Tables of bools and numbers read as masks: every pair, the bias that is left, what is kept, and how much memory it takes."""

from __future__ import annotations

import math
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import lowtri
from lowtri.dispatch import dense_tables
from lowtri.dispatch.dense_tables import ReadTable, lowest_number, read_bools, read_numbers
from lowtri.masks import Mask, causal, full, window
from lowtri.masks.array_masks import Keys, Table

LOWEST = float(np.finfo(np.float32).min)


def pairs_of(mask: Mask, nq: int, nk: int) -> Any:
    """(B|1, H|1, nq, nk), rows at the last queries."""
    q, k = np.arange(nq) + max(nk - nq, 0), np.arange(nk)
    pairs = np.asarray(mask(q[:, None], k[None]))
    return pairs.reshape(*(*mask.batch, 1, 1)[:2], nq, nk)


def dense(table: Any, nq: int, nk: int) -> Any:
    return np.broadcast_to(table, (*table.shape[:2], nq, nk))


sizes = st.integers(1, 20)


@st.composite
def tables(draw: Any) -> tuple[Any, int, int]:
    """Bools (B|1, H|1, Nq|1, Nk|1) of many kinds, and the numbers of queries and keys."""
    nq, nk = draw(sizes), draw(sizes)
    shape = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, nq])), nk
    source = np.random.default_rng(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["random", "band", "keys", "ones", "none"]))
    if kind == "random":
        return source.random(shape) < draw(st.sampled_from([0.1, 0.5, 0.95])), nq, nk
    ahead = np.arange(nk) - np.arange(nk - nq, nk)[:, None]
    if kind == "band":
        table = (ahead <= draw(st.integers(-2, 3))) & (ahead >= -draw(st.integers(-1, 20)))
        return np.broadcast_to(table, (shape[0], 1, nq, nk)), nq, nk
    if kind == "keys":
        return np.broadcast_to(source.random((shape[0], 1, 1, nk)) < 0.5, (shape[0], 1, nq, nk)), nq, nk
    return np.full(shape, kind == "ones"), nq, nk


@given(tables(), st.booleans(), st.booleans())
def test_bools_are_read_pair_by_pair(case: tuple[Any, int, int], true_hides: bool, as_tensor: bool) -> None:
    table, nq, nk = case
    given_table = table
    if as_tensor:
        given_table = torch.from_numpy(table.copy())
    mask = read_bools(given_table, nq, nk, true_hides)
    assert mask is not None
    expected = dense(~table if true_hides else table, nq, nk)
    assert np.array_equal(*np.broadcast_arrays(pairs_of(mask, nq, nk), expected))


@given(tables(), st.sampled_from([-math.inf, LOWEST]), st.booleans(), st.sampled_from(["f2", "f4", "f8", "bf16"]))
def test_numbers_are_read_pair_by_pair(case: tuple[Any, int, int], hidden: float, adds: bool, dtype: str) -> None:
    table, nq, nk = case
    numbers: Any
    if dtype == "bf16":
        hidden = hidden if hidden == -math.inf else torch.finfo(torch.bfloat16).min
        numbers = torch.from_numpy(np.where(table, float(adds), hidden)).bfloat16()
    else:
        hidden = hidden if hidden == -math.inf else float(np.finfo(dtype).min)
        numbers = np.where(table, float(adds), hidden).astype(dtype)
    read = read_numbers(numbers, nq, nk, lowest_number(numbers.dtype), always=True)
    visible, alone = dense(table, nq, nk), not table.any(axis=-1).all() and hidden > -math.inf
    if alone:  # where every key has the lowest number, all are visible
        visible = visible | ~visible.any(axis=-1, keepdims=True)
    assert read is not None
    assert np.array_equal(*np.broadcast_arrays(pairs_of(read.mask, nq, nk), visible))
    assert read.is_bias == (alone or (adds and bool(table.any())))


def test_the_simplest_mask_is_found() -> None:
    n = 40
    band = np.tri(n, dtype=bool) & ~np.tri(n, k=-6, dtype=bool)
    assert read_bools(np.tri(n, dtype=bool)[None, None], n, n) == causal()
    assert read_bools(np.tri(7, n, n - 7, dtype=bool)[None, None], 7, n) == causal()
    assert read_bools(np.broadcast_to(band, (3, 4, n, n)), n, n) == window(6)
    assert read_bools(np.repeat(band[None, None], 3, 0), n, n) == window(6)
    assert read_bools(np.ones((2, 1, n, n), bool), n, n) == full()
    both = band | band.T
    assert repr(read_bools(both[None, None], n, n)) == "band(5, 5)"
    both[20, 20] = False
    assert isinstance(read_bools(both[None, None], n, n), Table)
    assert isinstance(read_bools(np.arange(n)[None, None, None] < 30, n, n), Keys)
    assert isinstance(read_bools(np.repeat(np.arange(n)[None, None, None] < 30, n, 2), n, n), Keys)
    assert isinstance(read_bools(np.tri(n, 7, dtype=bool)[None, None], n, 7), Table)  # more queries than keys
    hidden_row = np.tri(n, k=-1, dtype=bool)
    assert isinstance(read_bools(hidden_row[None, None], n, n), Table)


def test_which_numbers_stay_a_bias() -> None:
    """Size and content decide, so that the same call takes the same way the first time and every other time."""
    source = np.random.default_rng(0)

    def numbers(n: int) -> Any:
        return np.where(source.random((n, n)) < 0.5, 0, -np.inf).astype(np.float32)[None, None]

    small, large = numbers(127), numbers(128)
    for _ in range(2):
        assert read_numbers(small, 127, 127) is None
        assert isinstance(read_numbers(small, 127, 127, always=True), ReadTable)
        assert isinstance(read_numbers(large, 128, 128), ReadTable)
        assert read_numbers(large[:, :, :15], 15, 128) is None  # few queries
    triangle = np.log(np.tri(20, dtype=np.float32), where=np.tri(20, dtype=bool), out=np.full((20, 20), -np.inf, "f4"))
    assert read_numbers(triangle[None, None], 20, 20) == ReadTable(causal(), False)
    assert read_numbers(triangle[None, None] + 1, 20, 20) == ReadTable(causal(), True)
    assert read_numbers(np.zeros((1, 1, 20, 20)), 20, 20) == ReadTable(full(), False)
    pure = source.normal(size=(1, 2, 200, 200))
    assert read_numbers(pure, 200, 200) is None
    assert read_numbers(pure, 200, 200, always=True) == ReadTable(full(), True)
    pure[0, 0, 7, 7] = np.nan  # hides nothing
    assert read_numbers(pure, 200, 200) is None


def test_a_learned_bias_stays_one() -> None:
    numbers = torch.zeros(1, 1, 20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf).requires_grad_()
    assert read_numbers(numbers, 20, 20) == ReadTable(causal(), True)


def test_a_row_of_lowest_numbers_alone_keeps_its_keys() -> None:
    numbers = np.zeros((1, 1, 20, 20), np.float32)
    numbers[0, 0, 3] = LOWEST
    numbers[0, 0, 3, :5] = -np.inf
    numbers[0, 0, 4] = -np.inf
    numbers[0, 0, 5, 7:] = LOWEST
    read = read_numbers(numbers, 20, 20, LOWEST, always=True)
    assert read is not None and read.is_bias
    counts = pairs_of(read.mask, 20, 20)[0, 0].sum(1)
    assert counts[3:7].tolist() == [15, 0, 7, 20]


def test_equal_tables_are_one_mask_of_its_own_memory() -> None:
    source = torch.Generator().manual_seed(0)
    table = torch.rand(1, 1, 50, 50, generator=source) < 0.5
    numbers = torch.zeros(table.shape).masked_fill(~table, -math.inf)
    mask = read_bools(table, 50, 50)
    read = read_numbers(numbers, 50, 50, always=True)
    assert mask is read_bools(table.clone(), 50, 50) is read_bools(~table, 50, 50, True)
    assert read is not None and read.mask is mask and mask is not None
    before = pairs_of(mask, 50, 50).sum()
    table.numpy()[:] = False
    assert pairs_of(mask, 50, 50).sum() == before > 0


def test_few_tables_are_kept() -> None:
    source = np.random.default_rng(0)
    for _ in range(40):
        read_bools(source.random((1, 1, 9, 9)) < 0.5, 9, 9)
    assert len(dense_tables._kept) == 16


def test_kept_tables_have_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_tables, "_kept", ())
    monkeypatch.setattr(dense_tables, "_MOST_KEPT_BITS", 8 * 9 * 2 * 3)
    source = np.random.default_rng(0)
    for _ in range(9):
        read_bools(source.random((1, 1, 9, 9)) < 0.5, 9, 9)
    assert len(dense_tables._kept) == 3


def test_repeated_entries_are_not_read() -> None:
    """A mask of keys that was expanded to all rows, heads and queries: its 4,096 numbers, and not 4 billion."""
    keys = torch.zeros(2, 1, 1, 2048)
    keys[0, ..., 1500:] = -math.inf
    tracemalloc.start()
    for x in (keys.expand(2, 512, 2048, 2048), (keys == 0).expand(2, 512, 2048, 2048)):
        read = read_bools(x, 2048, 2048) if x.dtype == torch.bool else read_numbers(x, 2048, 2048)
        assert isinstance(read if isinstance(read, Mask) else getattr(read, "mask", None), Keys)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_memory_of_reading_a_table() -> None:
    """A seen table takes its bits; a new one takes a few bytes a pair."""
    numbers = np.where(np.random.default_rng(0).random((1, 1, 1024, 1024)) < 0.5, 0, -np.inf).astype(np.float32)
    for limit in (6 * 2**20, 2**20):
        tracemalloc.start()
        read_numbers(numbers, 1024, 1024)
        assert tracemalloc.get_traced_memory()[1] < limit
        tracemalloc.stop()


def test_numbers_inside_of_a_transform_or_a_trace_stay_a_bias() -> None:
    """A trace would keep the mask of its first call for all others."""
    q = torch.randn(1, 2, 20, 8)
    one, other = torch.zeros(20, 20), torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf)

    def attend(mask: Any) -> Any:
        return lowtri.scaled_dot_product_attention(q, q, q, mask)

    torch.testing.assert_close(torch.vmap(attend)(torch.stack([one, other])), torch.stack([attend(one), attend(other)]))
    traced = make_fx(attend)(one)
    torch.testing.assert_close(traced(other), attend(other))


def test_threads_read_different_tables() -> None:
    source = np.random.default_rng(0)
    tables = [source.random((1, 1, 30, 30)) < 0.5 for _ in range(30)]
    wrong: list[int] = []

    def read(start: int) -> None:
        for i in range(300):
            table = tables[(start + i) % 30]
            mask = read_bools(table, 30, 30)
            if mask is None or not np.array_equal(pairs_of(mask, 30, 30), table):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(7 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
