"""Plans of shards: what they promise, for any mask; their balance and their traffic; what they cost."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_cases import LONGEST, shard_masks

import lowtri
from lowtri.errors import CallError, MaskError
from lowtri.masks import Mask, causal, documents, first, full, keys, where, window
from lowtri.parallel import ShardPlan, plan_shards
from lowtri.parallel.planning import candidate_layouts


def seen_blocks(mask: Mask, plan: ShardPlan) -> np.ndarray:
    """(blocks, blocks), from the table of all pairs: whether any query of a block sees any key of another."""
    table = mask.dense(plan.n).reshape(-1, plan.n, plan.n).any(axis=0)
    edges = np.arange(0, plan.n, plan.block)
    return np.logical_or.reduceat(np.logical_or.reduceat(table, edges, axis=0), edges, axis=1)


def check(plan: ShardPlan) -> None:
    held = [plan.positions(rank) for rank in range(plan.ranks)]
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(plan.n))
    assert all((np.diff(one) > 0).all() for one in held)
    assert plan.tokens.tolist() == [len(one) for one in held]
    pairs, received = np.zeros(plan.ranks, np.int64), np.zeros(plan.ranks, np.int64)
    for index, mask in enumerate(plan.masks):
        table, blocks = mask.dense(plan.n), seen_blocks(mask, plan)
        for rank, one in enumerate(held):
            pairs[rank] += table[..., one, :].sum()
            needed = np.flatnonzero(blocks[plan.owner == rank].any(axis=0))
            expected = np.concatenate([np.arange(b * plan.block, (b + 1) * plan.block) for b in [*needed, len(blocks)]])
            np.testing.assert_array_equal(plan.key_positions(rank, index), expected[expected < plan.n])
            others = np.arange(plan.n) if plan.gathers[index] else plan.key_positions(rank, index)
            others = np.setdiff1d(others, one)
            senders = plan.owner[others // plan.block]
            assert plan.received_from(rank, index).tolist() == np.bincount(senders, minlength=plan.ranks).tolist()
            received[rank] += len(others)
    assert plan.pairs.tolist() == pairs.tolist()
    assert plan.received.tolist() == received.tolist()
    np.testing.assert_allclose(plan.imbalance, pairs.max() / pairs.mean() if pairs.any() else 1)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(shard_masks, min_size=1, max_size=2), st.data())
def test_a_plan_keeps_its_promises_for_any_mask(masks: list[Mask], data: st.DataObject) -> None:
    n, ranks = data.draw(st.integers(1, LONGEST), "n"), data.draw(st.integers(1, 9), "ranks")
    block = data.draw(st.sampled_from([None, 64, 128, 192]), "block")
    plan = plan_shards(masks, n, ranks, block=block)
    check(plan)
    assert plan.tokens.max() - plan.tokens.min() <= plan.block
    assert plan.ways[plan.way].imbalance == pytest.approx(plan.imbalance)
    again = plan_shards(masks, n, ranks, block=block)
    assert again.digest == plan.digest
    assert len(plan.draw().splitlines()) == 1 + ranks


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 40), st.integers(0, 99))
def test_every_way_gives_all_ranks_equally_many_tokens(n: int, ranks: int, seed: int) -> None:
    sizes = np.minimum(64, n - np.arange(0, n, 64))
    weights = np.random.default_rng(seed).integers(0, 1000, len(sizes))
    ways = candidate_layouts(weights, ranks, last_is_short=n % 64 > 0)
    assert "contiguous" in ways
    for name, owner in ways.items():
        tokens = np.bincount(owner, sizes, ranks)
        assert tokens.max() - tokens.min() <= 64, name


def test_given_owners() -> None:
    owner = np.array([2, 2, 0, 2, 1, 1, 2, 2, 2, 2, 0])
    plan = plan_shards(causal() & window(150), 11 * 64 - 5, 3, block=64, owner=owner)
    check(plan)
    assert plan.way == "given" and plan.owner.tolist() == owner.tolist()
    assert plan.positions(0).tolist() == [*range(128, 192), *range(640, 699)]


def test_causal_is_dealt_as_head_and_tail() -> None:
    plan = plan_shards("causal", 1024, 4, block=64)
    assert plan.owner.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]
    assert plan.imbalance == 1 and plan.gathers == (True,)
    assert plan.received.tolist() == [768] * 4


def test_two_ranks_fetch_a_window() -> None:
    """Half of all keys are a rank's own: they do not make it an all-gather."""
    plan = plan_shards("causal & window(256)", 4096, 2)
    assert plan.gathers == (False,) and plan.received.tolist() == [0, 256]
    assert plan_shards("causal", 4096, 2).gathers == (True,)


def test_layers_with_different_masks() -> None:
    local, whole = causal() & window(100), causal()
    plan = plan_shards([local, whole, local, whole], 2048, 4)
    assert plan.masks == (local, whole) and plan.gathers == (False, True)
    assert plan.index(causal() & window(100)) == 0 and plan.index(whole) == 1
    check(plan)
    with pytest.raises(CallError, match=r"(?s)mask is None.*plan_shards\(\[...\], n, ranks\)"):
        plan.index(None)
    assert plan_shards(local, 2048, 4).index(None) == 0


def test_a_batch_counts_with_all_its_rows() -> None:
    ids = np.stack([np.repeat([0, 1], [900, 124]), np.repeat([0, 1], [100, 924])])
    mask = causal() & documents(ids)
    plan = plan_shards(mask, 1024, 4)
    assert plan.pairs.sum() == mask.pairs(1024).sum()
    check(plan)


def test_more_ranks_than_blocks() -> None:
    plan = plan_shards(causal(), 100, 4)
    check(plan)
    assert sorted(plan.tokens.tolist()) == [0, 0, 36, 64]
    assert [len(plan.key_positions(rank)) for rank in range(4) if not plan.tokens[rank]] == [0, 0]


# Balance and traffic. Imbalance: the most visible pairs of a rank over the mean.

N = 65_536


@pytest.mark.parametrize("ranks", [8, 32, 256])
@pytest.mark.parametrize(
    "mask",
    [causal(), causal() & window(4096), window(1000), causal() & (window(4096) | first(64)), causal() | first(N // 4)],
    ids=repr,
)
def test_imbalance(mask: Mask, ranks: int) -> None:
    plan = plan_shards(mask, N, ranks)
    assert plan.imbalance <= 1.06
    if "window" in repr(mask):
        assert plan.received.max() < 0.1 * N * (1 - 1 / ranks), "under a tenth of what an all-gather sends"


def document_lengths(n: int, seed: int) -> list[int]:
    """Lognormal, about 4,200 tokens on average, a few very long ones."""
    random, lengths = np.random.default_rng(seed), []
    while sum(lengths) < n:
        lengths.append(int(min(max(16, random.lognormal(7.5, 1.3)), n - sum(lengths))))
    return lengths


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_imbalance_of_documents(seed: int) -> None:
    mask = causal() & documents(lengths=document_lengths(N, seed))
    for ranks in (8, 32, 64):  # at more ranks a single block of 64 tokens of a long document may exceed the mean
        assert plan_shards(mask, N, ranks).imbalance <= 1.15
        assert plan_shards(mask, N, ranks, token_cost=0).imbalance <= 1.15


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.sweep), pytest.param(2, marks=pytest.mark.sweep)]
)
def test_documents_on_many_ranks_receive_little_more_than_the_longest(seed: int) -> None:
    lengths = document_lengths(2**20, seed)
    plan = plan_shards(causal() & documents(lengths=lengths), 2**20, 256)
    assert plan.imbalance <= 1.15
    assert plan.received.max() <= 1.5 * max(lengths)


def test_two_streams() -> None:
    """Many ranks share one long document: each takes a stretch of it, and short documents to fill up."""
    plan = plan_shards(causal() & documents(lengths=[2048] + [64] * 32), 4096, 4, block=64, way="two streams")
    held = [(np.flatnonzero(plan.owner == rank) < 32) for rank in range(4)]
    assert [int(one.sum()) for one in held] == [16, 7, 5, 4]  # of 32 blocks; fewer where they have more pairs
    check(plan)
    assert plan.imbalance < 1.15 and plan.received.max() < 2048
    with pytest.raises(CallError, match=r"way is 'three streams', but the ways are contiguous, .*two streams, "):
        plan_shards("causal", 4096, 4, way="three streams")


def test_the_price_of_a_token_decides_between_balance_and_traffic() -> None:
    mask = causal() & documents(lengths=document_lengths(N, 0))
    even, near = plan_shards(mask, N, 64, token_cost=0), plan_shards(mask, N, 64, token_cost=100_000)
    assert even.imbalance < near.imbalance and near.received.max() < even.received.max()
    cheapest = min(way.cost for way in even.ways.values())
    assert even.ways[even.way].cost <= 1.2 * cheapest


@pytest.mark.parametrize(("n", "ranks"), [(2**16, 1024), pytest.param(2**20, 1024, marks=pytest.mark.sweep)])
def test_a_thousand_ranks_in_bounded_memory(n: int, ranks: int) -> None:
    mask = causal() & documents(lengths=document_lengths(n, 0))
    tracemalloc.start()
    plan = plan_shards(mask, n, ranks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * 2**20
    assert plan.pairs.sum() == mask.pairs(n)
    assert plan.draw().splitlines()[-1] == "... and 1,008 more ranks"


# Pictures and errors.


def test_pictures() -> None:
    plan = plan_shards("causal & window(100)", 256, 2, block=64, owner=[0, 0, 1, 1])
    assert plan.draw() == str(plan)
    lines = plan.draw().splitlines()
    assert [line[:14] for line in lines[1:]] == ["rank 0  ██··  ", "rank 1  ▒▒██  "]
    assert lines[2].endswith("receives 128 from 0")
    html, picture = plan._repr_html_(), plan._repr_svg_()
    assert html.count("rank 1  ▒▒██") == 1 and "causal &amp; window(100)" in html and "<script" not in html
    assert picture.count(">rank ") == 2 and "receives 128 from 0" in picture and ">received</text>" in picture
    wide = plan_shards("causal", 2**16, 3, block=64)
    assert max(map(len, wide.draw().splitlines()[1:])) < 140


def test_digests_tell_plans_apart() -> None:
    ids = np.repeat([0, 1], [300, 212])
    other = ids.copy()
    other[300] = 0
    plans = [
        plan_shards(causal(), 512, 2),
        plan_shards(causal(), 513, 2),
        plan_shards(causal(), 512, 4),
        plan_shards(causal(), 512, 2, block=128),
        plan_shards(causal() & documents(ids), 512, 2),
        plan_shards(causal() & documents(other), 512, 2),
        plan_shards(causal() & where(lambda q, k: k % 2 == 0), 512, 2),
        plan_shards(causal() & where(lambda q, k: k % 3 == 0), 512, 2),
        plan_shards(causal() & keys(np.arange(512) < 500), 512, 2),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert lowtri.parallel.plan_shards(full(), 512, 2).digest == plan_shards("full", 512, 2).digest


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("causal", 512, 2), {"block": 100}, "block is 100.*multiples of 64.*block=64"),
        (("causal", 512, 2), {"block": 0}, "block"),
        (("causal", 512, 0), {}, "ranks"),
        (("causal", 0, 2), {}, "n is"),
        (("causal", 5.0, 2), {}, "n is"),
        (("causal", 512, 2), {"owner": [0, 1]}, r"owner is int64 \(2,\).*each of 8 blocks"),
        (("causal", 512, 2), {"owner": [2] * 8}, "a rank 0 .. 1"),
        (([], 512, 2), {}, "mask is an empty list.*one mask for each layer"),
        ((np.ones((4, 4), bool), 512, 2), {}, "table"),
        ((None, 512, 2), {}, "None"),
        ((lowtri.table(np.ones((4, 4), bool)), 512, 2), {}, "larger table"),
    ],
)
def test_errors(arguments: tuple, options: dict, words: str) -> None:
    with pytest.raises((CallError, MaskError)) as raised:
        plan_shards(*arguments, **options)
    assert re.search(words, str(raised.value), re.S), raised.value


def test_errors_of_a_plan() -> None:
    plan = plan_shards("causal", 512, 2)
    for ask in (plan.positions, plan.key_positions, plan.received_from):
        with pytest.raises(CallError, match=r"rank is 2, but the plan has the ranks 0 \.\. 1"):
            ask(2)
    with pytest.raises(CallError, match="mask is full, but the plan was made for causal"):
        plan.index(full())
