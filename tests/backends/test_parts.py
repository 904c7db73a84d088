"""The backward on many threads: parts of the queries, rounds, their memory, and gradients that threads do not change."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import EPS, draw, on_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtri
from lowtri.backends.cpu import forward, launch, parts
from lowtri.backends.cpu.parts import Cut, Memory, Rows, choose_cut, folded, in_blocks, phase_of, table, time_of
from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels.abi import KEYS
from lowtri.masks.plan import Plan, plan, row_of_runs
from lowtri.masks.tile import FULL

MASKS = (
    "full",
    "causal",
    "causal & window(100)",
    "causal & (window(64) | first(10))",
    "causal & documents(lengths=[300, 700])",
)


def plan_of(mask: Any, nq: int, nk: int) -> Plan:
    q, k = np.arange(nk - nq, nk)[None], np.arange(nk)[None]
    return plan(lowtri.mask(mask), q, k, tile_k=KEYS)


@settings(max_examples=60, deadline=None)
@given(
    mask=st.sampled_from([*MASKS[:4], "strided(7)"]),
    nq=st.integers(1, 900),
    nk=st.integers(1, 900),
    count=st.integers(1, 12),
    group=st.integers(1, 3),
    folds=st.booleans(),
    most_tiles=st.integers(0, 30),
)
def test_each_tile_of_pairs_is_computed_once_and_added_alone(
    mask: str, nq: int, nk: int, count: int, group: int, folds: bool, most_tiles: int
) -> None:
    of = plan_of(mask, min(nq, nk), nk)
    rows = Rows(of, group)
    count = min(count, of.rows * group)
    costs = rows.costs(1)[:, 0]
    cut = parts.with_fewest_rounds(rows, *(folded(len(costs), count) if folds else in_blocks(costs, count)), most_tiles)
    if cut is None:  # blocks of no row
        assert not folds
        return
    assert sorted(cut.order.tolist()) == list(range(of.rows * group))
    assert cut.parts == count and len(cut.copies) * cut.rounds == count
    assert sum(last - first for first, last in cut.copies[1:]) <= most_tiles
    for turn in range(cut.rounds):
        phases = [(part // cut.rounds, (part + turn) % cut.rounds) for part in range(count)]
        assert len(set(phases)) == count, "two parts add to the same keys of a copy at once"
    for (first, last, *_), row in zip(of.runs.tolist(), row_of_runs(of).tolist(), strict=True):
        for part in range(count):
            if row in cut.order[cut.starts[part] : cut.starts[part + 1]] % of.rows:
                low, high = cut.copies[part // cut.rounds]
                assert low <= first and last <= high
    records, places = table(cut, of.nk, 2, (3, 4))
    tiles = [min(KEYS * high, of.nk) - KEYS * low for low, high in cut.copies[1:]]
    assert places[-1][0] == 2 * 7 * sum(tiles) and len(records) == count


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MASKS[:4]), st.integers(1, 900), st.integers(1, 20))
def test_phases_share_out_all_tiles(mask: str, n: int, phases: int) -> None:
    of = plan_of(mask, n, n)
    rows = Rows(of, 2)
    expected = np.zeros((of.rows, phases))
    for (first, last, kind, _), row in zip(of.runs.tolist(), row_of_runs(of).tolist(), strict=True):
        cost = 1 if kind == FULL else parts.PARTIAL_COST
        np.add.at(expected[row], phase_of(np.arange(first, last), phases), cost)
    assert np.allclose(rows.costs(phases), np.tile(expected, (2, 1)) + parts.ROW_COST)


@pytest.mark.parametrize("mask", MASKS[:2])
def test_folded_parts_cost_the_same_in_each_round(mask: str) -> None:
    """As many rows and keys as a round has parts would do in the best case, within a tenth."""
    rows = Rows(plan_of(mask, 4096, 4096), 1)
    cut = parts.with_fewest_rounds(rows, *folded(64, 8), 43)
    assert cut is not None and cut.rounds == 4
    assert time_of(rows, cut) <= 1.1 * rows.costs(1).sum() / 8


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 40])
@pytest.mark.parametrize("threads", [1, 2, 7, 8, 32, 64, 128])
def test_no_more_parts_than_balance_needs_nor_memory_allows(threads: int, heads: int) -> None:
    rows, size = Rows(plan_of("causal", 4096, 4096), 1), 64 * 4
    memory = Memory(whole=heads * 4096 * 3 * size, key=heads * 2 * size, thread=200_000)
    cut = choose_cut(rows, heads, threads, memory)
    if heads % threads == 0:
        assert cut.parts == 1
    copied = sum(last - first for first, last in cut.copies[1:]) * KEYS * memory.key
    most = 3 * (memory.whole + memory.thread)
    assert memory.whole + copied + min(threads, heads * cut.parts) * memory.thread <= most
    if heads == 8 and threads <= 64:
        ideal = heads * rows.costs(1).sum() / threads
        assert ideal / (-(-heads * cut.parts // threads) * time_of(rows, cut)) >= parts.BUSY


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("bias_shape", [(1, 1, 1, 1000), (1, 4, 1000, 1000)])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_on_many_threads(mask: str, bias_shape: tuple[int, ...], dtype: str) -> None:
    """They are those of one thread but for rounding, and the same each time."""
    q, k, v = (x.requires_grad_() for x in draw(b=1, hq=4, hkv=2, nq=1000, nk=1000, d=40, dv=24, dtype=dtype))
    bias = torch.randn(bias_shape, requires_grad=True, dtype=torch.promote_types(q.dtype, torch.float32))
    sinks = torch.zeros(4, requires_grad=True, dtype=bias.dtype)
    leaves, d_output = (q, k, v, bias, sinks), draw(b=1, hq=4, nq=1000, d=24, seed=1, dtype=dtype)[0]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = lowtri.attention(q, k, v, mask, bias=bias, sinks=sinks, engine="cpu")
        return torch.autograd.grad(out, leaves, d_output)

    results = on_threads((1, 3, 16, 64, 64), gradients)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert (one - two).abs().max() <= 32 * EPS[dtype] * one.abs().max()
    assert all(torch.equal(one, two) for one, two in zip(results[3], results[4], strict=True))


@pytest.mark.parametrize("most_tiles", [1000, 9, 0], ids=["one round", "some rounds", "as many as parts"])
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_every_cut(dtype: str, folds: bool, most_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one part but for rounding, with biases of keys, pairs and distances."""
    q, k, v = (x.requires_grad_() for x in draw(b=2, hq=4, hkv=2, nq=330, nk=500, d=40, dv=24, dtype=dtype))
    numbers = torch.promote_types(q.dtype, torch.float32)
    d_output = draw(b=2, hq=4, nq=330, d=24, seed=1, dtype=dtype)[0]
    slopes = torch.linspace(0.01, 0.1, 4, dtype=numbers, requires_grad=True)
    distances = torch.randn(4, 500, dtype=numbers, requires_grad=True)
    dense = [torch.randn(shape, dtype=numbers, requires_grad=True) for shape in ((2, 1, 1, 500), (1, 4, 330, 500))]
    biases = [(x, x) for x in dense]
    biases += [(slopes, lowtri.alibi(slopes)), (distances, lowtri.distance_bias(distances))]
    cuts: list[Cut] = []

    def chosen(rows: Rows, *rest: Any) -> Cut:
        costs = rows.costs(1)[:, 0]
        cut = parts.with_fewest_rounds(rows, *(folded(len(costs), 6) if folds else in_blocks(costs, 6)), most_tiles)
        assert cut is not None
        cuts.append(cut)
        return cut

    for mask in ("causal", "causal & window(100)", "causal & strided(7)"):
        for leaf, bias in biases:
            results = []
            for choose in (lambda rows, *rest: parts.uncut(rows), chosen):
                monkeypatch.setattr(forward, "choose_cut", choose)
                PREPARED.clear()
                out = lowtri.attention(q, k, v, mask, bias=bias, softcap=9.0, engine="cpu")
                results.append(torch.autograd.grad(out, (q, k, v, leaf), d_output))
            for one, two in zip(*results, strict=True):
                assert (one - two).abs().max() <= 32 * EPS[dtype] * one.abs().max(), mask
    assert {cut.rounds for cut in cuts} <= ({1} if most_tiles == 1000 else {2, 3, 6} if most_tiles else {6})
    PREPARED.clear()


def test_the_memory_of_64_threads_is_at_most_three_times_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the arrays and the scratch memory that the backward asks for: 8 heads of 4,096 tokens."""
    asked: list[int] = []
    new, memory = launch.KernelArrays.new, launch._Memory

    def counted(self: Any, shape: Any, *rest: Any) -> Any:
        make = new(self, shape, *rest)

        def made(like: Any) -> Any:
            x = make(like)
            asked.append(x.nbytes)
            return x

        return made

    def counted_memory(size: int) -> Any:
        asked.append(size)
        return memory(size)

    monkeypatch.setattr(launch.KernelArrays, "new", counted)
    monkeypatch.setattr(launch, "_Memory", counted_memory)
    PREPARED.clear()
    q, k, v = (torch.randn(1, 8, 4096, 64, requires_grad=True) for _ in range(3))

    def bytes_asked(mask: str) -> int:
        out = lowtri.attention(q, k, v, mask, engine="cpu")
        launch._pool.clear()
        asked.clear()
        torch.autograd.grad(out, (q, k, v), q.detach())
        return sum(asked)

    for mask in ("causal", "causal & window(256)", "causal & documents(lengths=[512, 512, 1024, 2048])"):
        sizes = on_threads((1, 64), partial(bytes_asked, mask))
        assert sizes[0] > 24 * 2**20 and sizes[1] <= 3 * sizes[0], (mask, sizes)
